"""The segment store on a disk that is full, broken, slow or short."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from runner.tiers.types import Place
from tests.runner.segment_parts import (
    BLOCK_BYTES,
    FailAt,
    FaultyOs,
    ManualClock,
    fill,
    grow,
    nothing,
    open_store,
    payload,
    read,
    readable,
    ready_store,
    record,
    segment_files,
    until,
)

WRITE_ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS]


def still_store(root: Path, files: FaultyOs, clock: ManualClock | None = None) -> Any:
    """Open a store whose background thread has nothing left to do."""
    store = ready_store(root, files=files, clock=clock or ManualClock())
    grow(store)
    store.invalidate(range(store.ready_slots))
    assert not store.is_growing
    return store


@pytest.mark.parametrize("code", WRITE_ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("nth", range(1, 7))
def test_a_write_that_fails_anywhere_costs_only_its_own_blocks(
    tmp_path: Path, nth: int, code: int
) -> None:
    files = FaultyOs()
    store = still_store(tmp_path, files)
    old = fill(store, range(8))
    files.before = FailAt("pwritev", nth, code)
    # Two runs, each: free the old entries, payload, new entries.
    new = [Place(record(100 + slot), slot) for slot in (0, 1, 4, 5)]
    stored = store.write(new, [payload(place.record) for place in new])
    files.before = nothing

    assert stored == ([False] * 4 if nth <= 3 else [True, True, False, False])
    lost = stored.count(False)
    assert store.stats().failed_writes_total + store.stats().refused_writes_total == lost
    for place, is_there in zip(new, stored, strict=True):
        assert read(store, [place]) == (("done", 1) if is_there else ("missing", 0))
    assert readable(store, [place for place in old if place.slot in (2, 3, 6, 7)]) == 4
    store.close()

    # Whatever stayed on the disk of a write that failed is right or not there.
    store, recovered = open_store(tmp_path)
    there = {place.record.key for place in recovered}
    assert {place.record.key for place in new[: stored.count(True)]} <= there
    for place in recovered:
        assert read(store, [place]) in [("done", 1), ("damaged", 0)]
    store.close()


@pytest.mark.parametrize("code", WRITE_ERRORS, ids=errno.errorcode.get)
def test_writing_pauses_longer_after_each_failure_and_goes_on_after_a_success(
    tmp_path: Path, code: int
) -> None:
    clock, files = ManualClock(), FaultyOs()
    store = still_store(tmp_path, files, clock)
    files.before = FailAt("pwritev", 1, code, forever=True)
    pauses_s = []
    with capture_logs() as logs:
        for _ in range(9):
            assert fill(store, [3]) == []
            assert store.is_paused
            tried = files.count("pwritev")
            assert fill(store, [3, 4, 5]) == []
            assert files.count("pwritev") == tried
            begun_s = clock.now_s
            while store.is_paused:
                clock.now_s += 0.5
            pauses_s.append(clock.now_s - begun_s)
        # One line a pause however many blocks it cost.
        assert len(logs) == 9

    assert pauses_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    stats = store.stats()
    assert (stats.failed_writes_total, stats.refused_writes_total) == (9, 27)
    assert stats.pauses_total == 9

    files.before = nothing
    assert len(fill(store, [3])) == 1
    files.before = FailAt("pwritev", 1, code)
    assert fill(store, [4]) == []
    clock.now_s += 1
    assert not store.is_paused
    store.close()


def test_blocks_can_be_read_while_writing_is_paused(tmp_path: Path) -> None:
    files = FaultyOs()
    store = still_store(tmp_path, files)
    places = fill(store, range(6))
    files.before = FailAt("pwritev", 1, errno.ENOSPC, forever=True)
    fill(store, [7])

    assert store.is_paused
    assert read(store, places) == ("done", 6)
    store.close()


def test_a_block_whose_freeing_failed_is_forgotten_all_the_same(tmp_path: Path) -> None:
    files = FaultyOs()
    store = still_store(tmp_path, files)
    places = fill(store, range(6))
    files.before = FailAt("pwritev", 1, errno.EIO, forever=True)
    store.invalidate([2])
    files.before = nothing

    assert read(store, places[2:]) == ("missing", 0)
    assert readable(store, places) == 5
    store.close()


@pytest.mark.parametrize("max_bytes", [1, 100, 4_095, 4_096, 5_000, 13_000])
def test_a_disk_that_moves_less_than_it_was_asked_is_asked_again(
    tmp_path: Path, max_bytes: int
) -> None:
    files = FaultyOs()
    # O_DIRECT moves whole pages.
    files.has_direct_io = max_bytes % 4_096 == 0
    store = still_store(tmp_path, files)
    files.max_bytes = max_bytes
    places = fill(store, range(6))
    files.max_bytes = None

    # Less than a page of payload is no progress; tables may come byte by byte.
    assert len(places) == (6 if max_bytes >= 4_096 else 0)
    assert read(store, places) == ("done", len(places))
    files.max_bytes = max_bytes
    assert read(store, places) == ("done", len(places))
    store.close()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_read_that_fails_says_so_and_the_next_one_works(tmp_path: Path, nth: int) -> None:
    files = FaultyOs()
    store = still_store(tmp_path, files)
    places = fill(store, range(6))
    # Two runs, hence two reads.
    wanted = [places[0], places[1], places[4], places[5]]
    files.before = FailAt("preadv", nth, errno.EIO)

    assert read(store, wanted) == ("failed", 0 if nth == 1 else 2)
    assert store.stats().failed_reads_total == 1
    assert read(store, wanted) == ("done", 4)
    store.close()


def test_a_slow_disk_is_not_waited_for_past_the_deadline(tmp_path: Path) -> None:
    clock, files = ManualClock(), FaultyOs()
    block_bytes = 2**21
    store = ready_store(
        tmp_path,
        num_slots=12,
        files=files,
        clock=clock,
        block_bytes=block_bytes,
        capacity_bytes=52 * block_bytes,
    )
    places = fill(store, range(12))
    until(lambda: store.ready_slots >= 24)

    def slow(name: str, target: Any, offset: int) -> None:
        if name == "preadv":
            clock.now_s += 5

    files.calls.clear()
    files.before = slow
    outcome, count = read(store, places, deadline_s=clock.now_s + 12)

    assert outcome == "stopped"
    assert count <= 8
    # What was on its way when the time was over, and nothing more.
    assert files.count("preadv") <= 3
    store.close()


@pytest.mark.parametrize("moment", ["before the read", "after the payload"])
def test_a_reader_racing_an_overwrite_never_sees_the_other_block(
    tmp_path: Path, moment: str
) -> None:
    files = FaultyOs()
    store = still_store(tmp_path, files)
    (old,) = fill(store, [3])
    new = Place(record(100), 3)
    raced = []

    def overwrite(name: str, target: Any, offset: int) -> None:
        if name == "preadv" and not raced:
            raced.append(True)
            if moment == "after the payload":
                # The payload is there and the entry is not: as seen in the middle of a write.
                files.before = FailAt("pwritev", 3, errno.EIO)
            store.write([new], [payload(new.record)])

    files.before = overwrite
    assert read(store, [old]) == ("missing", 0)
    assert store.stats().damaged_reads_total == 0
    store.close()


def test_readers_and_a_writer_in_many_threads_see_only_whole_blocks(tmp_path: Path) -> None:
    store = still_store(tmp_path, FaultyOs())
    stop = threading.Event()
    outcomes: list[str] = []

    def read_all() -> None:
        while not stop.is_set():
            for number in range(0, 40, 8):
                wanted = [Place(record(number + slot), slot) for slot in range(8)]
                outcomes.append(read(store, wanted)[0])

    readers = [threading.Thread(target=read_all) for _ in range(3)]
    for reader in readers:
        reader.start()
    for round_ in range(60):
        assert len(fill(store, range(8), first_number=round_ % 5 * 8)) == 8
    stop.set()
    for reader in readers:
        reader.join()

    assert set(outcomes) <= {"done", "missing"}
    assert store.stats().damaged_reads_total == 0
    store.close()


class TestOpening:
    def test_a_segment_that_cannot_be_read_is_left_out_and_left_alone(self, tmp_path: Path) -> None:
        store = ready_store(tmp_path)
        grow(store)
        store.close()
        broken = segment_files(tmp_path)[1]
        files = FaultyOs()

        def refuse(name: str, target: Any, offset: int) -> None:
            if name == "open" and target == broken:
                raise OSError(errno.EIO, "Input/output error")

        files.before = refuse
        store, recovered = open_store(tmp_path, files=files)
        assert len(recovered) == 24
        assert read(store, recovered) == ("done", 24)
        assert store.stats().segments_unreadable_total == 1
        store.close()

        store, recovered = open_store(tmp_path)
        assert len(recovered) == 32
        store.close()

    def test_a_damaged_segment_that_cannot_be_renamed_is_left_out(self, tmp_path: Path) -> None:
        store = ready_store(tmp_path)
        grow(store)
        store.close()
        segment_files(tmp_path)[0].write_bytes(b"x" * 20_000)
        files = FaultyOs()
        files.before = FailAt("rename", 1, errno.EROFS)
        store, recovered = open_store(tmp_path, files=files)

        assert len(recovered) == 24
        assert store.stats().segments_unreadable_total == 1
        store.close()

    def test_a_disk_that_does_not_take_the_probe_is_used_through_the_page_cache(
        self, tmp_path: Path
    ) -> None:
        files = FaultyOs()
        files.before = FailAt("pwritev", 1, errno.EINVAL)
        store = ready_store(tmp_path, files=files)

        assert not store.stats().is_direct
        assert read(store, fill(store, range(6))) == ("done", 6)
        store.close()

    def test_without_room_for_its_description_the_store_opens(self, tmp_path: Path) -> None:
        store = ready_store(tmp_path)
        places = fill(store, range(4))
        store.close()
        (described,) = tmp_path.glob("*/namespace.json")
        described.unlink()
        described.mkdir()

        store, recovered = open_store(tmp_path)
        assert len(recovered) == 4
        assert read(store, places) == ("done", 4)
        store.close()
        assert os.listdir(described) == []


def test_a_block_of_one_byte_and_one_of_several_pages_are_treated_alike(tmp_path: Path) -> None:
    for block_bytes in (1, BLOCK_BYTES, 5 * 4096):
        root = tmp_path / str(block_bytes)
        store = ready_store(root, block_bytes=block_bytes, capacity_bytes=2_000_000)
        assert read(store, fill(store, range(8))) == ("done", 8)
        store.close()
