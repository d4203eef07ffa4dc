"""Reported faults of event-fed indexes: each as it was reported, and its whole kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest

from gateway.config import Settings
from gateway.fleet.event_health import EventHealth
from gateway.fleet.fleet import Fleet
from gateway.routing.cost import Candidate, CostModel, estimate_s
from gateway.routing.dispatch import Dispatcher, Outcome, Plan
from gateway.routing.outcome import Usage
from gateway.routing.pool import Pool
from prefix_index import AllBlocksCleared, BlockStored, Index, hash_blocks, root_hash
from tests.gateway.feed_parts import Telling, fed, telling
from tests.gateway.routing_parts import BLOCK, chat, ids, prompt_reader
from tests.prefix_index.publisher import Publisher
from tests.prefix_index.sized_engine import SizedEngine
from tests.support import free_port, poll_until

RULE = "Handbook rule 7: refunds are accepted within thirty days of delivery. "
HANDBOOK = RULE * 120
IDS = list(range(100, 100 + 8 * BLOCK))
OURS = hash_blocks(IDS, BLOCK, root_hash("m"))


def names(*numbers: int) -> list[int]:
    return [0x91AA0000 + number for number in numbers]


def stored(*numbers: int, parent: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the event of blocks h1, h2, ... of IDS, as the wire has it."""
    first = numbers[0] - 1
    return {
        "type": "BlockStored",
        "block_hashes": names(*numbers),
        "parent_block_hash": None if parent is None else names(parent)[0],
        "token_ids": IDS[first * BLOCK : (first + len(numbers)) * BLOCK],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


def removed(*numbers: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": names(*numbers), "medium": medium}


class Shop:
    """A gateway's fleet over engines that publish, and what it believes."""

    def __init__(self, fleet: Fleet, publishers: Sequence[Publisher]) -> None:
        self.fleet = fleet
        self.publishers = publishers
        self.routes = Dispatcher(fleet.pools, seed=0)

    @property
    def pool(self) -> Pool:
        return self.fleet.pools[0]

    @property
    def index(self) -> Index:
        assert self.pool.index is not None
        return self.pool.index

    async def publish(
        self, worker: int, *events: Any, live: bool = True, kept: bool = True, rank: int = 0
    ) -> None:
        payload = msgspec.msgpack.encode([1.0, list(events), rank])
        await self.publishers[worker].publish(payload, live=live, kept=kept)

    def hits(self, chain: Sequence[bytes] = OURS) -> dict[str, int]:
        """Return the leading blocks of a chain that each worker is credited with."""
        return {worker: hit.total // BLOCK for worker, hit in self.index.match(chain).items()}

    def predicted(self, plan: Plan) -> dict[str, int]:
        """Return the hit tokens that a choice credits each worker with."""
        return {c.worker: c.hit_tokens for c in self.routes.choose(plan).input.candidates}

    async def predicts(self, plan: Plan, expected: dict[str, int]) -> None:
        """Wait until a choice credits each worker with exactly these hit tokens."""
        with contextlib.suppress(AssertionError):
            await poll_until(lambda: self.predicted(plan) == expected)
        assert self.predicted(plan) == expected

    async def has_read(self, worker: int) -> None:
        """Wait until everything that a worker published was taken."""
        feed, last = self.fleet.feeds[f"w{worker + 1}"], self.publishers[worker].sequence - 1
        await poll_until(lambda: feed.subscriber.last_sequence == last)

    async def credits(self, **hits: int) -> None:
        """Wait until these are exactly the hits of IDS."""
        with contextlib.suppress(AssertionError):
            await poll_until(lambda: self.hits() == hits)
        assert self.hits() == hits


@asynccontextmanager
async def shop(
    number: int = 2, *, replay: bool = True, workers: list[dict[str, Any]] | None = None
) -> AsyncIterator[Shop]:
    """Run a fleet over engines w1, w2, ... with a publisher each."""
    async with contextlib.AsyncExitStack() as stack:
        publishers = [
            await stack.enter_async_context(Publisher(free_port(), free_port(), topic=b""))
            for _ in range(number)
        ]
        url = await stack.enter_async_context(telling(Telling()))
        workers = workers or [
            {
                "id": f"w{at}",
                "kv_events": publisher.endpoint,
                **({"kv_replay": publisher.replay_endpoint} if replay else {}),
            }
            for at, publisher in enumerate(publishers, start=1)
        ]
        for worker in workers:
            worker["url"] = url
            if worker.get("kv_events") == "all":
                worker["kv_events"] = [publisher.endpoint for publisher in publishers]
        config = {"name": "chat", "models": ["m"], "engine": "vllm", "workers": workers}
        fleet = Fleet(Settings.model_validate({"pools": [config]}))
        fleet.pools[0].use_prompts(prompt_reader(), Index(BLOCK))
        try:
            await fleet.start()
            for publisher in publishers:
                await publisher.subscribed()
            yield Shop(fleet, publishers)
        finally:
            await fleet.stop()


@pytest.mark.parametrize("replay", [False, True], ids=["replay off", "replay on"])
async def test_r01_an_engine_restarts_in_place(replay: bool) -> None:
    async with shop(replay=replay) as s:
        await s.publish(1, stored(1, 2, 3))
        await s.publish(0, stored(1, 2))
        await s.publish(0, stored(3, parent=2))
        await s.credits(w1=3, w2=3)
        restarts = s.fleet.feeds["w1"].restarts
        # The new process: other names, and the sequence starts at 0 again.
        s.publishers[0].sequence = 0
        s.publishers[0].buffer.clear()
        await s.publish(0, stored(1, block_hashes=[7]))

        await s.credits(w1=1, w2=3)
        assert s.fleet.feeds["w1"].restarts == restarts + 1
        assert s.fleet.feeds["w2"].restarts <= 1


@pytest.mark.parametrize("offers", ["2 to 4", "nothing", "silence", "no socket"])
async def test_r03_events_are_lost(offers: str) -> None:
    async with shop(1, replay=offers != "no socket") as s:
        await s.publish(0, stored(1))
        await s.publish(0, stored(2, parent=1))
        await s.credits(w1=2)
        feed = s.fleet.feeds["w1"]
        for number in (3, 4, 5):
            await s.publish(0, stored(number, parent=number - 1), live=False)
        if offers == "nothing":
            s.publishers[0].buffer.clear()
        s.publishers[0].answers = offers != "silence"
        await s.publish(0, stored(6, parent=5))

        assert feed.subscriber.gaps <= 1
        if offers == "2 to 4":
            await s.credits(w1=6)
            assert feed.ingest.stored == 6  # once each
            assert feed.subscriber.losses == 0
        else:
            await poll_until(lambda: feed.subscriber.losses == 1)
            # Nothing is believed any more, and the end of a chain is no root.
            await s.credits()
            assert feed.ingest.waiting == 1
            assert s.fleet.index_state(s.pool.workers["w1"])["losses"] == 1
        assert feed.subscriber.gaps == 1


async def test_r05_a_hash_is_stored_twice_and_removed_once() -> None:
    async with shop(1) as s:
        await s.publish(0, stored(1, 2, 3))
        await s.publish(0, stored(1, 2, 3, 4))
        await s.publish(0, removed(3))
        await s.publish(0, stored(5, parent=4))
        await s.credits(w1=5)
        await s.publish(0, removed(3))
        await s.credits(w1=2)
        await s.publish(0, removed(3))
        await s.publish(0, stored(3, parent=2))
        # The third removal did not count below zero, so one copy is enough again.
        await s.credits(w1=5)


async def test_r07_the_index_does_not_depend_on_how_an_engine_hashes() -> None:
    async with shop() as s:
        plan = await s.routes.plan(s.pool, chat("q", system=HANDBOOK), in_full=True)
        assert plan.prompt is not None
        tokens = list(plan.prompt.token_ids[: 2 * BLOCK])
        for worker, engine_hashes in enumerate(([0x91AA, 0x17B3], [0x5500, 0x0DE1])):
            await s.publish(worker, stored(1, 2, token_ids=tokens, block_hashes=engine_hashes))
        await poll_until(lambda: len(s.hits(plan.prompt.block_hashes)) == 2)  # type: ignore[union-attr]

        assert s.hits(plan.prompt.block_hashes) == {"w1": 2, "w2": 2}
        decision = s.routes.choose(plan)
        assert [c.hit_tokens for c in decision.input.candidates] == [2 * BLOCK, 2 * BLOCK]


@pytest.mark.parametrize(
    "engine_hashes",
    [["text", "hashes"], [1.5, 2.5], [None, None], [[1], [2]], [b"x" * 40, b"y" * 40]],
    ids=["text", "fractions", "null", "lists", "longer than any digest"],
)
async def test_r07_a_kind_of_hash_that_nobody_knows_is_counted_and_shown(
    engine_hashes: list[Any],
) -> None:
    async with shop() as s:
        await s.publish(1, stored(1, 2))
        for _ in range(3):
            await s.publish(0, stored(1, 2, block_hashes=engine_hashes))
        feed = s.fleet.feeds["w1"]
        await poll_until(lambda: feed.subscriber.decode_errors == 3)
        feed.check()

        assert s.pool.workers["w1"].mode == "approximate"
        assert feed.health is EventHealth.UNDECODABLE
        await s.credits(w2=2)


async def test_r07_events_without_tokens_name_nothing() -> None:
    async with shop(1) as s:
        await s.publish(0, stored(1, 2, token_ids=[], block_size=0, medium="CPU"))
        await s.publish(0, stored(1))
        await s.credits(w1=1)
        assert s.fleet.feeds["w1"].ingest.rejected == 2


async def test_r27_several_ranks_behind_one_url() -> None:
    worker = {"id": "w1", "kv_events": "all"}
    async with shop(2, workers=[worker]) as s:
        plan = await s.routes.plan(s.pool, chat("q", system=HANDBOOK), in_full=True)
        assert plan.prompt is not None
        tokens = list(plan.prompt.token_ids)
        num_blocks = len(tokens) // BLOCK
        every = {"token_ids": tokens[: num_blocks * BLOCK], "block_hashes": [*range(num_blocks)]}
        await s.publish(0, {**stored(1), **every}, rank=0)
        await poll_until(lambda: s.hits(plan.prompt.block_hashes) == {"w1#0": num_blocks})  # type: ignore[union-attr]
        decision = s.routes.choose(plan)
        ticket = s.routes.admit(plan, decision)

        assert {c.worker: c.hit_tokens for c in decision.input.candidates}["w1#1"] == 0
        # The rank goes along as the engine wants it (see the tests of outbound headers).
        assert (ticket.worker.id, ticket.worker.rank) == ("w1#0", 0)


async def test_r29_a_block_size_is_learned_from_events_and_a_conflict_reported() -> None:
    async with shop(4) as s:
        sizes = [BLOCK, 4 * BLOCK, 528, 24]
        for worker, size in enumerate(sizes):
            await s.publish(worker, stored(1, token_ids=list(range(size)), block_size=size))
        workers = [s.pool.workers[f"w{at}"] for at in (1, 2, 3, 4)]
        await poll_until(lambda: [worker.block_size for worker in workers] == sizes)
        states = [s.fleet.index_state(worker) for worker in workers]

        assert [state["block_size"] for state in states] == sizes
        assert [state["health"] for state in states] == ["ok"] * 3 + ["kv_events_block_size"]
        assert "pools[].block_size" in states[3]["why"]
        for length in (1, 16, 100, 528, 529, 1000):
            plan = await s.routes.plan(s.pool, ids(list(range(length))), in_full=True)
            # Tokens are compared, and a prompt shorter than one block of a worker is no error.
            hits = s.predicted(plan)
            usable = [min((length - 1) // size, 1) * size for size in sizes[:3]]
            assert hits == {**dict(zip(("w1", "w2", "w3"), usable, strict=True)), "w4": 0}


# Runs of tokens that prompts are put together from, so that they part anywhere in large blocks.
RUNS = [list(range(1000 * at, 1000 * at + length)) for at, length in enumerate((37, 64, 200, 530))]


@pytest.mark.parametrize("seed", range(6))
async def test_r29_hits_equal_what_engines_of_three_block_sizes_hold(seed: int) -> None:
    """Through socket, feed, index and choice: stores, removals, offloads, resets, restarts."""
    rng = Random(seed)
    prompts = [
        [token for run in rng.choices(RUNS, k=rng.randrange(1, 6)) for token in run]
        for _ in range(6)
    ]
    async with shop(3) as s:
        sent: list[list[Any]] = [[], [], []]
        engines = [
            SizedEngine(size, lambda *events, to=to: to.extend(events))
            for size, to in zip((16, 64, 528), sent, strict=True)
        ]
        for _ in range(25):
            at = rng.randrange(3)
            engine, publisher = engines[at], s.publishers[at]
            match rng.randrange(12):
                case 0:
                    engine.reset()
                case 1:
                    engine.forget()
                    publisher.sequence = 0
                    publisher.buffer.clear()
                    sent[at].append(AllBlocksCleared())
                case 2 | 3 | 4:
                    engine.remove(rng.randrange(100), rng.choice(("gpu", "cpu")))
                case 5:
                    engine.offload(rng.choice(prompts))
                case _:
                    engine.store(rng.choice(prompts))
            if sent[at]:
                await s.publish(at, *sent[at])
                sent[at].clear()

        for tokens in prompts:
            plan = await s.routes.plan(s.pool, ids(tokens), in_full=True)
            expected = {f"w{at}": e.hit_tokens(tokens[:-1]) for at, e in enumerate(engines, 1)}
            await s.predicts(plan, expected)
        assert [s.fleet.feeds[f"w{at}"].ingest.rejected for at in (1, 2, 3)] == [0, 0, 0]


async def test_r29_an_engine_that_says_a_size_and_sends_another_is_not_paired() -> None:
    async with fed() as worker:
        index = worker.pool.index
        assert index is not None
        worker.take(BlockStored([1], None, list(range(16)), 528))
        assert (index.num_blocks, worker.feed.ingest.implausible) == (0, 1)


async def test_r35_a_worker_that_reports_far_less_than_was_predicted_loses_its_bonus() -> None:
    async with shop(2) as s:
        s.routes = Dispatcher(s.fleet.pools, seed=0, on_finish=s.fleet.finished)
        plan = await s.routes.plan(s.pool, chat("q", system=HANDBOOK), in_full=True)
        assert plan.prompt is not None
        tokens, num_blocks = list(plan.prompt.token_ids), plan.num_tokens // BLOCK
        every = {"token_ids": tokens[: num_blocks * BLOCK], "block_hashes": [*range(num_blocks)]}
        await s.publish(0, {**stored(1), **every})
        await poll_until(lambda: "w1" in s.hits(plan.prompt.block_hashes))  # type: ignore[union-attr]
        s.pool.workers["w1"].reports_cached = True
        for _ in range(8):
            again = await s.routes.plan(s.pool, chat("q", system=HANDBOOK), in_full=True)
            decision = s.routes.choose(again)
            if decision.worker != "w1":
                break
            ticket = s.routes.admit(again, decision)
            ticket.first_token()
            ticket.finish(Outcome.OK, Usage(again.num_tokens, 5, 0))
            # The engine stores what it computed, as its events say each time.
            await s.publish(0, {**stored(1), **every})
            await s.has_read(0)

        # Either it was avoided at last, or nothing is claimed for it any more.
        hits = {c.worker: c.hit_tokens for c in decision.input.candidates}
        assert hits["w1"] <= plan.num_tokens // 2


async def test_r37_an_endpoint_that_is_gone_for_a_moment_keeps_its_blocks() -> None:
    async with shop(1) as s:
        publisher = s.publishers[0]
        await s.publish(0, stored(1, 2, 3))
        await s.credits(w1=3)
        s.fleet.unfollow(s.pool.workers["w1"])
        await asyncio.sleep(0)
        await s.publish(0, stored(4, parent=3), live=False)
        assert s.hits() == {"w1": 3}

        # Whoever follows it again gets the whole from its buffer.
        s.fleet.follow(s.pool.workers["w1"])
        await publisher.subscribed()
        await poll_until(lambda: s.hits().get("w1") == 4)
        await s.publish(0, removed(4, 3))
        await s.credits(w1=2)


@pytest.mark.parametrize("medium", ["CPU", "STORAGE", "SHARED_STORAGE"])
@pytest.mark.parametrize("is_told_tokens", [True, False], ids=["tokens", "names alone"])
async def test_t15_a_block_leaves_the_gpu_but_stays_on_a_lower_tier(
    medium: str, is_told_tokens: bool
) -> None:
    async with shop() as s:
        plan = await s.routes.plan(s.pool, chat("q", system=HANDBOOK), in_full=True)
        assert plan.prompt is not None
        held = {"token_ids": list(plan.prompt.token_ids[: 2 * BLOCK])}
        lower = {"medium": medium} | (held if is_told_tokens else {"token_ids": []})
        await s.publish(1, stored(1, 2, **held))
        await s.publish(0, stored(1, 2, **held))
        await s.publish(0, stored(1, 2, **lower))
        await s.publish(0, removed(1, 2))
        await s.has_read(0)
        await s.predicts(plan, {"w1": 2 * BLOCK, "w2": 2 * BLOCK})

        # The credit is there, and it is worth less than that of the device and more than none.
        decision = s.routes.choose(plan)
        model = CostModel(1e-3, 0.0, 0.01, 0.0, 20_000.0, 10_000.0, 5_000.0)
        below, device = (
            estimate_s(c, model, decision.input.now_s, 1000, c.hit_tokens, 10.0).cost
            for c in decision.input.candidates
        )
        nothing = estimate_s(Candidate("w"), model, decision.input.now_s, 1000, 0, 10.0).cost
        assert device < below < nothing

        await s.publish(0, removed(1, 2, medium=medium))
        await s.predicts(plan, {"w1": 0, "w2": 2 * BLOCK})
