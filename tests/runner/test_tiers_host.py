"""The cpu tier's memory and its store."""

from __future__ import annotations

import hashlib
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.tiers.arena import ALIGNMENT_BYTES, Arena, ArenaError, allocate_arena, map_memory
from runner.tiers.host import HostStore
from runner.tiers.types import BlockRecord, Place

BLOCK_BYTES = 5000
STRIDE = 8192
FAR_S = 1e12


def record(number: int) -> BlockRecord:
    key = hashlib.blake2b(b"%d" % number, digest_size=32).digest()
    return BlockRecord(key, b"\0" * 32, b"tokens %d" % number, number)


def payload(number: int) -> memoryview:
    return memoryview(hashlib.shake_128(b"%d" % number).digest(BLOCK_BYTES))


def store_of(num_slots: int) -> tuple[HostStore, Arena]:
    arena = allocate_arena(num_slots * STRIDE, BLOCK_BYTES, option="--host-bytes")
    return HostStore(arena), arena


def read_all(
    store: HostStore, places: list[Place], deadline_s: float = FAR_S
) -> tuple[str, list[bytes]]:
    got: list[bytes] = []

    def deliver(index: int, view: memoryview) -> bool:
        assert index == len(got)
        got.append(bytes(view))
        return True

    return store.read(places, deliver, deadline_s), got


def limited(limit_bytes: int):
    """Return an allocator that gives no more than so many bytes in all."""
    given_bytes = 0

    def pinned(num_bytes: int) -> memoryview:
        nonlocal given_bytes
        if given_bytes + num_bytes > limit_bytes:
            raise RuntimeError("CUDA error: out of memory")
        given_bytes += num_bytes
        return map_memory(num_bytes)

    return pinned


def test_slots_are_page_aligned_and_apart_from_each_other() -> None:
    arena = allocate_arena(10 * STRIDE, BLOCK_BYTES, option="x", piece_bytes=3 * STRIDE)
    views = [arena.view(slot) for slot in range(arena.num_slots)]
    assert arena.num_slots == 10
    for slot, view in enumerate(views):
        view[:] = bytes([slot]) * BLOCK_BYTES
    assert [view.tobytes() for view in views] == [bytes([at]) * BLOCK_BYTES for at in range(10)]
    assert STRIDE % ALIGNMENT_BYTES == 0


def test_memory_that_nobody_touches_costs_nothing() -> None:
    started_s = time.perf_counter()
    arena = allocate_arena(2**40 // 4, 2**20, option="x")
    assert arena.num_slots == 2**18
    arena.view(arena.num_slots - 1)[0] = 1
    assert time.perf_counter() - started_s < 5


@pytest.mark.parametrize("limit_slots", [2, 5, 9])
def test_an_arena_that_cannot_be_had_in_full_is_smaller_and_says_so_once(
    limit_slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        arena = allocate_arena(
            10 * STRIDE,
            BLOCK_BYTES,
            option="--host-bytes",
            allocators=(limited(limit_slots * STRIDE), map_memory),
            piece_bytes=2 * STRIDE,
        )
    assert arena.num_slots == limit_slots // 2 * 2
    (line,) = caplog.messages
    assert "--host-bytes 81920" in line
    assert str(arena.num_slots * STRIDE) in line


def test_memory_that_cannot_be_pinned_at_all_is_had_unpinned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arena = allocate_arena(
        10 * STRIDE, BLOCK_BYTES, option="--host-bytes", allocators=(limited(0), map_memory)
    )
    assert arena.num_slots == 10
    (line,) = caplog.messages
    assert "map_memory" in line
    assert "out of memory" in line


def test_no_memory_at_all_names_the_option_and_the_size() -> None:
    refused = (limited(0), limited(0))
    with pytest.raises(ArenaError, match=r"--host-bytes 81920.*out of memory"):
        allocate_arena(10 * STRIDE, BLOCK_BYTES, option="--host-bytes", allocators=refused)
    # Nothing is left behind: the next try may succeed.
    again = allocate_arena(10 * STRIDE, BLOCK_BYTES, option="--host-bytes")
    assert again.num_slots == 10


def test_room_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(ArenaError, match=r"--host-bytes 4096: less than one block of 8192 bytes"):
        allocate_arena(4096, BLOCK_BYTES, option="--host-bytes")


def test_blocks_come_back_as_they_were_stored() -> None:
    store, _ = store_of(4)
    places = [Place(record(number), slot) for slot, number in enumerate([7, 8, 9])]
    assert store.write(places, [payload(7), payload(8), payload(9)]) == [True, True, True]
    outcome, got = read_all(store, places)
    assert outcome == "done"
    assert got == [bytes(payload(number)) for number in (7, 8, 9)]


@given(at=st.integers(0, BLOCK_BYTES - 1), bit=st.integers(0, 7), bad=st.integers(0, 2))
def test_any_flipped_bit_is_found_and_ends_the_read_there(at: int, bit: int, bad: int) -> None:
    store, arena = store_of(3)
    places = [Place(record(slot), slot) for slot in range(3)]
    store.write(places, [payload(slot) for slot in range(3)])
    arena.view(bad)[at] ^= 1 << bit
    outcome, got = read_all(store, places)
    assert outcome == "damaged"
    assert got == [bytes(payload(slot)) for slot in range(bad)]


@pytest.mark.parametrize(
    "wanted",
    [
        Place(record(1), 1),
        Place(record(1), 0),
        Place(BlockRecord(record(0).key, b"\0" * 32, b"other tokens", 0), 0),
    ],
    ids=["empty slot", "another block", "same key, other tokens"],
)
def test_a_slot_that_holds_something_else_is_a_miss(wanted: Place) -> None:
    store, _ = store_of(2)
    store.write([Place(record(0), 0)], [payload(0)])
    assert read_all(store, [wanted]) == ("missing", [])


def test_a_slot_being_written_cannot_be_read() -> None:
    store, _ = store_of(1)
    place = Place(record(0), 0)
    store.write([place], [payload(0)])
    store.target(0)[:] = payload(0)
    assert read_all(store, [place]) == ("missing", [])
    store.seal(place)
    assert read_all(store, [place])[0] == "done"


def test_a_read_past_its_deadline_stops() -> None:
    store, _ = store_of(1)
    place = Place(record(0), 0)
    store.write([place], [payload(0)])
    assert read_all(store, [place], deadline_s=0.0) == ("stopped", [])


def test_a_read_that_nobody_wants_any_more_stops() -> None:
    store, _ = store_of(2)
    places = [Place(record(slot), slot) for slot in range(2)]
    store.write(places, [payload(0), payload(1)])
    seen: list[int] = []
    assert store.read(places, lambda index, view: bool(seen.append(index)), FAR_S) == "stopped"
    assert seen == [0]


def test_what_is_read_cannot_be_written() -> None:
    store, _ = store_of(1)
    store.write([Place(record(0), 0)], [payload(0)])
    with pytest.raises(TypeError):
        store.view(0)[0] = 1
