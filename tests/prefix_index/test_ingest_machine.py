"""Whatever happens to three engines and their frames, the index converges to what they hold."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from prefix_index import Index, WorkerFeed
from prefix_index import subscriber as subscriber_module
from prefix_index.blocks import BlockHash
from prefix_index.holdings import SHIFT
from prefix_index.subscriber import EventSubscriber
from tests.prefix_index.scenario import BLOCK, MODEL, Engine, EngineReplay, held_by

WORKERS = ("w0", "w1", "w2")
DIALECTS = ("vllm", "vllm-bytes", "vllm-old", "sglang")
worker_names = st.sampled_from(WORKERS)
# Few tokens, so that prompts share beginnings.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(
    lambda picks: [token for pick in picks for token in range(pick * 8, pick * 8 + BLOCK)]
)


class Follower:
    """One gateway's view of one engine."""

    def __init__(self, index: Index, name: str, engine: Engine, *, can_replay: bool) -> None:
        self.engine = engine
        self.feed = WorkerFeed(index, name, MODEL)
        self.subscriber = EventSubscriber(
            "inproc://none",
            name if can_replay else None,
            on_batch=lambda _, batch: self.feed.apply(batch),
            on_clear=self._clear,
        )
        self.has_lost = False
        # The newest frames are lost, and nobody can know it before the next one.
        self.is_behind = False
        self.sent: list[tuple[int, bytes]] = []

    def _clear(self, reason: str) -> None:
        self.feed.clear()
        # Behind a restart everything can still be had.
        self.has_lost = "lost" in reason or "moved on" in reason


class IngestMachine(RuleBasedStateMachine):
    """Three engines, one index; frames are taken, lost, repeated and late."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.index = Index(BLOCK)
        self.followers: dict[str, Follower] = {}
        self.seen: set[BlockHash] = set()
        self.patch = pytest.MonkeyPatch()
        engines: dict[str, Engine] = {}
        self.patch.setattr(
            subscriber_module, "Replay", lambda _, name, first: EngineReplay(engines, name, first)
        )
        for number, name in enumerate(WORKERS):
            engines[name] = Engine(DIALECTS[number % len(DIALECTS)])
        self.engines = engines
        self.is_set_up = False

    def teardown(self) -> None:
        self.patch.undo()
        self.loop.close()

    @precondition(lambda self: not self.is_set_up)
    @rule(dialects=st.permutations(DIALECTS), without_replay=st.sampled_from([None, *WORKERS]))
    def begin(self, dialects: list[str], without_replay: str | None) -> None:
        for name, dialect in zip(WORKERS, dialects, strict=False):
            self.engines[name] = engine = Engine(dialect)
            self.followers[name] = Follower(
                self.index, name, engine, can_replay=name != without_replay
            )
        self.is_set_up = True

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names, tokens=prompts, salt=st.sampled_from(["", "", "tenant-a"]))
    def store(self, name: str, tokens: list[int], salt: str) -> None:
        engine = self.engines[name]
        if salt and engine.is_sglang:
            salt = "tenant-b"
        engine.store(tokens, salt)
        engine.step()

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names, numbers=st.lists(st.integers(0, 50), max_size=4))
    def evict_in_one_step(self, name: str, numbers: list[int]) -> None:
        for number in numbers:
            self.engines[name].evict(number)
        self.engines[name].step()

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names, number=st.integers(0, 50))
    def offload(self, name: str, number: int) -> None:
        if self.engines[name].dialect != "vllm-old":
            self.engines[name].offload(number)
        self.engines[name].step()

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names)
    def reset(self, name: str) -> None:
        self.engines[name].reset()
        self.engines[name].step()

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names, is_told=st.booleans())
    def crash(self, name: str, is_told: bool) -> None:
        follower = self.followers[name]
        follower.engine.live.clear()
        follower.sent.clear()
        follower.engine.crash()
        follower.has_lost = follower.is_behind = False
        # Without a buffer to ask only the start time in its metrics shows every restart.
        if is_told or follower.subscriber._replay_endpoint is None:
            follower.subscriber.restart()

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names, number=st.integers(1, 3))
    def lose(self, name: str, number: int) -> None:
        follower = self.followers[name]
        if follower.engine.live and follower.subscriber._replay_endpoint is None:
            follower.has_lost = True
            follower.is_behind = number >= len(follower.engine.live)
        del follower.engine.live[:number]

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names, number=st.integers(1, 12))
    def lose_its_buffer_too(self, name: str, number: int) -> None:
        engine = self.engines[name]
        # A buffer always has the last batch.
        del engine._buffer[: min(number, len(engine._buffer) - 1)]
        del engine.live[:number]
        # Nobody can know it before the next batch.
        self.followers[name].has_lost = True

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names)
    def repeat_the_last(self, name: str) -> None:
        sent = self.followers[name].sent
        if sent:
            self.engines[name].live.insert(0, sent[-1])

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names, number=st.integers(1, 6))
    def deliver(self, name: str, number: int) -> None:
        self.take(name, number)

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names)
    def deliver_while_nobody_answers(self, name: str) -> None:
        self.engines[name].is_deaf = True
        self.take(name, 2)
        self.engines[name].is_deaf = False

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names)
    def look_whether_something_is_missing(self, name: str) -> None:
        self.run(self.followers[name].subscriber._repair(None))  # type: ignore[arg-type]

    @precondition(lambda self: self.is_set_up)
    @rule()
    def settle(self) -> None:
        for name in WORKERS:
            self.take(name, 1000)
            self.run(self.followers[name].subscriber._repair(None))  # type: ignore[arg-type]
            self.check_settled(name)

    @precondition(lambda self: self.is_set_up)
    @rule(name=worker_names)
    def start_over(self, name: str) -> None:
        """After a reset that arrives, nothing of what was lost before is left."""
        self.engines[name].reset()
        self.engines[name].step()
        self.take(name, 1000)
        self.run(self.followers[name].subscriber._repair(None))  # type: ignore[arg-type]
        self.followers[name].has_lost = False
        self.check_settled(name)

    def take(self, name: str, number: int) -> None:
        follower = self.followers[name]
        for _ in range(min(number, len(follower.engine.live))):
            sequence, payload = follower.engine.live.pop(0)
            if all(sequence > earlier for earlier, _ in follower.sent):
                follower.is_behind = False
            follower.sent.append((sequence, payload))
            parts = [b"kv", sequence.to_bytes(8, "big"), payload]
            self.run(follower.subscriber._take_live(parts, None))  # type: ignore[arg-type]
            if follower.subscriber._must_check:
                self.run(follower.subscriber._repair(None))  # type: ignore[arg-type]

    def check_settled(self, name: str) -> None:
        follower = self.followers[name]
        truth = follower.engine.truth()
        self.seen |= set(truth)
        found = held_by(self.index, name, iter(self.seen))
        expected: dict[BlockHash, set[Any]] = {block: set(tiers) for block, tiers in truth.items()}
        held = sum(self.index.holds(name, block) for block in self.seen)

        # Nothing is believed that is not there, in any tier.
        assert follower.is_behind or all(
            tiers <= expected.get(block, set()) for block, tiers in found.items()
        )
        assert held == len(found)
        # And all that is there is known, unless what was said of it is gone for good.
        if not follower.has_lost:
            assert found == expected
            for block, tiers in truth.items():
                packed = sum(number << SHIFT[tier] for tier, number in tiers.items())
                assert self.index.copies(name, block) == packed
        assert follower.subscriber.decode_errors == 0

    def run(self, coroutine: Any) -> None:
        self.loop.run_until_complete(coroutine)


TestIngest = IngestMachine.TestCase
TestIngest.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
