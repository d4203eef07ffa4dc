"""Published failures of other routers that a choice must not repeat; ids are those of the cases."""

from __future__ import annotations

from collections import Counter, deque
from random import Random
from typing import Any

import pytest

from gateway.routing.choose import Candidate, Reason, RouteInput, choose
from gateway.routing.cost import CostModel
from gateway.routing.dispatch import Dispatcher, Outcome, Plan, Ticket, Usage
from gateway.routing.pool import Pool, Worker
from gateway.routing.ring import Ring
from prefix_index.chat import ChatTemplate
from prefix_index.index import Index
from prefix_index.prompts import PromptReader
from tests.gateway.engine_sim import Fleet
from tests.gateway.routing_parts import (
    BLOCK,
    CHATML,
    H100,
    Clock,
    byte_tokenizer,
    chat,
    dispatcher,
    hold,
    ids,
    is_idle,
    make_pool,
)

DOCUMENT = "".join(Random(1).choices("abcdefgh ", k=8000))


def text(seed: int, num_chars: int = 500) -> str:
    return "".join(Random(seed).choices("abcdefgh ", k=num_chars))


def admit(routes: Dispatcher, plan: Plan) -> Ticket:
    return routes.admit(plan, routes.choose(plan))


def fleet(
    num_workers: int = 4, *, slots: int = 8, decode_s: float = 1.0
) -> tuple[Pool, Dispatcher, Fleet]:
    pool, clock = make_pool(num_workers), Clock()
    routes = dispatcher(pool, clock)
    return pool, routes, Fleet(pool, routes, clock, speed=H100, slots=slots, decode_s=decode_s)


async def closed_loop(sim: Fleet, plans: list[Plan], concurrency: int) -> list[Ticket]:
    todo, tickets = deque(plans), []

    def next_one() -> None:
        if todo:
            tickets.append(sim.send(todo.popleft(), done=next_one))

    for _ in range(concurrency):
        next_one()
    sim.run()
    return tickets


# R10: a burst between two load reports. What comes of other ends: see test_dispatch_fleet.py.


@pytest.mark.parametrize("outcome", list(Outcome))
async def test_r10_a_request_leaves_the_count_however_it_ends(outcome: Outcome) -> None:
    pool, clock = make_pool(4), Clock()
    routes = dispatcher(pool, clock)
    tickets = [admit(routes, await routes.plan(pool, chat(text(i)))) for i in range(40)]
    served = Counter(ticket.worker.id for ticket in tickets)
    assert all(7 <= served[worker_id] <= 13 for worker_id in pool.workers), served
    for ticket in tickets:
        ticket.finish(outcome)

    assert is_idle(pool)


# R14: scaling up and down moves only the keys it must.


@pytest.mark.parametrize("size", [1, 2, 3])
def test_r14_a_ninth_worker_moves_its_share_of_the_sessions_and_gives_it_back(size: int) -> None:
    ring = Ring([f"w{k}" for k in range(8)])
    keys = [f"0:|session|{k}" for k in range(10_000)]

    def mapped() -> list[list[str]]:
        return [list(ring.home(key, size)) for key in keys]

    eight = mapped()
    ring.add("w8")
    nine = mapped()
    moved = sum(before[0] != after[0] for before, after in zip(eight, nine, strict=True))
    assert moved / len(keys) <= 1 / 9 + 0.03
    ring.remove("w8")
    assert mapped() == eight
    ring.remove("w3")
    stayed = [b for b, a in zip(eight, mapped(), strict=True) if b == a]
    assert stayed == [home for home in eight if "w3" not in home]


# R16: a session header that says nothing.


@pytest.mark.parametrize("value", [None, "", "   ", "null", "none", "undefined", "NULL"])
async def test_r16_a_session_header_that_says_nothing_makes_no_hot_spot(value: str | None) -> None:
    pool, clock = make_pool(4, affinity_keys=("session", "prefix")), Clock()
    routes = dispatcher(pool, clock)
    headers = {} if value is None else {"x-session-id": value}
    tickets = [
        admit(routes, await routes.plan(pool, chat(text(i), headers=headers))) for i in range(200)
    ]
    served = Counter(ticket.worker.id for ticket in tickets)

    assert len(served) == 4
    assert max(served.values()) <= 60, served
    for ticket in tickets:
        ticket.finish(Outcome.OK)


# R24: slow health checks alone never empty a pool.


@pytest.mark.parametrize("num_workers", [1, 2, 4])
async def test_r24_slow_health_checks_alone_never_leave_a_pool_without_workers(
    num_workers: int,
) -> None:
    pool, clock = make_pool(num_workers), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("hello"))
    for _ in range(10):
        for worker in pool.workers.values():
            worker.health.check_failed(clock.now_s, timed_out=True, is_streaming=False)
        assert routes.choose(plan).worker in pool.workers


# R29: tokens are compared, whatever the blocks.


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 100, 527, 528, 529, 1000, 1057])
@pytest.mark.parametrize("mode", ["exact", "approximate"])
async def test_r29_workers_with_other_block_sizes_are_compared_by_tokens_and_no_error(
    length: int, mode: str
) -> None:
    pool, clock = make_pool(4, mode=mode), Clock()
    sizes = {"w0": BLOCK, "w1": 64, "w2": 528, "w3": 24}
    for worker_id, size in sizes.items():
        pool.workers[worker_id].block_size = size
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, ids(list(range(length))), in_full=True)
    for worker_id in pool.workers:
        hold(pool, worker_id, plan.prompt)
    seen = {c.worker: c for c in routes.choose(plan).input.candidates}

    for worker_id in ("w0", "w1", "w2"):
        size = sizes[worker_id]
        assert seen[worker_id].hit_tokens == (length - 1) // size * size
        assert seen[worker_id].mode == mode
    # Our blocks are no part of theirs: nothing is claimed about them.
    assert (seen["w3"].hit_tokens, seen["w3"].mode) == (0, "text")


@pytest.mark.parametrize("size", [16, 32, 48, 64, 80, 528])
@pytest.mark.parametrize("num_fast", [0, 1, 2, 3, 7, 20, 40])
async def test_r29_an_unfinished_block_is_given_up_where_it_is_slowest_to_restore(
    size: int, num_fast: int
) -> None:
    pool, clock = make_pool(1), Clock()
    pool.workers["w0"].block_size = size
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, ids(list(range(1000))), in_full=True)
    assert plan.prompt is not None
    assert pool.index is not None
    hashes, root = plan.prompt.block_hashes, plan.prompt.root
    if num_fast:
        pool.index.store("w0", hashes[:num_fast], root)
    pool.index.store("w0", hashes[:50], root, "cpu")
    (seen,) = routes.choose(plan).input.candidates

    whole = 50 * BLOCK // size * size
    assert seen.hit_gpu == min(num_fast * BLOCK, whole)
    assert seen.hit_cpu == whole - seen.hit_gpu


@pytest.mark.parametrize("size", [None, 16, 64, 528])
async def test_r29_what_a_sibling_computes_counts_in_whole_blocks_too(size: int | None) -> None:
    pool, clock = make_pool(1), Clock()
    pool.workers["w0"].block_size = size
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, ids(list(range(1000))), in_full=True)
    admit(routes, plan)
    again = await routes.plan(pool, ids(list(range(1000))), in_full=True)
    (seen,) = routes.choose(again).input.candidates

    assert seen.pending_tokens == 999 // (size or BLOCK) * (size or BLOCK)


async def test_r29_a_silent_worker_with_large_blocks_is_modelled_in_whole_ones() -> None:
    pool, clock = make_pool(1, mode="approximate"), Clock()
    pool.workers["w0"].block_size = 64
    routes = dispatcher(pool, clock)
    for length, hit in ((1000, 0), (1000, 960), (200, 192), (63, 0), (2000, 960)):
        plan = await routes.plan(pool, ids(list(range(length))), in_full=True)
        ticket = admit(routes, plan)
        assert ticket.predicted_hit_tokens == hit
        ticket.finish(Outcome.OK, Usage(length, 1, hit))


@pytest.mark.parametrize(("tokens", "winner"), [((992, 960, 528), "w0"), ((512, 960, 528), "w1")])
def test_r29_the_most_tokens_win_and_not_the_most_blocks(
    tokens: tuple[int, int, int], winner: str
) -> None:
    candidates = [Candidate(f"w{k}", hit_gpu=hit, model=H100) for k, hit in enumerate(tokens)]

    assert choose(RouteInput(0.0, 1000, candidates)).worker == winner


# R31: two base models share nothing.


async def test_r31_two_models_never_share_workers_or_keys() -> None:
    def model_pool(name: str, workers: tuple[str, str]) -> Pool:
        tokenizer = byte_tokenizer()
        template = ChatTemplate(CHATML, special_tokens=tokenizer.special_tokens)
        reader = PromptReader(tokenizer, template, model=name, block_size=BLOCK)
        own = [Worker(worker_id, "", mode="exact") for worker_id in workers]
        return Pool(name, models=[name], reader=reader, index=Index(BLOCK), workers=own)

    pools = [model_pool("qwen3", ("q0", "q1")), model_pool("llama3_1", ("l0", "l1"))]
    routes = Dispatcher(pools, clock=Clock(), seed=1)
    blocks: dict[str, set[bytes]] = {}
    for turn in range(50):
        for name, own in (("qwen3", {"q0", "q1"}), ("llama3_1", {"l0", "l1"})):
            pool = routes.pool_for(name)
            assert pool is not None
            plan = await routes.plan(pool, chat("same text " * 50, model=name), in_full=True)
            ticket = admit(routes, plan)
            assert ticket.worker.id in own
            assert plan.prompt is not None
            blocks.setdefault(name, set()).update(plan.prompt.block_hashes)
            hold(pool, ticket.worker.id, plan.prompt)
            ticket.finish(Outcome.OK, Usage(plan.num_tokens, 1, 0))
            assert turn == 0 or ticket.predicted_hit_tokens > 0
    assert not blocks["qwen3"] & blocks["llama3_1"]


# 35: a miss goes where the load is least, not where the cache is smallest.


async def test_misses_go_by_load_however_little_a_worker_has_cached() -> None:
    pool, clock = make_pool(3), Clock()
    routes = dispatcher(pool, clock)
    for i in range(20):
        for worker_id in ("w1", "w2"):
            hold(pool, worker_id, (await routes.plan(pool, chat(text(i)))).prompt)
    queue = [await routes.plan(pool, chat(text(100 + i, 3000)), in_full=True) for i in range(4)]
    for plan in queue:
        routes.admit(plan, routes.choose(plan, ["w1", "w2"]))

    for i in range(4):
        assert routes.choose(await routes.plan(pool, chat(text(900 + i)))).worker != "w0"


# 36, 37: requests one after another, each alone, still spread.


@pytest.mark.parametrize("model", [H100, None], ids=["measured", "new"])
async def test_misses_one_after_another_spread_although_nothing_is_in_flight(
    model: CostModel | None,
) -> None:
    pool, clock = make_pool(4, model=model), Clock()
    routes = dispatcher(pool, clock)
    served: Counter[str] = Counter()
    for i in range(400):
        plan = await routes.plan(pool, chat(text(i)))
        ticket = admit(routes, plan)
        served[ticket.worker.id] += 1
        clock.now_s += 0.5
        ticket.finish(Outcome.CLIENT_CLOSED)

    assert max(served.values()) <= 160, served
    assert len(served) == 4


# 38: a hot prefix gets a second home by itself, and only when it needs one.


async def test_a_hot_document_gets_a_second_home_once_its_holder_is_behind() -> None:
    for concurrency, at_least, at_most in ((1, 1, 1), (32, 2, 4)):
        pool, routes, sim = fleet()
        texts = [f"{DOCUMENT} Question {i}: {text(i, 40)}" for i in range(100)]
        first = await routes.plan(pool, chat(texts[0]), in_full=True)
        await closed_loop(sim, [first], 1)
        plans = [await routes.plan(pool, chat(t), in_full=True) for t in texts[1:]]
        await closed_loop(sim, plans, concurrency)
        computed = [u for engine in sim.engines.values() for u in engine.prefilled if u > 4000]

        assert at_least <= len(computed) <= at_most, (concurrency, computed)
        assert is_idle(pool)


# 39: affinity fades with queueing: a slow worker does not collect requests.


class Uneven(Fleet):
    """A fleet in which w0 is slower than the others."""

    def __init__(self, *args: Any, slow: CostModel, **options: Any) -> None:
        super().__init__(*args, **options)
        self._speeds = {"w0": slow}
        self._usual = options["speed"]

    def _advance(self, worker_id: str) -> None:
        self._speed = self._speeds.get(worker_id, self._usual)
        super()._advance(worker_id)


async def test_a_slow_worker_gets_less_of_uniform_prompts_and_no_tail_grows() -> None:
    pool, clock = make_pool(4), Clock()
    routes = dispatcher(pool, clock)
    slow = CostModel(4 * H100.token_s, H100.attention_s, H100.step_s, H100.context_s)
    sim = Uneven(pool, routes, clock, speed=H100, slots=8, decode_s=0.2, slow=slow)
    plans = [await routes.plan(pool, chat(text(i, 2000)), in_full=True) for i in range(400)]
    tickets = await closed_loop(sim, plans, 16)
    served = Counter(ticket.worker.id for ticket in tickets)
    ttfts = sorted(ticket.ttft_s or 0.0 for ticket in tickets)

    assert served["w0"] < min(served[w] for w in ("w1", "w2", "w3")), served
    assert ttfts[int(0.99 * len(ttfts))] < 20 * ttfts[len(ttfts) // 2]


# 40: the index learns a prefix wherever the request went, also by fallback.


async def test_a_prefix_served_by_fallback_is_found_there_the_next_time() -> None:
    pool, clock = make_pool(3, mode="approximate"), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("a story " * 60))
    ticket = routes.admit(plan, routes.choose(plan, ["w0", "w1"]))
    assert ticket.decision.reason is Reason.ONLY_CANDIDATE
    ticket.first_token()
    ticket.finish(Outcome.OK)

    assert routes.choose(plan).worker == "w2"


# 41: who cannot be chosen does not count in any comparison.


@pytest.mark.parametrize("why", ["draining", "ejected", "not_ready", "excluded"])
@pytest.mark.parametrize("mode", ["cost", "strict", "text", "least_load"])
def test_an_idle_worker_that_is_out_changes_nothing(why: str, mode: Any) -> None:
    def others() -> list[Candidate]:
        return [
            Candidate("w1", in_flight=5, context_tokens=5000, hit_gpu=900, model=H100),
            Candidate("w2", in_flight=6, context_tokens=6000, model=H100),
        ]

    out = Candidate("w0", eligible=False, why=why, hit_gpu=960, model=H100)
    ring = ["w0", "w2", "w1"]
    with_it = choose(RouteInput(0.0, 1000, [out, *others()], mode=mode, ring=ring))
    without = choose(RouteInput(0.0, 1000, others(), mode=mode, ring=ring))

    assert (with_it.worker, with_it.tied) == (without.worker, without.tied)


# 42: a conversation that had to spill comes back to the worker that is warm.


async def test_a_conversation_spilled_in_a_short_contention_returns_to_its_warm_worker() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    turns = [DOCUMENT + text(9, 400 * turn) for turn in range(1, 4)]
    plans = [await routes.plan(pool, chat(turn), in_full=True) for turn in turns]
    hold(pool, "w0", plans[0].prompt)
    other = await routes.plan(pool, chat(text(5, 30_000)), in_full=True)
    contention = routes.admit(other, routes.choose(other, ["w1"]))
    spilled = admit(routes, plans[1])
    assert spilled.worker.id == "w1"
    spilled.finish(Outcome.CLIENT_CLOSED)
    contention.finish(Outcome.OK)

    assert admit(routes, plans[2]).worker.id == "w0"


# 43, 44: load is charged before anything is awaited, and every request moves it.


async def test_fifty_simultaneous_requests_see_each_other() -> None:
    pool, clock = make_pool(4), Clock()
    routes = dispatcher(pool, clock)
    plans = [await routes.plan(pool, chat(text(i))) for i in range(50)]
    loads = []
    for plan in plans:
        admit(routes, plan)
        loads.append(sum(worker.books.in_flight for worker in pool.workers.values()))

    assert loads == list(range(1, 51))
    assert max(worker.books.in_flight for worker in pool.workers.values()) <= 14
