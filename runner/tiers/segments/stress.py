"""A stress test of a disk and of the threads on it: written and read at once, every byte compared.

It runs the store's own code in a scratch directory beside the segments, on the same filesystem, and
takes that away again; no segment is touched. Bounded in bytes and in seconds.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from runner.kvkeys import block_key, namespace_key, pack_tokens
from runner.tiers.segments.direct_io import aligned_buffer
from runner.tiers.segments.errors import SegmentsError
from runner.tiers.segments.store import SegmentStore
from runner.tiers.types import BlockRecord, Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runner.tiers.segments.direct_io import Os

# Not the 16 hex digits of a namespace: no store counts it, clears it up or opens it.
SCRATCH_NAME = "selftest"
# Written in one go, as the tier's writer does at most.
_BATCH_BLOCKS = 16
# Read in one go by each reader.
_READ_BLOCKS = 8
# The filesystem keeps at least as much again free while the test runs.
_ROOM_FACTOR = 2
# How often a thread looks whether there is something to write to or to read.
_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class StressResult:
    """What a stress test found.

    Attributes:
        blocks_written: Blocks that the store said it took.
        blocks_read: Blocks that came back as they were written; each may count several times.
        failed_writes: Blocks that it did not take, and segments that could not be made.
        failed_reads: Reads that the medium refused, or blocks that were not there.
        damaged: Blocks whose bytes were others.
        block_bytes: Size of each.
        seconds: How long it took.
        write_s: How long the writer was busy.
        read_s: How long the readers were busy, all together.
        num_readers: Threads that read at once, beside one that writes.
        is_direct: Whether the filesystem takes O_DIRECT.
    """

    blocks_written: int
    blocks_read: int
    failed_writes: int
    failed_reads: int
    damaged: int
    block_bytes: int
    seconds: float
    write_s: float
    read_s: float
    num_readers: int
    is_direct: bool

    @property
    def is_ok(self) -> bool:
        """Whether blocks came and went and every one was whole."""
        faults = self.failed_writes + self.failed_reads + self.damaged
        return not faults and self.blocks_written > 0 and self.blocks_read > 0

    @property
    def write_bytes_per_s(self) -> float:
        """Rate of the writer while others read."""
        return self.blocks_written * self.block_bytes / self.write_s if self.write_s else 0.0

    @property
    def read_bytes_per_s(self) -> float:
        """Rate of all readers together, while another thread wrote for a part of it."""
        per_thread_s = self.read_s / self.num_readers
        return self.blocks_read * self.block_bytes / per_thread_s if per_thread_s else 0.0


def stress(
    root: Path,
    *,
    block_bytes: int,
    block_size: int,
    max_bytes: int,
    max_s: float,
    num_readers: int,
    clock: Callable[[], float] = time.monotonic,
    files: Os | None = None,
) -> StressResult:
    """Write and read blocks for at most ``max_s`` seconds. Blocks; call it from a thread.

    Args:
        root: Folder of the segments.
        block_bytes: Payload of a block.
        block_size: Tokens of a block.
        max_bytes: Most that is kept on the disk meanwhile.
        max_s: Most seconds of reading and writing.
        num_readers: Threads that read at once.
        clock: Monotonic, seconds.
        files: The system calls.

    Raises:
        SegmentsInUseError: If another test runs there.
        SegmentsError: If there is no room, or the folder cannot be used.
    """
    try:
        found = os.statvfs(root)
    except OSError as error:
        raise SegmentsError(f"{root} cannot be used for a test: {error}") from error
    if found.f_bavail * found.f_frsize < _ROOM_FACTOR * max_bytes:
        reason = os.strerror(errno.ENOSPC)
        raise SegmentsError(f"{root}: {reason}: a test needs {_ROOM_FACTOR * max_bytes} bytes")
    scratch = root / SCRATCH_NAME
    namespace = namespace_key({"selftest": block_bytes})
    store, _ = SegmentStore.open(
        scratch,
        namespace=namespace,
        facts={"selftest": True},
        block_bytes=block_bytes,
        block_size=block_size,
        capacity_bytes=max_bytes,
        clock=clock,
        files=files,
    )
    try:
        return _Stress(store, namespace, block_size, num_readers, clock).run(max_s)
    finally:
        store.close()
        shutil.rmtree(scratch, ignore_errors=True)


class _Stress:
    """One run over one store."""

    def __init__(
        self,
        store: SegmentStore,
        namespace: bytes,
        block_size: int,
        num_readers: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._block_size = block_size
        self._num_readers = num_readers
        self._clock = clock
        # Random, so that a disk that compresses or joins equal blocks is tested like any other.
        self._pattern = np.frombuffer(random.randbytes(store.block_bytes), np.uint8)
        self._written: list[Place] = []
        self._is_all_written = False
        self._lock = threading.Lock()
        self._failed_writes = self._blocks_read = self._failed_reads = self._damaged = 0
        self._write_s = self._read_s = 0.0

    def run(self, max_s: float) -> StressResult:
        began_s = self._clock()
        deadline_s = began_s + max_s
        with ThreadPoolExecutor(1 + self._num_readers, "segments-stress") as threads:
            futures = [threads.submit(self._write, deadline_s)]
            futures += [
                threads.submit(self._read, number, deadline_s)
                for number in range(self._num_readers)
            ]
            for future in futures:
                future.result()
        stats = self._store.stats()
        return StressResult(
            blocks_written=len(self._written),
            blocks_read=self._blocks_read,
            failed_writes=self._failed_writes + stats.failed_segments_total,
            failed_reads=self._failed_reads,
            damaged=self._damaged,
            block_bytes=self._store.block_bytes,
            seconds=self._clock() - began_s,
            write_s=self._write_s,
            read_s=self._read_s,
            num_readers=self._num_readers,
            is_direct=stats.is_direct,
        )

    def _write(self, deadline_s: float) -> None:
        """Fill the store once, as fast as it grows."""
        slot = 0
        buffers = [aligned_buffer(self._store.block_bytes) for _ in range(_BATCH_BLOCKS)]
        try:
            while self._clock() < deadline_s:
                count = min(_BATCH_BLOCKS, self._store.ready_slots - slot)
                if count <= 0:
                    if not self._store.is_growing:
                        return
                    time.sleep(_PAUSE_S)
                    continue
                places = [self._place(slot + index) for index in range(count)]
                for place, buffer in zip(places, buffers, strict=False):
                    self._fill(place.slot, buffer)
                began_s = self._clock()
                stored = self._store.write(places, buffers[:count])
                self._write_s += self._clock() - began_s
                self._failed_writes += stored.count(False)
                self._written += [p for p, ok in zip(places, stored, strict=True) if ok]
                slot += count
        finally:
            self._is_all_written = True

    def _read(self, number: int, deadline_s: float) -> None:
        """Read what is there, anywhere, and once in order when all of it is."""
        chance = random.Random(number)
        while not self._is_all_written and self._clock() < deadline_s:
            written = len(self._written)
            if not written:
                time.sleep(_PAUSE_S)
                continue
            first = chance.randrange(written)
            self._read_some(self._written[first : first + _READ_BLOCKS], deadline_s)
        # Each reader has its own part of it.
        step = self._num_readers * _READ_BLOCKS
        for first in range(number * _READ_BLOCKS, len(self._written), step):
            if self._clock() >= deadline_s:
                return
            self._read_some(self._written[first : first + _READ_BLOCKS], deadline_s)

    def _read_some(self, wanted: list[Place], deadline_s: float) -> None:
        num_good = num_damaged = 0

        def deliver(index: int, payload: memoryview) -> bool:
            nonlocal num_good, num_damaged
            if self._is_as_written(wanted[index].slot, payload):
                num_good += 1
            else:
                num_damaged += 1
            return True

        began_s = self._clock()
        outcome = self._store.read(wanted, deliver, deadline_s)
        with self._lock:
            self._read_s += self._clock() - began_s
            self._blocks_read += num_good
            self._damaged += num_damaged + (outcome == "damaged")
            self._failed_reads += outcome in ("failed", "missing")

    def _place(self, slot: int) -> Place:
        tokens = pack_tokens([slot] * self._block_size)
        key = block_key(self._namespace, tokens)
        return Place(BlockRecord(key, self._namespace, tokens, 0), slot)

    def _fill(self, slot: int, buffer: memoryview) -> None:
        target = np.frombuffer(buffer, np.uint8)
        np.bitwise_xor(self._pattern, np.uint8(slot & 0xFF), out=target)

    def _is_as_written(self, slot: int, payload: memoryview) -> bool:
        found = np.bitwise_xor(np.frombuffer(payload, np.uint8), np.uint8(slot & 0xFF))
        return bool(np.array_equal(found, self._pattern))
