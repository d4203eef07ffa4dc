"""The segment store on a disk that does as it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runner.tiers.segments.direct_io import aligned_buffer
from runner.tiers.segments.errors import SegmentsError, SegmentsInUseError
from runner.tiers.segments.store import SegmentStore
from runner.tiers.types import Place
from tests.runner.segment_parts import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    FACTS,
    LAYOUT,
    NAMESPACE,
    FaultyOs,
    ManualClock,
    fill,
    open_store,
    payload,
    read,
    readable,
    ready_store,
    record,
    until,
)

ALIGNED_BYTES = 2 * 4096


@pytest.mark.parametrize("has_direct_io", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, ALIGNED_BYTES], ids=["padded", "aligned"])
def test_what_was_written_is_read_before_and_after_a_restart(
    tmp_path: Path, has_direct_io: bool, block_bytes: int
) -> None:
    files = FaultyOs()
    files.has_direct_io = has_direct_io
    store = ready_store(tmp_path, files=files, block_bytes=block_bytes)
    places = fill(store, range(6))

    assert len(places) == 6
    assert store.stats().is_direct is has_direct_io
    assert read(store, places) == ("done", 6)
    assert read(store, places[::-1]) == ("done", 6)
    store.close()

    store, recovered = open_store(tmp_path, files=files, block_bytes=block_bytes)
    assert sorted(recovered, key=lambda place: place.slot) == places
    assert read(store, places) == ("done", 6)
    store.close()


def test_payload_that_is_aligned_is_written_from_where_it_is(tmp_path: Path) -> None:
    files = FaultyOs()
    store = ready_store(tmp_path, files=files, block_bytes=ALIGNED_BYTES)
    memory = aligned_buffer(2 * ALIGNED_BYTES)
    places = [Place(record(number), number) for number in range(2)]
    memory[:ALIGNED_BYTES] = payload(record(0), ALIGNED_BYTES)
    memory[ALIGNED_BYTES:] = payload(record(1), ALIGNED_BYTES)

    assert store.write(places, [memory[:ALIGNED_BYTES], memory[ALIGNED_BYTES:]]) == [True, True]
    assert read(store, places) == ("done", 2)
    store.close()


def test_neighbours_move_in_one_call_each_way(tmp_path: Path) -> None:
    files = FaultyOs()
    store = ready_store(tmp_path, num_slots=8, files=files)
    until(lambda: not store.stats().failed_segments_total and store.ready_slots >= 8)
    fill(store, [7])
    until(lambda: store.ready_slots >= 16)
    files.calls.clear()
    places = fill(store, [4, 2, 0, 1, 3])

    assert files.count("pwritev", at_least=5 * LAYOUT.stride_bytes) == 1
    # Payload and entries; the slots were free, so no old entries go first.
    assert files.count("pwritev") == 2

    places.sort(key=lambda place: place.slot)
    assert read(store, places) == ("done", 5)
    assert files.count("preadv") == 1
    store.close()


def test_a_run_ends_where_its_segment_ends(tmp_path: Path) -> None:
    store = ready_store(tmp_path, num_slots=8)
    fill(store, range(8))
    until(lambda: store.ready_slots >= 16)
    places = fill(store, range(2, 14))

    assert read(store, places) == ("done", 12)
    store.close()


def test_an_overwritten_block_is_gone_and_the_new_one_there(tmp_path: Path) -> None:
    store = ready_store(tmp_path)
    old = fill(store, range(4))
    new = fill(store, range(2), first_number=100)

    assert read(store, old[:1]) == ("missing", 0)
    assert read(store, [*old[2:], old[0]]) == ("missing", 2)
    assert read(store, new) == ("done", 2)
    store.close()

    store, recovered = open_store(tmp_path)
    assert {place.record.key for place in recovered} == {p.record.key for p in [*old[2:], *new]}
    store.close()


def test_of_two_copies_the_newer_is_recovered_and_the_older_freed(tmp_path: Path) -> None:
    store = ready_store(tmp_path)
    fill(store, [5])
    fill(store, [2])
    store.close()

    store, recovered = open_store(tmp_path)
    assert recovered == [Place(record(0), 2)]
    assert read(store, recovered) == ("done", 1)
    assert read(store, [Place(record(0), 5)]) == ("missing", 0)
    store.invalidate([2])
    store.close()

    store, recovered = open_store(tmp_path)
    assert recovered == []
    store.close()


def test_what_was_invalidated_stays_away(tmp_path: Path) -> None:
    store = ready_store(tmp_path)
    places = fill(store, range(6))
    # Slots that do not exist are not an error: whoever asks may know of more than there are.
    store.invalidate([4, 1, 2, 10_000])

    assert readable(store, places) == 3
    assert store.stats().live_slots == 3
    store.close()

    store, recovered = open_store(tmp_path)
    assert {place.slot for place in recovered} == {0, 3, 5}
    store.close()


@pytest.mark.parametrize(
    "other",
    [
        Place(replace(record(1), tokens=record(2).tokens), 1),
        Place(record(99), 1),
        Place(record(1), 2),
        Place(record(1), 7),
        Place(record(1), 10_000),
        Place(record(1), -1),
    ],
    ids=["other tokens", "other key", "other slot", "free slot", "no such slot", "negative slot"],
)
def test_a_block_that_is_not_there_ends_the_read_behind_those_before_it(
    tmp_path: Path, other: Place
) -> None:
    store = ready_store(tmp_path)
    places = fill(store, range(4))

    assert read(store, [places[0], other, places[2]]) == ("missing", 1)
    store.close()


def test_an_empty_request_is_done(tmp_path: Path) -> None:
    store = ready_store(tmp_path)

    assert read(store, []) == ("done", 0)
    assert store.write([], []) == []
    store.close()


def test_a_receiver_who_has_enough_stops_the_read(tmp_path: Path) -> None:
    store = ready_store(tmp_path)
    places = fill(store, range(4))
    seen = []

    def deliver(index: int, content: memoryview) -> bool:
        seen.append(index)
        return index < 1

    assert store.read(places, deliver, float("inf")) == "stopped"
    assert seen == [0, 1]
    store.close()


def test_a_read_past_its_deadline_delivers_nothing_more(tmp_path: Path) -> None:
    clock = ManualClock()
    store = ready_store(tmp_path, clock=clock)
    places = fill(store, range(4))
    seen = []

    def deliver(index: int, content: memoryview) -> bool:
        seen.append(index)
        clock.now_s += 1
        return True

    assert read(store, places, deadline_s=clock.now_s) == ("stopped", 0)
    assert store.read(places, deliver, clock.now_s + 2) == "stopped"
    assert seen == [0, 1]
    store.close()


def test_a_failing_receiver_leaves_the_store_usable(tmp_path: Path) -> None:
    store = ready_store(tmp_path)
    places = fill(store, range(4))

    def deliver(index: int, content: memoryview) -> bool:
        raise RuntimeError("a pool that is gone")

    with pytest.raises(RuntimeError, match="a pool that is gone"):
        store.read(places, deliver, float("inf"))
    assert read(store, places) == ("done", 4)
    store.close()


def test_reads_longer_than_a_buffer_come_in_order(tmp_path: Path) -> None:
    block_bytes = 2**21
    store = ready_store(
        tmp_path, num_slots=11, block_bytes=block_bytes, capacity_bytes=50 * block_bytes
    )
    places = fill(store, range(11))
    # Neighbours, gaps and backward steps; more of them than two buffers hold.
    wanted = [places[slot] for slot in (0, 1, 2, 3, 4, 9, 7, 8, 10, 5, 6)]

    assert len(places) == 11
    assert read(store, wanted) == ("done", 11)
    store.invalidate([10])
    assert read(store, wanted) == ("missing", 8)
    store.close()


def test_a_payload_of_another_size_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = ready_store(tmp_path)
    places = [Place(record(0), 0), Place(record(1), 1)]

    with pytest.raises(ValueError, match="a payload of 4999 bytes, expected 5000"):
        store.write(places, [payload(record(0)), memoryview(bytes(4_999))])
    assert store.stats().live_slots == 0
    store.close()


def test_slots_that_are_not_there_yet_take_nothing(tmp_path: Path) -> None:
    store = ready_store(tmp_path)
    until(lambda: store.ready_slots == 8)

    assert [place.slot for place in fill(store, [7, 8, 9, 10_000])] == [7]
    assert store.stats().refused_writes_total == 3
    store.close()


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("not a directory")

    with pytest.raises(SegmentsError, match=r"file\S* cannot be used for segments"):
        open_store(root)


def test_a_second_opener_is_told_who_has_the_directory(tmp_path: Path) -> None:
    store = ready_store(tmp_path)

    with pytest.raises(SegmentsInUseError) as refused:
        open_store(tmp_path)
    assert refused.value.pid == os.getpid()
    assert str(refused.value.directory) in str(refused.value)
    assert str(os.getpid()) in str(refused.value)
    store.close()

    store, _ = open_store(tmp_path)
    store.close()


def test_a_directory_in_use_by_another_process_is_refused_until_that_ends(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from tests.runner.segment_parts import ready_store; "
        "ready_store(pathlib.Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(SegmentsInUseError) as refused:
            open_store(tmp_path)
        assert refused.value.pid == other.pid
        other.kill()
    store, _ = open_store(tmp_path)
    store.close()


def test_without_direct_io_the_store_says_so_once_and_works(tmp_path: Path) -> None:
    files = FaultyOs()
    files.has_direct_io = False
    with capture_logs() as logs:
        store = ready_store(tmp_path, files=files)
        places = fill(store, range(6))
        assert read(store, places) == ("done", 6)
        store.close()

    assert [line["event"] for line in logs if "O_DIRECT" in line["event"]] == [
        "no O_DIRECT: segments go through the page cache"
    ]


def test_the_namespace_is_described_for_people(tmp_path: Path) -> None:
    store = ready_store(tmp_path)
    described = json.loads((tmp_path / NAMESPACE.hex()[:16] / "namespace.json").read_text())

    assert described == {
        "namespace": NAMESPACE.hex(),
        "layout_version": 1,
        "block_bytes": BLOCK_BYTES,
        "block_size": BLOCK_SIZE,
        "facts": FACTS,
    }
    store.close()


def test_a_store_opened_and_closed_at_once_leaves_nothing_half_made(tmp_path: Path) -> None:
    for _ in range(5):
        store, _ = open_store(tmp_path)
        assert isinstance(store, SegmentStore)
        store.close()

    assert list(tmp_path.rglob("*.tmp")) == []
