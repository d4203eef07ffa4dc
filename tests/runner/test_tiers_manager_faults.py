"""Whatever a tier does, a request gets right blocks or fewer, soon, and nothing is left pinned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from prefix_index.events import BlockRemoved
from runner.kvkeys import BlockChain, event_hash
from runner.tiers.health import FIRST_PAUSE_S, MAX_PAUSE_S, Health
from runner.tiers.types import TierName
from tests.runner.test_tiers_manager import PEER, PROMPT, holding
from tests.runner.tier_parts import Gate, ManualClock, Rig, ScriptedPeers, ScriptedStore, payload_of

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(**parts: object) -> Rig:
        rigs.append(Rig(**parts))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.tiers.close()


class Case:
    """A prompt that one tier holds, and ways to make it go wrong at a block."""

    def __init__(self, tier: TierName, make_rig: MakeRig, **parts: object) -> None:
        self.tier = tier
        self.store = ScriptedStore() if tier in ("remote", "peer") else ScriptedStore(32)
        self.ask: dict[str, object] = {}
        if tier == "cpu":
            parts["host_slots"] = 32
        elif tier == "peer":
            peers = ScriptedPeers()
            parts["peers"] = peers
            self.ask["source"] = PEER
        else:
            parts[tier] = self.store
        self.rig = make_rig(**parts)
        if tier == "peer":
            self.chain = self.rig.chain(PROMPT)
            self.store = holding(self.chain)
            peers.stores["http://a:1"] = self.store
        else:
            self.chain = self.rig.compute(PROMPT)
            self.rig.settle()
            self.rig.forget_pool()
            self.rig.events.clear()

    def slot(self, at: int) -> int:
        return self.rig.tiers._tiers[self.tier].books.get(self.chain.keys[at]).slot

    def spoil(self, fault: str, at: int) -> None:
        """Make the read of block ``at`` go wrong."""
        if fault == "damaged" and self.tier == "cpu":
            self.rig.host._arena.view(self.slot(at))[0] ^= 1
        elif fault == "damaged":
            self.store.damage(self.chain.keys[at])
        elif self.tier == "cpu":
            self.rig.host.invalidate([self.slot(at)])
        else:
            self.store.lose(self.chain.keys[at])

    def restore(self):
        return self.rig.restore(self.chain, **self.ask)


TIERS = ["cpu", "disk", "remote", "peer"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("fault", ["damaged", "missing"])
@pytest.mark.parametrize("at", [0, 4, 7, 8, 9])
def test_a_bad_block_cuts_the_hit_there_and_is_not_tried_again(
    make_rig: MakeRig, tier: TierName, fault: str, at: int
) -> None:
    case = Case(tier, make_rig)
    case.spoil(fault, at)
    done = case.restore()
    assert done is not None
    assert (done.num_blocks, done.outcome) == (at, fault)
    stats = case.rig.stats(tier)
    assert stats.load_failed_total == 1
    if tier != "peer":
        assert stats.damaged_total == (fault == "damaged")
        medium = {"cpu": "CPU", "disk": "STORAGE", "remote": "SHARED_STORAGE"}[tier]
        assert [event for event in case.rig.events if isinstance(event, BlockRemoved)] == [
            BlockRemoved(block_hashes=[event_hash(case.chain.keys[at])], medium=medium, group_idx=0)
        ]
        again = case.restore()
        assert again is None if not at else again.num_blocks == at and again.outcome == "done"
    case.rig.check()


@pytest.mark.parametrize("tier", ["disk", "remote", "peer"])
@pytest.mark.parametrize("fault", ["failed", OSError(5, "EIO"), ValueError("a bug")])
def test_a_read_that_fails_leaves_the_blocks_before_it(
    make_rig: MakeRig, tier: TierName, fault: object
) -> None:
    case = Case(tier, make_rig)
    case.store.read_faults = {case.store.num_calls["read"]: fault}
    done = case.restore()
    assert done is not None
    assert done.outcome == "failed"
    assert done.num_blocks < 10
    assert case.rig.stats(tier).load_failed_total == 1
    case.rig.check()


def test_after_a_failed_load_the_same_request_is_not_loaded_for_again(make_rig: MakeRig) -> None:
    case = Case("disk", make_rig)
    case.spoil("damaged", 5)
    query = case.rig.query(case.chain, owner="me")
    plan = case.rig.consider(query)
    assert plan is not None
    case.rig.finish(plan, case.rig.start(plan))
    assert case.rig.consider(query) is None
    case.rig.tiers.cancel("me")
    assert case.rig.consider(query) is not None


def test_a_store_that_delivers_less_than_it_claims_is_not_believed(make_rig: MakeRig) -> None:
    case = Case("disk", make_rig)
    read = case.store.read
    case.store.read = lambda wanted, deliver, deadline_s: read(wanted[:2], deliver, deadline_s)
    done = case.restore()
    assert done is not None
    assert (done.num_blocks, done.outcome) == (2, "missing")
    case.rig.check()


class TestDeadline:
    @pytest.mark.parametrize("tier", ["disk", "remote", "peer"])
    def test_a_load_from_a_store_that_hangs_ends_at_its_deadline_and_never_writes_again(
        self, make_rig: MakeRig, tier: TierName
    ) -> None:
        clock = ManualClock()
        case = Case(tier, make_rig, clock=clock)
        rig = case.rig
        case.store.read_gate.shut()
        plan = rig.consider(rig.query(case.chain, **case.ask))
        assert plan is not None
        blocks = rig.start(plan)
        rig.wait(lambda: case.store.read_gate.num_waiting)
        rig.pass_deadline(by_s=-0.001)
        rig.poll()
        assert rig.taken(plan.id) is None
        rig.pass_deadline()
        done = rig.finish(plan, blocks)
        assert (done.num_blocks, done.outcome) == (0, "stopped")
        assert rig.stats(tier).load_failed_total == 1
        before = rig.memory.rows.copy()
        case.store.read_gate.open()
        rig.wait(lambda: not rig.stats(tier).queue_bytes["read"])
        assert (rig.memory.rows == before).all()
        rig.check()

    def test_a_copy_into_the_pool_that_hangs_is_waited_for(self, make_rig: MakeRig) -> None:
        clock = ManualClock()
        case = Case("disk", make_rig, clock=clock)
        rig = case.rig
        rig.memory.in_gate.shut()
        plan = rig.consider(rig.query(case.chain))
        assert plan is not None
        blocks = rig.start(plan)
        rig.wait(lambda: rig.memory.in_gate.num_waiting == 2)
        rig.pass_deadline()
        for _ in range(3):
            rig.poll()
        assert rig.taken(plan.id) is None
        rig.memory.in_gate.open()
        done = rig.finish(plan, blocks)
        assert done.num_blocks == 1
        assert done.outcome == "stopped"
        rig.check()

    def test_what_came_before_the_deadline_counts(self, make_rig: MakeRig) -> None:
        clock = ManualClock()
        case = Case("disk", make_rig, clock=clock)
        rig = case.rig
        read, slow_gate = case.store.read, Gate()

        def slow_at_the_end(wanted, deliver, deadline_s):
            if wanted[0].record.key == case.chain.keys[8]:
                slow_gate.wait()
                return "stopped"
            return read(wanted, deliver, deadline_s)

        case.store.read = slow_at_the_end
        plan = rig.consider(rig.query(case.chain))
        assert plan is not None
        slow_gate.shut()
        blocks = rig.start(plan)
        rig.wait(lambda: rig.stats("disk").moved_blocks_total["read"] == 8)
        rig.pass_deadline()
        done = rig.finish(plan, blocks)
        assert (done.num_blocks, done.outcome) == (8, "stopped")
        slow_gate.open()
        rig.check()

    def test_a_tier_that_is_late_again_and_again_is_refused(self, make_rig: MakeRig) -> None:
        clock = ManualClock()
        case = Case("disk", make_rig, clock=clock)
        rig = case.rig
        case.store.read_gate.shut()
        num_loads = 0
        for _ in range(10):
            plan = rig.consider(rig.query(case.chain))
            if plan is None:
                break
            num_loads += 1
            blocks = rig.start(plan)
            rig.pass_deadline()
            rig.finish(plan, blocks)
        assert num_loads <= 3
        assert rig.stats("disk").gated_total == 1
        case.store.read_gate.open()
        rig.check()


class TestCancel:
    @pytest.mark.parametrize("tier", ["disk", "remote", "peer"])
    @pytest.mark.parametrize("when", ["queued", "reading", "copying", "read"])
    def test_a_cancelled_load_ends_soon_and_is_no_failure(
        self, make_rig: MakeRig, tier: TierName, when: str
    ) -> None:
        case = Case(tier, make_rig)
        rig = case.rig
        if when == "reading":
            case.store.read_gate.shut()
        elif when == "copying":
            rig.memory.in_gate.shut()
        plan = rig.consider(rig.query(case.chain, owner="gone", **case.ask))
        assert plan is not None
        blocks = rig.start(plan)
        if when == "reading":
            rig.wait(lambda: case.store.read_gate.num_waiting)
        elif when == "copying":
            rig.wait(lambda: rig.memory.in_gate.num_waiting)
        elif when == "read":
            assert rig.wakes.acquire(timeout=10)
        rig.tiers.cancel("gone")
        if when == "copying":
            rig.poll()
            rig.memory.in_gate.open()
        done = rig.finish(plan, blocks)
        assert done.outcome in ("stopped", "done")
        assert rig.stats(tier).load_failed_total == 0
        case.store.read_gate.open()
        rig.check()

    def test_a_plan_that_is_not_started_can_be_cancelled_or_asked_for_anew(
        self, make_rig: MakeRig
    ) -> None:
        case = Case("disk", make_rig)
        rig, query = case.rig, case.rig.query(case.chain, owner="me")
        first = rig.consider(query)
        second = rig.consider(query)
        assert first is not None
        assert second is not None
        with pytest.raises(ValueError, match="not the latest"):
            rig.tiers.start(first, list(range(10)))
        rig.tiers.cancel("me")
        assert not rig.tiers.has_work
        rig.check()


class TestEviction:
    def test_blocks_being_read_stay_until_they_have_been_read(self, make_rig: MakeRig) -> None:
        disk = ScriptedStore(10)
        rig = make_rig(num_blocks=128, disk=disk)
        chain = rig.compute(PROMPT)
        rig.settle()
        rig.forget_pool()
        disk.read_gate.shut()
        plan = rig.consider(rig.query(chain))
        assert plan is not None
        blocks = rig.start(plan)
        rig.wait(lambda: disk.read_gate.num_waiting)
        for _ in range(3):
            rig.compute(range(500, 540))
        assert rig.stats("disk").evictions_total == 0
        assert rig.stats("disk").dropped_total
        disk.read_gate.open()
        done = rig.finish(plan, blocks)
        assert done.num_blocks == 10
        rig.check()

    def test_blocks_evicted_between_plan_and_start_are_missed(self, make_rig: MakeRig) -> None:
        case = Case("disk", make_rig)
        rig = case.rig
        plan = rig.consider(rig.query(case.chain))
        assert plan is not None
        disk = rig.tiers._tiers["disk"]
        disk.drop(disk.books.get(case.chain.keys[3]))
        done = rig.finish(plan, rig.start(plan))
        assert (done.num_blocks, done.outcome) == (3, "missing")
        rig.check()

    def test_a_plan_whose_blocks_are_all_gone_ends_at_once(self, make_rig: MakeRig) -> None:
        case = Case("disk", make_rig)
        rig = case.rig
        plan = rig.consider(rig.query(case.chain))
        assert plan is not None
        rig.tiers.clear()
        done = rig.finish(plan, rig.start(plan))
        assert (done.num_blocks, done.outcome) == (0, "missing")
        rig.check()


def held(rig: Rig, tier: str, chain: BlockChain) -> list[bool]:
    books = rig.tiers._tiers[tier].books
    return [books.get(key) is not None for key in chain.keys]


class TestStores:
    @pytest.mark.parametrize("tier", ["disk", "remote"])
    @pytest.mark.parametrize("fault", [0, 3, 9, OSError(5, "EIO"), ValueError("a bug")])
    def test_only_what_was_written_is_found(
        self, make_rig: MakeRig, tier: TierName, fault: int | BaseException
    ) -> None:
        store = ScriptedStore(32 if tier == "disk" else 0)
        rig = make_rig(**{tier: store})
        store.write_faults = {0: fault}
        chain = rig.compute(PROMPT)
        rig.settle()
        num_stored = fault if isinstance(fault, int) else 0
        assert rig.stats(tier).store_failed_total == 10 - num_stored
        rig.forget_pool()
        if tier == "remote":
            rig.tiers.clear()
        done = rig.restore(chain)
        assert (done.num_blocks if done else 0) == num_stored
        rig.check()

    @pytest.mark.parametrize("tier", ["cpu", "disk", "remote"])
    def test_a_copy_out_of_the_pool_that_fails_stores_nothing(
        self, make_rig: MakeRig, tier: TierName
    ) -> None:
        parts = (
            {"host_slots": 32}
            if tier == "cpu"
            else {tier: ScriptedStore(32 if tier == "disk" else 0)}
        )
        rig = make_rig(**parts)
        rig.memory.fails = 1
        chain = rig.compute(PROMPT)
        rig.settle()
        rig.forget_pool()
        assert rig.restore(chain) is None
        rig.compute(PROMPT)
        rig.settle()
        rig.forget_pool()
        assert rig.restore(chain).num_blocks == 10
        rig.check()

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize("tier", ["disk", "remote"])
    def test_a_writer_that_dies_is_replaced_and_its_blocks_count_as_failed(
        self, make_rig: MakeRig, tier: TierName
    ) -> None:
        store = ScriptedStore(32 if tier == "disk" else 0)
        rig = make_rig(**{tier: store})

        class Killed(BaseException):
            pass

        store.write_faults = {0: Killed()}
        chain = rig.compute(PROMPT)
        rig.settle()
        assert rig.stats(tier).store_failed_total == 10
        rig.compute(PROMPT)
        rig.settle()
        rig.wait(lambda: rig.tiers._tiers[tier].writer.restarts_total)
        rig.forget_pool()
        assert rig.restore(chain).num_blocks == 10
        rig.check()

    def test_a_pin_lost_while_the_block_is_copied_means_it_is_not_stored(
        self, make_rig: MakeRig
    ) -> None:
        clock = ManualClock()
        rig = make_rig(host_slots=32, disk=ScriptedStore(32), clock=clock)
        rig.memory.out_gate.shut()
        chain = rig.compute(PROMPT)
        rig.wait(lambda: rig.memory.out_gate.num_waiting)
        clock.advance(31)
        rig.poll()
        assert rig.leases.orphans_total == 1
        assert rig.pool.num_pinned == 0
        assert not rig.tiers.has_work
        rig.forget_pool()
        rig.memory.rows[:] = 0
        rig.memory.out_gate.open()
        rig.wait(lambda: not rig.tiers._storer.num_open)
        assert not any(held(rig, "cpu", chain))
        assert not any(held(rig, "disk", chain))
        rig.check()

    def test_a_cpu_block_lost_while_it_is_written_from_is_not_stored_below(
        self, make_rig: MakeRig
    ) -> None:
        clock, disk = ManualClock(), ScriptedStore(32)
        rig = make_rig(host_slots=32, disk=disk, clock=clock)
        disk.write_gate.shut()
        chain = rig.compute(PROMPT)
        rig.wait(lambda: disk.write_gate.num_waiting)
        clock.advance(31)
        rig.poll()
        assert rig.stats("cpu").orphans_total == 10
        disk.write_gate.open()
        rig.wait(lambda: not rig.tiers._storer.num_open)
        assert all(held(rig, "cpu", chain))
        assert not any(held(rig, "disk", chain))
        rig.wait(lambda: not disk.held)
        rig.check()

    def test_a_writer_that_hangs_holds_no_block_of_the_pool(self, make_rig: MakeRig) -> None:
        disk = ScriptedStore(512)
        rig = make_rig(num_blocks=128, disk=disk)
        disk.write_gate.shut()
        for start in range(0, 4000, 200):
            rig.compute(range(start, start + 100))
            rig.wait(lambda: not rig.pool.num_pinned)
            rig.forget_pool()
            rig.clock.advance(1)
        assert rig.stats("disk").oldest_s["write"] > 0
        disk.write_gate.open()
        rig.check()

    def test_the_cpu_block_that_a_slow_tier_is_written_from_stays(self, make_rig: MakeRig) -> None:
        disk = ScriptedStore(32)
        rig = make_rig(num_blocks=128, host_slots=10, disk=disk)
        disk.write_gate.shut()
        chain = rig.compute(PROMPT)
        rig.wait(lambda: disk.write_gate.num_waiting)
        for _ in range(3):
            rig.compute(range(500, 540))
            rig.poll()
        disk.write_gate.open()
        rig.settle()
        for key in chain.keys:
            assert [bytes(data) for record, data in disk.held.values() if record.key == key] == [
                payload_of(key)
            ]
        rig.check()


class TestHealth:
    def test_a_tier_that_fails_pauses_longer_and_longer_and_says_so_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        health, now_s = Health("reading from tier disk"), 0.0
        pauses = []
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                health.failed(now_s)
                assert not health.is_paused(now_s)
            for _ in range(12):
                health.failed(now_s)
                health.failed(now_s)
                assert health.is_paused(now_s)
                start_s = now_s
                while health.is_paused(now_s):
                    now_s += 0.5
                pauses.append(now_s - start_s)
            assert len(caplog.messages) == 1
            health.succeeded()
            health.succeeded()
            assert len(caplog.messages) == 2
        assert pauses[0] == FIRST_PAUSE_S
        assert pauses == sorted(pauses)
        assert pauses[-1] == MAX_PAUSE_S
        health.failed(now_s)
        assert not health.is_paused(now_s)

    @pytest.mark.parametrize("tier", ["disk", "remote"])
    def test_a_tier_that_is_away_is_left_alone_and_tried_again(
        self, make_rig: MakeRig, tier: TierName
    ) -> None:
        clock, store = ManualClock(), ScriptedStore(512 if tier == "disk" else 0)
        rig = make_rig(num_blocks=512, clock=clock, **{tier: store})
        store.is_away = True
        for start in range(0, 2000, 100):
            rig.compute(range(start, start + 40))
            rig.settle()
        assert store.num_calls["write"] == 3
        assert rig.stats(tier).is_paused
        store.is_away = False
        clock.advance(1.5)
        assert not rig.stats(tier).is_paused
        rig.compute(PROMPT)
        rig.settle()
        assert rig.stats(tier).moved_blocks_total["write"] == 10
        rig.check()

    def test_reads_go_on_while_writing_is_paused(self, make_rig: MakeRig) -> None:
        case = Case("disk", make_rig)
        case.store.is_paused = True
        assert case.rig.stats("disk").is_paused
        assert case.restore().num_blocks == 10
        before = len(case.store.writes)
        case.rig.compute(range(300, 340))
        case.rig.settle()
        assert len(case.store.writes) == before
