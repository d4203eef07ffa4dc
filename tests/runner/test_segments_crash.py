"""kill -9 at any moment, with and without damage in between: what is read afterwards is right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.segment_parts import (
    CAPACITY_BYTES,
    fill,
    open_store,
    read,
    readable,
    segment_files,
    until,
)

ROUNDS = 25


class Writers:
    """Processes that write, one at a time, until they are killed."""

    def __init__(self, root: Path) -> None:
        self._starter = subprocess.Popen(
            [sys.executable, "-m", "tests.runner.segment_writer", str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def write_and_kill(self, seed: int, after_s: float) -> None:
        starter = self._starter
        assert starter.stdin is not None
        assert starter.stdout is not None
        starter.stdin.write(f"{seed}\n")
        starter.stdin.flush()
        pid = int(starter.stdout.readline())
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        assert starter.stdout.readline() == "gone\n"

    def close(self) -> None:
        os.killpg(self._starter.pid, signal.SIGKILL)
        self._starter.communicate()


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    writers = Writers(tmp_path)
    yield writers
    writers.close()


def spoil(root: Path, rng: random.Random) -> None:
    """Flip some bits and cut a file off."""
    files = segment_files(root)
    for path in rng.choices(files, k=2):
        with path.open("r+b") as file:
            file.seek(rng.randrange(path.stat().st_size))
            file.write(rng.randbytes(1))
    if rng.random() < 0.5:
        path = rng.choice(files)
        with path.open("r+b") as file:
            file.truncate(rng.randrange(path.stat().st_size))


@pytest.mark.parametrize("has_damage", [False, True], ids=["kills only", "kills and damage"])
def test_killed_writers_leave_only_right_blocks_and_a_store_that_goes_on(
    tmp_path: Path, writers: Writers, has_damage: bool
) -> None:
    rng = random.Random(7)
    num_read = 0
    for round_ in range(ROUNDS):
        # From within the making of the first segment to long after it.
        writers.write_and_kill(seed=round_, after_s=0.1 * rng.random() ** 2)
        if has_damage and segment_files(tmp_path):
            spoil(tmp_path, rng)
        store, recovered = open_store(tmp_path)
        there = readable(store, recovered)
        num_read += there
        if not has_damage:
            # A process that dies loses nothing of what the kernel took.
            assert there == len(recovered)
            assert store.stats().segments_set_aside_total == 0
            assert store.stats().damaged_entries_total <= 1
        if not list(tmp_path.rglob("*.bad")):
            until(lambda store=store: store.ready_slots > 0)  # type: ignore[misc]
        new = fill(store, range(store.ready_slots)[:5], first_number=1_000)
        assert read(store, new) == ("done", len(new))
        store.close()
        assert list(tmp_path.rglob("*.tmp")) == []
        for bad in tmp_path.rglob("*.bad"):
            bad.unlink()

    assert num_read > 100
    assert sum(path.stat().st_size for path in segment_files(tmp_path)) <= CAPACITY_BYTES
