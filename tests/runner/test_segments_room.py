"""How much room segments take: ahead of use, within the limit, beside other namespaces."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.tiers.segments.clean import main as clean
from runner.tiers.segments.errors import SegmentsError
from runner.tiers.segments.store import SegmentStore
from tests.runner.segment_parts import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    FACTS,
    LAYOUT,
    NAMESPACE,
    FailAt,
    FaultyOs,
    ManualClock,
    fill,
    grow,
    nothing,
    open_store,
    read,
    readable,
    ready_store,
    record,
    segment_files,
    until,
)


def wait_for_slots(store: SegmentStore) -> None:
    until(lambda: store.ready_slots > 0)


def bytes_under(root: Path) -> int:
    """Return what the segments under a folder occupy, holes not counted."""
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*.kv"))


def in_growth(fault: FailAt) -> Callable[[str, Any, int], None]:
    """Return a fault that only the thread that makes segments meets."""

    def before(name: str, target: Any, offset: int) -> None:
        if threading.current_thread().name == "segments-grow":
            fault(name, target, offset)

    return before


def test_segments_are_made_ahead_of_use_until_the_capacity_is_full(tmp_path: Path) -> None:
    store = ready_store(tmp_path)

    assert grow(store) == [8, 16, 24, 32]
    assert store.ready_slots <= store.num_slots
    # Their bytes are really there: nothing has to be found on the disk when a slot is written.
    occupied = bytes_under(tmp_path)
    assert store.stats().file_bytes <= occupied <= CAPACITY_BYTES
    fill(store, range(store.ready_slots), first_number=1_000)
    assert bytes_under(tmp_path) == occupied
    store.close()


@pytest.mark.parametrize("capacity_slots", [1, 2, 3, 5, 30, 700])
@pytest.mark.parametrize("block_bytes", [1, BLOCK_BYTES, 24_576])
def test_no_capacity_is_ever_exceeded(
    tmp_path: Path, capacity_slots: int, block_bytes: int
) -> None:
    stride_bytes = -(-block_bytes // 4096) * 4096
    capacity_bytes = 3 * 4096 + capacity_slots * (stride_bytes + 256)
    store = ready_store(tmp_path, block_bytes=block_bytes, capacity_bytes=capacity_bytes)
    grow(store)

    stats = store.stats()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) == stats.file_bytes
    assert stats.file_bytes <= capacity_bytes
    assert 1 <= store.ready_slots <= store.num_slots
    store.close()


def test_a_lowered_limit_takes_effect_at_once_and_costs_the_emptiest_segments(
    tmp_path: Path,
) -> None:
    store = ready_store(tmp_path)
    grow(store)
    store.invalidate([slot for slot in range(32) if slot // 8 != 2])
    store.close()

    store, recovered = open_store(tmp_path, capacity_bytes=CAPACITY_BYTES // 3)
    assert {place.record.key for place in recovered} == {record(n).key for n in range(16, 24)}
    assert read(store, recovered) == ("done", 8)
    assert bytes_under(tmp_path) <= CAPACITY_BYTES // 3
    store.close()


def test_a_capacity_without_room_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SegmentsError, match="10000 bytes hold no block of 5000 bytes; expected"):
        open_store(tmp_path, capacity_bytes=10_000)


class TestGrowing:
    @pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "rename"])
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
    def test_a_segment_that_cannot_be_made_leaves_nothing_and_is_tried_again(
        self, tmp_path: Path, call: str, code: int
    ) -> None:
        clock, files = ManualClock(), FaultyOs()
        store = ready_store(tmp_path, num_slots=8, files=files, clock=clock)
        files.before = in_growth(FailAt(call, 1, code, forever=True))
        fill(store, range(8))
        until(lambda: store.stats().failed_segments_total == 1)

        assert list(tmp_path.rglob("*.tmp")) == []
        assert not store.is_growing
        assert store.ready_slots == 8
        files.before = nothing
        clock.now_s += 1
        fill(store, range(8))
        until(lambda: store.ready_slots > 8)
        assert read(store, fill(store, range(12))) == ("done", 12)
        store.close()

    def test_a_disk_full_from_the_start_pauses_the_store_until_there_is_room(
        self, tmp_path: Path
    ) -> None:
        clock, files = ManualClock(), FaultyOs()
        files.before = in_growth(FailAt("fsync", 1, errno.ENOSPC))
        store, recovered = open_store(tmp_path, files=files, clock=clock)
        until(lambda: store.stats().failed_segments_total == 1)

        assert recovered == []
        assert store.is_paused
        assert fill(store, range(4)) == []
        clock.now_s += 1
        fill(store, range(4))
        until(lambda: store.ready_slots > 0)
        # Where the disk says there is room and there is not, half may fit.
        assert segment_files(tmp_path)[0].stat().st_size == LAYOUT.file_bytes(4)
        assert not store.is_paused
        assert len(fill(store, range(4))) == 4
        store.close()

    def test_space_that_others_need_is_left_and_fewer_slots_are_made(self, tmp_path: Path) -> None:
        files = FaultyOs()
        files.free_bytes = LAYOUT.file_bytes(3) + 8_192

        def take(name: str, target: Any, offset: int) -> None:
            if name == "rename":
                files.free_bytes = 0

        files.before = take
        store = ready_store(tmp_path, files=files)
        until(lambda: not store.is_growing)

        assert len(fill(store, range(4))) == 3
        assert store.ready_slots == 3
        assert not store.is_paused
        assert store.stats().failed_segments_total == 0
        store.close()

    def test_a_limit_on_file_sizes_is_a_counted_failure(self, tmp_path: Path) -> None:
        script = (
            "import pathlib, resource, sys\n"
            "from tests.runner.segment_parts import fill, open_store, until\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
            "store, _ = open_store(pathlib.Path(sys.argv[1]))\n"
            # 8 and 4 slots are too many for this limit.
            "until(lambda: store.ready_slots > 0, 20)\n"
            "found = store.stats().failed_segments_total >= 2, len(fill(store, range(4)))\n"
            # Its thread tries again meanwhile, and logs.
            "store.close()\n"
            "print(*found)\n"
        )
        out = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            check=True,
            text=True,
        ).stdout

        assert out.splitlines()[-1] == "True 2"
        assert list(tmp_path.rglob("*.tmp")) == []


CHANGES = [
    {"tensor_parallel": 2},
    {"dtype": "float8"},
    {"block_size": 32},
    {"model": "tiny, another revision"},
    {"layout_version": 2},
]


def test_a_restart_with_other_facts_finds_nothing_and_counts_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ready_store(tmp_path)
    own = fill(store, range(6))
    store.close()
    for change in CHANGES:
        before = bytes_under(tmp_path)
        store, recovered = open_store(
            tmp_path, facts={**FACTS, **change}, capacity_bytes=before + CAPACITY_BYTES
        )
        assert recovered == []
        assert store.stats().other_namespaces_bytes >= before
        wait_for_slots(store)
        assert readable(store, own) == 0
        assert len(fill(store, range(4), first_number=500)) == 4
        store.close()

    capsys.readouterr()
    assert clean([str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == len(CHANGES) + 1
    assert {**FACTS, "dtype": "float8"} in [namespace["facts"] for namespace in listed]
    assert sum(namespace["bytes"] for namespace in listed) >= bytes_under(tmp_path)

    store, recovered = open_store(tmp_path, capacity_bytes=before + 2 * CAPACITY_BYTES)
    assert len(recovered) == 6
    assert read(store, own) == ("done", 6)
    store.close()


def test_other_namespaces_leave_less_room_until_they_are_deleted(tmp_path: Path) -> None:
    clock = ManualClock()
    other = ready_store(tmp_path, facts={"model": "other"})
    grow(other)
    other.close()

    store, _ = open_store(tmp_path, clock=clock)
    until(lambda: not store.is_growing)
    assert store.ready_slots == 0
    assert bytes_under(tmp_path) <= CAPACITY_BYTES

    name = other_name(tmp_path)
    assert clean([str(tmp_path), "--delete", name]) == 0
    assert not (tmp_path / name).exists()
    clock.now_s += 100
    assert fill(store, range(4)) == []
    until(lambda: store.ready_slots > 0)
    assert len(fill(store, range(4))) == 4
    store.close()


def other_name(root: Path) -> str:
    (name,) = {path.name for path in root.iterdir()} - {NAMESPACE.hex()[:16]}
    return name


class TestClean:
    def test_a_namespace_in_use_is_not_deleted(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = ready_store(tmp_path)
        places = fill(store, range(4))

        assert clean([str(tmp_path), "--delete", NAMESPACE.hex()[:16]]) == 1
        assert f"in use by process {os.getpid()}" in capsys.readouterr().err
        assert read(store, places) == ("done", 4)
        store.close()

    def test_an_unknown_namespace_is_a_usage_error(self, tmp_path: Path) -> None:
        with pytest.raises(SystemExit) as exit_:
            clean([str(tmp_path), "--delete", "../etc"])
        assert exit_.value.code == 2

    def test_a_root_that_cannot_be_read_is_an_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert clean([str(tmp_path / "nowhere")]) == 1
        assert "nowhere" in capsys.readouterr().err

    def test_foreign_files_are_kept_and_their_directory_with_them(self, tmp_path: Path) -> None:
        store = ready_store(tmp_path)
        store.close()
        directory = tmp_path / NAMESPACE.hex()[:16]
        (directory / "notes.txt").write_text("mine")

        assert clean([str(tmp_path), "--delete", directory.name]) == 0
        assert sorted(path.name for path in directory.iterdir()) == ["lock", "notes.txt"]

    def test_only_what_was_set_aside_is_deleted_when_asked(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = ready_store(tmp_path)
        places = fill(store, range(8))
        until(lambda: store.ready_slots == 16)
        store.close()
        segment_files(tmp_path)[1].write_bytes(b"not a segment")
        store, _ = open_store(tmp_path)
        store.close()

        assert clean([str(tmp_path), "--delete-bad", NAMESPACE.hex()[:16]]) == 0
        assert list(tmp_path.rglob("*.bad")) == []
        assert "13 bytes freed" in capsys.readouterr().err
        store, recovered = open_store(tmp_path)
        assert len(recovered) == len(places)
        store.close()

    def test_the_command_lists_namespaces_with_their_facts(self, tmp_path: Path) -> None:
        ready_store(tmp_path).close()
        listed = subprocess.run(
            [sys.executable, "-m", "runner.tiers.segments.clean", str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout

        assert NAMESPACE.hex()[:16] in listed
        assert "dtype=float32" in listed
