"""What the tiers store, find, load, announce and give up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from prefix_index.events import BlockRemoved, BlockStored
from runner.kvkeys import BlockChain, event_hash
from runner.tiers.types import BlockRecord, PeerSource, Place, TierName
from tests.runner.tier_parts import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    ManualClock,
    Rig,
    ScriptedPeers,
    ScriptedStore,
    bytes_of,
    payload_of,
)

PROMPT = list(range(40))
PEER = PeerSource("http://a:1", 1000)
MEDIUM = {"cpu": "CPU", "disk": "STORAGE", "remote": "SHARED_STORAGE"}

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


def parts_of(tier: str) -> dict[str, object]:
    """Return what a rig with this one tier is made of."""
    parts: dict[str, dict[str, object]] = {
        "cpu": {"host_slots": 32},
        "disk": {"disk": ScriptedStore(32)},
        "remote": {"remote": ScriptedStore()},
    }
    return parts[tier]


def holding(chain: BlockChain, start: int = 0, end: int | None = None) -> ScriptedStore:
    """Return a store addressed by key that somebody else has written a chain to."""
    store = ScriptedStore()
    for place in places_of(chain)[start:end]:
        store.held[place.record.key] = place.record, bytearray(payload_of(place.record.key))
    return store


def places_of(chain: BlockChain, first_slot: int = 0) -> list[Place]:
    return [
        Place(BlockRecord(key, chain.parent(at), chain.tokens[at], at), first_slot + at)
        for at, key in enumerate(chain.keys)
    ]


def recovered(*chains: BlockChain) -> tuple[ScriptedStore, tuple[Place, ...]]:
    """Return a disk that held chains before."""
    places: dict[bytes, Place] = {}
    for chain in chains:
        for place in places_of(chain):
            places.setdefault(place.record.key, dataclasses.replace(place, slot=len(places)))
    store = ScriptedStore(32)
    for place in places.values():
        store.held[place.slot] = place.record, bytearray(payload_of(place.record.key))
    return store, tuple(places.values())


def hashes(rig: Rig, kind: type, medium: str) -> list[int]:
    rig.poll()
    return [
        block_hash
        for event in rig.events
        if isinstance(event, kind) and event.medium == medium
        for block_hash in event.block_hashes
    ]


@pytest.mark.parametrize("tier", ["cpu", "disk", "remote"])
def test_what_a_tier_was_given_comes_back_bit_by_bit(make_rig: MakeRig, tier: TierName) -> None:
    rig = make_rig(**parts_of(tier))
    chain = rig.compute(PROMPT)
    rig.settle()
    rig.forget_pool()
    done = rig.restore(chain)
    assert done is not None
    assert done.outcome == "done"
    assert done.blocks_by_tier == {tier: 10}
    rig.check()
    stats = rig.stats(tier)
    assert stats.hit_tokens_total == 40
    assert stats.moved_blocks_total == {"read": 10, "write": 10}
    assert stats.moved_bytes_total == {"read": 10 * BLOCK_BYTES, "write": 10 * BLOCK_BYTES}
    assert sum(num for name, way, num in rig.observer.moves if (name, way) == (tier, "read")) == (
        10 * BLOCK_BYTES
    )


def test_a_prefix_comes_from_a_peer_that_the_request_names(make_rig: MakeRig) -> None:
    peers = ScriptedPeers()
    rig = make_rig(peers=peers)
    chain = rig.chain(PROMPT)
    peers.stores["http://a:1"] = holding(chain)
    assert rig.restore(chain) is None
    done = rig.restore(chain, source=PeerSource("http://a:1", 30))
    assert done is not None
    assert done.blocks_by_tier == {"peer": 30 // BLOCK_SIZE}
    rig.check()


def test_a_peer_that_has_less_than_was_claimed_gives_what_it_has(make_rig: MakeRig) -> None:
    peers = ScriptedPeers()
    rig = make_rig(peers=peers)
    chain = rig.chain(PROMPT)
    peers.stores["http://a:1"] = holding(chain, 0, 4)
    done = rig.restore(chain, source=PEER)
    assert done is not None
    assert (done.num_blocks, done.outcome) == (4, "missing")
    rig.check()


def test_a_peer_that_is_not_configured_is_not_asked(make_rig: MakeRig) -> None:
    peers = ScriptedPeers()
    rig = make_rig(peers=peers)
    assert rig.restore(rig.chain(PROMPT), source=PeerSource("http://evil:1", 1000)) is None
    assert not peers.asked


def test_a_load_starts_where_the_pool_ends_and_stops_at_its_cap(make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=32)
    chain = rig.compute(PROMPT)
    rig.settle()
    rig.forget_pool()
    rig.compute(PROMPT[:12])
    query = rig.query(chain, max_blocks=8)
    assert query.first_block == 3
    plan = rig.consider(query)
    assert plan is not None
    assert plan.num_blocks == 5
    assert rig.finish(plan, rig.start(plan)).blocks_by_tier == {"cpu": 5}
    rig.check()


def test_a_prefix_spread_over_tiers_is_one_load_in_the_prompts_order(make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=4, disk=ScriptedStore(32), remote=ScriptedStore())
    chain = rig.compute(PROMPT)
    rig.settle()
    disk = rig.tiers._tiers["disk"]
    for key in chain.keys[7:]:
        disk.drop(disk.books.get(key))
    rig.forget_pool()
    done = rig.restore(chain)
    assert done is not None
    assert done.blocks_by_tier == {"cpu": 4, "disk": 3, "remote": 3}
    assert list(done.blocks_by_tier) == ["cpu", "disk", "remote"]
    rig.check()


def test_a_hole_ends_the_hit(make_rig: MakeRig) -> None:
    rig = make_rig(disk=ScriptedStore(32))
    chain = rig.compute(PROMPT)
    rig.settle()
    rig.forget_pool()
    disk = rig.tiers._tiers["disk"]
    disk.drop(disk.books.get(chain.keys[6]))
    done = rig.restore(chain)
    assert done is not None
    assert (done.num_blocks, done.outcome) == (6, "done")


def test_a_long_load_is_shared_by_the_tiers_threads(make_rig: MakeRig) -> None:
    disk = ScriptedStore(256)
    rig = make_rig(num_blocks=1024, disk=disk)
    chain = rig.compute(list(range(800)))
    rig.settle()
    rig.forget_pool()
    done = rig.restore(chain)
    assert done is not None
    assert done.num_blocks == 200
    assert len(disk.reads) >= 3
    rig.check()


def test_loads_have_the_disk_for_themselves_while_stores_have_room_to_wait(
    make_rig: MakeRig,
) -> None:
    disk = ScriptedStore(256)
    rig = make_rig(num_blocks=512, disk=disk)
    chain = rig.compute(PROMPT)
    rig.settle()
    rig.forget_pool()
    disk.read_gate.shut()
    plan = rig.consider(rig.query(chain))
    assert plan is not None
    blocks = rig.start(plan)
    rig.wait(lambda: disk.read_gate.num_waiting)
    rig.compute(range(500, 600))
    rig.wait(lambda: not rig.pool.num_pinned)
    assert len(disk.writes) == 1
    rig.tiers._tiers["disk"].max_storing_bytes = 200 * BLOCK_BYTES
    rig.compute(range(1000, 1400))
    rig.wait(lambda: len(disk.writes) > 1)
    disk.read_gate.open()
    rig.finish(plan, blocks)
    rig.settle()
    assert rig.stats("disk").num_blocks == 135
    rig.check()


def test_blocks_beyond_the_requests_offload_cap_are_not_stored(make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=32, disk=ScriptedStore(32))
    rig.compute(PROMPT, can_store=False)
    rig.settle()
    assert rig.stats("cpu").num_blocks == rig.stats("disk").num_blocks == 0


def test_a_block_is_written_once_however_often_it_is_offered(make_rig: MakeRig) -> None:
    disk, remote = ScriptedStore(32), ScriptedStore()
    rig = make_rig(host_slots=32, disk=disk, remote=remote)
    for _ in range(3):
        rig.compute(PROMPT)
        rig.compute(PROMPT)
        rig.settle()
    assert rig.stats("cpu").moved_blocks_total["write"] == 10
    assert sum(map(len, disk.writes)) == sum(map(len, remote.writes)) == 10
    rig.check()


def test_neighbours_are_written_together_and_lie_together(make_rig: MakeRig) -> None:
    disk = ScriptedStore(256)
    rig = make_rig(num_blocks=512, disk=disk)
    rig.compute(list(range(400)))
    rig.settle()
    assert disk.writes == [list(range(64)), list(range(64, 100))]


def test_what_was_loaded_from_below_moves_up(make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=32, disk=ScriptedStore(32))
    chain = rig.compute(PROMPT)
    rig.settle()
    cpu = rig.tiers._tiers["cpu"]
    for key in chain.keys:
        cpu.drop(cpu.books.get(key))
    rig.forget_pool()
    done = rig.restore(chain)
    assert done is not None
    assert done.blocks_by_tier == {"disk": 10}
    rig.compute(PROMPT)
    rig.settle()
    rig.forget_pool()
    done = rig.restore(chain)
    assert done is not None
    assert done.blocks_by_tier == {"cpu": 10}
    rig.check()


def test_a_slow_tier_is_written_from_the_cpu_tier_without_touching_the_pool(
    make_rig: MakeRig,
) -> None:
    disk = ScriptedStore(32)
    disk.is_paused = True
    rig = make_rig(host_slots=32, disk=disk)
    rig.compute(PROMPT)
    rig.settle()
    assert not disk.writes
    disk.is_paused = False
    rig.memory.out_gate.shut()
    rig.compute(PROMPT)
    rig.settle()
    assert rig.stats("disk").num_blocks == 10
    rig.memory.out_gate.open()
    rig.check()


class TestRemote:
    def test_a_prefix_that_others_wrote_is_found_by_asking(self, make_rig: MakeRig) -> None:
        rig = make_rig(remote=ScriptedStore())
        chain = rig.chain(PROMPT)
        rig.tiers._tiers["remote"].store.held.update(holding(chain, 0, 7).held)
        query = rig.query(chain)
        assert rig.tiers.consider(query, rig.clock()) == "pending"
        plan = rig.consider(query)
        assert plan is not None
        assert rig.finish(plan, rig.start(plan)).blocks_by_tier == {"remote": 7}
        rig.check()

    def test_an_answer_is_believed_for_a_while(self, make_rig: MakeRig) -> None:
        clock, remote = ManualClock(), ScriptedStore()
        rig = make_rig(remote=remote, clock=clock)
        chain = rig.chain(PROMPT)
        assert rig.consider(rig.query(chain)) is None
        assert rig.consider(rig.query(chain)) is None
        assert remote.num_calls["exists"] == 1
        clock.advance(2.0)
        assert rig.consider(rig.query(chain)) is None
        assert remote.num_calls["exists"] == 2

    def test_a_store_that_does_not_answer_holds_no_request_up(self, make_rig: MakeRig) -> None:
        clock, remote = ManualClock(), ScriptedStore()
        rig = make_rig(remote=remote, clock=clock)
        remote.exists_gate.shut()
        query = rig.query(rig.chain(PROMPT))
        assert rig.tiers.consider(query, clock()) == "pending"
        rig.poll()
        assert rig.tiers.consider(query, clock()) == "pending"
        assert rig.tiers.next_wake_s(clock()) == pytest.approx(0.05)
        clock.advance(0.06)
        assert rig.tiers.consider(query, clock()) is None
        remote.exists_gate.open()

    def test_a_cancelled_question_is_forgotten(self, make_rig: MakeRig) -> None:
        clock, remote = ManualClock(), ScriptedStore()
        rig = make_rig(remote=remote, clock=clock)
        remote.exists_gate.shut()
        query = rig.query(rig.chain(PROMPT))
        assert rig.tiers.consider(query, clock()) == "pending"
        rig.tiers.cancel(query.owner)
        rig.poll()
        wake_s = rig.tiers.next_wake_s(clock())
        assert wake_s is None or wake_s > 1
        remote.exists_gate.open()

    def test_only_what_no_nearer_tier_has_is_asked_for(self, make_rig: MakeRig) -> None:
        remote = ScriptedStore()
        rig = make_rig(host_slots=32, remote=remote)
        chain = rig.compute(PROMPT)
        rig.settle()
        rig.forget_pool()
        remote.num_calls["exists"] = 0
        assert rig.restore(chain) is not None
        assert remote.num_calls["exists"] == 0

    def test_a_block_gone_after_it_was_there_is_a_miss(self, make_rig: MakeRig) -> None:
        remote = ScriptedStore()
        rig = make_rig(remote=remote)
        chain = rig.compute(PROMPT)
        rig.settle()
        rig.forget_pool()
        plan = rig.consider(rig.query(chain))
        assert plan is not None
        remote.lose(chain.keys[5])
        done = rig.finish(plan, rig.start(plan))
        assert done.outcome == "missing"
        assert done.num_blocks == 5
        assert hashes(rig, BlockRemoved, "SHARED_STORAGE") == [event_hash(chain.keys[5])]
        rig.check()


class TestEvents:
    @pytest.mark.parametrize("tier", ["cpu", "disk", "remote"])
    def test_a_run_of_blocks_is_one_event_with_all_that_an_index_needs(
        self, make_rig: MakeRig, tier: TierName
    ) -> None:
        rig = make_rig(**parts_of(tier))
        chain = rig.compute(PROMPT, salt="s")
        rig.settle()
        (event,) = rig.events
        assert event == BlockStored(
            block_hashes=[event_hash(key) for key in chain.keys],
            parent_block_hash=None,
            token_ids=PROMPT,
            block_size=BLOCK_SIZE,
            medium=MEDIUM[tier],
            extra_keys=[["s"], *[None] * 9],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )

    def test_a_block_is_announced_only_once_it_can_be_loaded(self, make_rig: MakeRig) -> None:
        disk = ScriptedStore(32)
        rig = make_rig(disk=disk)
        disk.write_gate.shut()
        chain = rig.compute(PROMPT)
        rig.wait(lambda: disk.write_gate.num_waiting)
        rig.poll()
        assert not rig.events
        rig.forget_pool()
        assert rig.restore(chain) is None
        disk.write_gate.open()
        rig.settle()
        assert len(hashes(rig, BlockStored, "STORAGE")) == 10

    def test_what_is_given_up_for_room_is_said_before_its_slot_is_used_again(
        self, make_rig: MakeRig
    ) -> None:
        rig = make_rig(host_slots=10)
        first = rig.compute(PROMPT)
        rig.settle()
        second = [token + 100 for token in PROMPT]
        rig.compute(second)
        rig.compute(second)
        rig.settle()
        removed = hashes(rig, BlockRemoved, "CPU")
        assert set(removed) <= {event_hash(key) for key in first.keys}
        assert len(removed) == rig.stats("cpu").evictions_total > 0
        held: set[int] = set()
        for event in rig.events:
            if isinstance(event, BlockStored):
                held |= set(event.block_hashes)
            else:
                held -= set(event.block_hashes)
            assert len(held) <= 10

    def test_what_the_disk_held_is_announced_parents_first(self, make_rig: MakeRig) -> None:
        one, other = Rig().chain(PROMPT), Rig().chain([*PROMPT[:20], *range(90, 110)])
        disk, places = recovered(one, other)
        rig = make_rig(disk=disk, recovered=places[::-1])
        rig.poll()
        known: set[int | None] = {None}
        for event in rig.events:
            assert event.parent_block_hash in known
            known |= set(event.block_hashes)
        assert len(known) == 1 + len(places)
        assert rig.restore(other).num_blocks == 10
        rig.check()

    def test_salted_blocks_of_a_former_process_are_announced_at_their_first_hit(
        self, make_rig: MakeRig
    ) -> None:
        chain = Rig().chain(PROMPT, salt="s")
        disk, places = recovered(chain)
        rig = make_rig(disk=disk, recovered=places)
        rig.poll()
        assert not rig.events
        assert rig.restore(chain).num_blocks == 10
        (event,) = rig.events
        assert event.extra_keys[0] == ["s"]
        assert event.block_hashes == [event_hash(key) for key in chain.keys]
        rig.forget_pool()
        assert rig.restore(chain).num_blocks == 10
        assert len(rig.events) == 1


class TestRoom:
    def test_a_tier_never_holds_more_than_its_slots(self, make_rig: MakeRig) -> None:
        rig = make_rig(num_blocks=256, host_slots=7, disk=ScriptedStore(11))
        for start in range(0, 3000, 300):
            rig.compute(range(start, start + 100))
            rig.compute(range(start, start + 100))
            assert rig.stats("cpu").num_blocks <= 7
            assert rig.stats("disk").num_blocks <= 11
            rig.settle()
        assert rig.stats("cpu").used_bytes <= rig.stats("cpu").capacity_bytes == 7 * BLOCK_BYTES
        rig.check()

    def test_no_parent_leaves_before_its_children(self, make_rig: MakeRig) -> None:
        rig = make_rig(num_blocks=512, host_slots=40)
        for start in range(0, 4000, 400):
            for tail in (60, 100):
                rig.compute([*range(start, start + 60), *range(start + 200, start + 200 + tail)])
                rig.compute([*range(start, start + 60), *range(start + 200, start + 200 + tail)])
                rig.settle()
                books = rig.tiers._tiers["cpu"].books
                for entry in books:
                    at_root = entry.record.depth == 0
                    assert at_root or books.knows(entry.record.parent)
        assert rig.stats("cpu").evictions_total

    def test_a_nearly_full_tier_takes_only_what_is_asked_for_twice(self, make_rig: MakeRig) -> None:
        rig = make_rig(num_blocks=128, host_slots=10)
        rig.compute(PROMPT)
        rig.compute(PROMPT)
        rig.settle()
        once = rig.compute(range(500, 540))
        rig.settle()
        books = rig.tiers._tiers["cpu"].books
        assert not any(books.knows(key) for key in once.keys)
        rig.compute(range(500, 540))
        rig.settle()
        assert any(books.knows(key) for key in once.keys)

    def test_blocks_that_find_the_queue_full_are_dropped_and_stored_at_their_next_use(
        self, make_rig: MakeRig
    ) -> None:
        disk = ScriptedStore(512)
        rig = make_rig(num_blocks=512, disk=disk)
        rig.tiers._tiers["disk"].max_storing_bytes = 6 * BLOCK_BYTES
        disk.write_gate.shut()
        rig.compute(PROMPT)
        assert rig.stats("disk").dropped_total == 4
        assert rig.stats("disk").queue_bytes["write"] == 6 * BLOCK_BYTES
        disk.write_gate.open()
        rig.settle()
        rig.compute(PROMPT)
        rig.settle()
        assert rig.stats("disk").num_blocks == 10
        rig.check()

    def test_a_store_that_is_still_making_room_needs_nothing_given_up(
        self, make_rig: MakeRig
    ) -> None:
        disk = ScriptedStore(40)
        disk.ready_slots, disk.is_growing = 5, True
        rig = make_rig(num_blocks=128, disk=disk)
        rig.compute(PROMPT)
        rig.settle()
        assert rig.stats("disk").num_blocks == 5
        assert rig.stats("disk").dropped_total == 5
        assert rig.stats("disk").capacity_bytes == 40 * BLOCK_BYTES
        disk.ready_slots, disk.is_growing = 40, False
        rig.compute(PROMPT)
        rig.settle()
        assert rig.stats("disk").num_blocks == 10
        assert rig.stats("disk").evictions_total == 0
        rig.check()

    def test_what_has_been_copied_makes_room_for_the_next_blocks_without_a_poll(
        self, make_rig: MakeRig
    ) -> None:
        rig = make_rig(num_blocks=16, host_slots=32)
        rig.compute(PROMPT[:32])
        assert rig.wakes.acquire(timeout=10)
        rig.compute([*PROMPT[:32], *range(900, 932)])
        rig.settle()
        assert rig.stats("cpu").num_blocks == 16
        rig.check()

    def test_store_pins_leave_most_of_the_pool_to_requests(self, make_rig: MakeRig) -> None:
        rig = make_rig(num_blocks=16, host_slots=32)
        rig.memory.out_gate.shut()
        rig.compute(PROMPT)
        assert rig.pool.num_pinned == 8
        rig.memory.out_gate.open()
        rig.settle()
        assert rig.stats("cpu").num_blocks == 10
        rig.check()

    def test_a_block_evicted_before_its_turn_is_dropped(self, make_rig: MakeRig) -> None:
        rig = make_rig(num_blocks=16, host_slots=32)
        rig.memory.out_gate.shut()
        rig.compute(PROMPT)
        rig.forget_pool()
        rig.memory.out_gate.open()
        rig.settle()
        assert rig.stats("cpu").num_blocks == 8
        assert rig.stats("cpu").dropped_total == 2
        rig.check()


class TestWhyMissing:
    def test_every_reason_has_its_word(self, make_rig: MakeRig) -> None:
        disk = ScriptedStore(10)
        rig = make_rig(num_blocks=128, disk=disk)
        chain = rig.compute(PROMPT)
        rig.settle()
        assert rig.tiers.why_missing("anyone", chain.keys[0]) == "gated"
        assert rig.tiers.why_missing("anyone", rig.chain(range(700, 740)).keys[0]) == "cold"
        rig.forget_pool()
        disk.damage(chain.keys[4])
        query = rig.query(chain)
        plan = rig.consider(query)
        assert plan is not None
        rig.finish(plan, rig.start(plan))
        assert rig.tiers.why_missing(query.owner, chain.keys[4]) == "failed"
        assert rig.tiers.why_missing(query.owner, chain.keys[9]) == "failed"
        assert rig.tiers.why_missing("another", chain.keys[9]) == "gated"
        for _ in range(3):
            rig.compute(range(500, 540))
            rig.settle()
        gone = [key for key in chain.keys if not rig.tiers._tiers["disk"].books.knows(key)]
        assert "evicted" in {rig.tiers.why_missing("anyone", key) for key in gone}


class TestLending:
    def test_blocks_in_host_memory_are_lent_until_they_are_given_back(
        self, make_rig: MakeRig
    ) -> None:
        rig = make_rig(num_blocks=128, host_slots=10)
        chain = rig.compute(PROMPT)
        rig.settle()
        unknown = rig.chain(range(300, 304)).keys[0]
        lent = rig.tiers.pin_cpu([*chain.keys[:3], unknown, chain.keys[3]], "b", rig.clock() + 60)
        assert [block.record.key for block in lent] == chain.keys[:3]
        assert [bytes_of(block) for block in lent] == [payload_of(key) for key in chain.keys[:3]]
        for _ in range(3):
            rig.compute(range(500, 540))
            rig.settle()
        assert [bytes_of(block) for block in lent] == [payload_of(key) for key in chain.keys[:3]]
        rig.tiers.unpin_cpu("b")
        rig.check()

    @pytest.mark.parametrize("at", [0, 1, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
    def test_a_block_that_has_changed_in_host_memory_is_not_lent_and_forgotten(
        self, make_rig: MakeRig, at: int
    ) -> None:
        rig = make_rig(num_blocks=128, host_slots=10)
        chain = rig.compute(PROMPT)
        rig.settle()
        entry = rig.tiers._tiers["cpu"].books.get(chain.keys[2])
        rig.host._arena.view(entry.slot)[at] ^= 1
        lent = rig.tiers.pin_cpu(chain.keys, "b", rig.clock() + 60)
        buffer = memoryview(bytearray(BLOCK_BYTES))
        are_sound = [block.read_into(buffer) for block in lent]
        assert are_sound == [at != 2 for at in range(10)]
        rig.tiers.unpin_cpu("b")
        assert (rig.stats("cpu").damaged_total, rig.stats("cpu").num_blocks) == (1, 9)
        assert len(rig.tiers.pin_cpu(chain.keys, "b", rig.clock() + 60)) == 2
        rig.tiers.unpin_cpu("b")
        rig.check()

    def test_a_borrower_that_never_comes_back_loses_the_loan_at_its_deadline(
        self, make_rig: MakeRig
    ) -> None:
        clock = ManualClock()
        rig = make_rig(host_slots=10, clock=clock)
        chain = rig.compute(PROMPT)
        rig.settle()
        assert len(rig.tiers.pin_cpu(chain.keys, "b", clock() + 5)) == 10
        clock.advance(6)
        rig.poll()
        assert rig.stats("cpu").orphans_total == 1
        rig.check()

    def test_without_a_cpu_tier_nothing_is_lent(self, make_rig: MakeRig) -> None:
        rig = make_rig(disk=ScriptedStore(32))
        chain = rig.compute(PROMPT)
        rig.settle()
        assert rig.tiers.pin_cpu(chain.keys, "b", rig.clock() + 5) == []
        rig.tiers.unpin_cpu("b")


class TestClear:
    def test_a_reset_forgets_every_tier_and_says_so(self, make_rig: MakeRig) -> None:
        disk = ScriptedStore(32)
        rig = make_rig(host_slots=32, disk=disk)
        chain = rig.compute(PROMPT)
        rig.settle()
        rig.forget_pool()
        rig.tiers.clear()
        rig.wait(lambda: not disk.held)
        assert rig.restore(chain) is None
        for medium in ("CPU", "STORAGE"):
            assert len(hashes(rig, BlockRemoved, medium)) == 10
        rig.check()

    def test_what_was_under_way_is_not_found_after_a_reset(self, make_rig: MakeRig) -> None:
        disk = ScriptedStore(32)
        rig = make_rig(host_slots=32, disk=disk)
        disk.write_gate.shut()
        chain = rig.compute(PROMPT)
        rig.wait(lambda: disk.write_gate.num_waiting)
        rig.forget_pool()
        rig.tiers.clear()
        disk.write_gate.open()
        rig.settle()
        rig.wait(lambda: not disk.held)
        assert rig.restore(chain) is None
        assert [stats.store_failed_total for stats in rig.tiers.stats()] == [0, 0]
        rig.check()


class TestClose:
    def test_what_is_staged_is_still_written(self) -> None:
        disk = ScriptedStore(32)
        rig = Rig(disk=disk)
        chain = rig.compute(PROMPT)
        rig.tiers.close()
        assert disk.keys() == set(chain.keys)
        assert disk.is_closed
        rig.tiers.close()

    def test_a_stuck_thread_is_left_behind_with_its_store_open(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("runner.tiers.manager.JOIN_S", 0.1)
        clock, disk = ManualClock(), ScriptedStore(32)
        rig = Rig(disk=disk, clock=clock)
        disk.write_gate.shut()
        rig.compute(PROMPT)
        rig.wait(lambda: disk.write_gate.num_waiting)
        rig.tiers.close()
        assert not disk.is_closed
        assert "kv-disk-write" in caplog.text
        disk.write_gate.open()


class TestProbes:
    def test_an_idle_tier_is_tried_with_one_of_its_blocks_and_no_request_sees_it(
        self, make_rig: MakeRig
    ) -> None:
        clock, disk = ManualClock(), ScriptedStore(32)
        peers = ScriptedPeers()
        rig = make_rig(disk=disk, peers=peers, clock=clock)
        chain = rig.compute(PROMPT)
        rig.settle()
        before = rig.memory.rows.copy()
        clock.advance(30)
        rig.poll()
        rig.wait(lambda: disk.reads)
        rig.settle()
        assert disk.reads == [1]
        assert (rig.memory.rows == before).all()
        rig.poll()
        assert disk.reads == [1]
        assert chain.keys
        rig.check()

    def test_an_empty_tier_is_not_tried(self, make_rig: MakeRig) -> None:
        clock, disk = ManualClock(), ScriptedStore(32)
        rig = make_rig(disk=disk, clock=clock)
        clock.advance(30)
        rig.poll()
        rig.poll()
        assert not disk.reads

    def test_a_probe_that_finds_damage_drops_the_block(self, make_rig: MakeRig) -> None:
        clock, disk = ManualClock(), ScriptedStore(32)
        rig = make_rig(disk=disk, clock=clock)
        chain = rig.compute(PROMPT[:4])
        rig.settle()
        disk.damage(chain.keys[0])
        clock.advance(30)
        rig.poll()
        rig.wait(lambda: rig.stats("disk").damaged_total)
        assert rig.stats("disk").num_blocks == 0
        assert hashes(rig, BlockRemoved, "STORAGE") == [event_hash(chain.keys[0])]

    def test_a_peer_that_a_request_named_is_tried_too(self, make_rig: MakeRig) -> None:
        clock, peers = ManualClock(), ScriptedPeers()
        rig = make_rig(peers=peers, clock=clock)
        chain = rig.chain(PROMPT)
        peers.stores["http://a:1"] = holding(chain)
        assert rig.restore(chain, source=PEER) is not None
        clock.advance(30)
        rig.poll()
        rig.wait(lambda: len(peers.asked) == 2)


def test_decisions_are_logged_with_what_came_of_them(make_rig: MakeRig) -> None:
    rig = make_rig(host_slots=32)
    chain = rig.compute(PROMPT)
    rig.settle()
    rig.forget_pool()
    rig.restore(chain, owner="me")
    (row,) = rig.tiers.decisions()
    assert row["request"] == "me"
    assert row["decision"] == "restore"
    assert row["actual"]["blocks_by_tier"] == {"cpu": 10}


def test_a_tier_slower_than_computing_is_not_used_and_the_refusal_is_counted_once(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(host_slots=32, token_s=1e-9)
    host_chain = rig.chain(PROMPT)
    for place in places_of(host_chain):
        entry = rig.tiers._tiers["cpu"].reserve(place.record, 1)
        rig.host.write(
            [Place(place.record, entry.slot)], [memoryview(payload_of(place.record.key))]
        )
        rig.tiers._tiers["cpu"].books.commit(entry)
    query = rig.query(host_chain)
    assert rig.consider(query) is None
    assert rig.consider(query) is None
    assert rig.stats("cpu").gated_total == 1
    (row,) = rig.tiers.decisions()
    assert row["decision"] == "recompute"


def test_an_idle_engine_is_woken_for_deadlines_alone(make_rig: MakeRig) -> None:
    clock = ManualClock()
    rig = make_rig(host_slots=32, clock=clock)
    chain = rig.compute(PROMPT)
    rig.settle()
    assert not rig.tiers.has_work
    rig.forget_pool()
    rig.memory.in_gate.shut()
    plan = rig.consider(rig.query(chain))
    assert plan is not None
    blocks = rig.start(plan)
    assert rig.tiers.has_work
    wake_s = rig.tiers.next_wake_s(clock())
    assert wake_s is not None
    assert 0 < wake_s <= rig.tiers._loader.next_deadline_s() - clock()
    rig.memory.in_gate.open()
    rig.finish(plan, blocks)
    rig.check()
