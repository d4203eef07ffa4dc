"""Writing and forgetting blocks: the old entry goes first, the new one comes last."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import structlog

from runner.tiers.segments.backoff import Backoff
from runner.tiers.segments.direct_io import BufferStack, is_aligned
from runner.tiers.segments.layout import Entry, checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.tiers.segments.arena import Arena
    from runner.tiers.segments.files import Segment
    from runner.tiers.segments.layout import SegmentLayout
    from runner.tiers.segments.tally import Tally
    from runner.tiers.types import BlockRecord, Place

# Written at once. Beyond these a disk gains nothing, and readers wait behind the write.
_MAX_BLOCKS = 64
_MAX_PIECE_BYTES = 16 * 2**20

# Helpers computing checksums while their caller writes: one caller is the rule. Below these bytes
# waking a helper costs more than it saves.
_MAX_HELPERS = 1
_MIN_HELPED_BYTES = 2 * 2**20

_log = structlog.get_logger()


class BlockWriter:
    """Writes of one store. Any thread; writes into one segment take turns."""

    def __init__(
        self,
        layout: SegmentLayout,
        arena: Arena,
        *,
        next_sequence: int,
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._arena = arena
        self._sequence = itertools.count(next_sequence)
        self._tally = tally
        self._backoff = Backoff(clock)
        self._max_blocks = max(1, min(_MAX_BLOCKS, _MAX_PIECE_BYTES // layout.stride_bytes))
        self._bounce = BufferStack(self._max_blocks * layout.stride_bytes)
        self._helpers = ThreadPoolExecutor(_MAX_HELPERS, "segments-sum")

    @property
    def is_paused(self) -> bool:
        """Whether writing has stopped for a while."""
        return self._backoff.remaining_s > 0

    def close(self) -> None:
        """End the helpers."""
        self._helpers.shutdown()

    def write(self, places: Sequence[Place], payloads: Sequence[memoryview]) -> list[bool]:
        """See ``BlockStore.write``.

        Raises:
            ValueError: If a payload is not of a block's size.
        """
        for payload in payloads:
            if payload.nbytes != self._layout.block_bytes:
                expected = self._layout.block_bytes
                raise ValueError(f"a payload of {payload.nbytes} bytes, expected {expected}")
        stored = [False] * len(places)
        order = sorted(range(len(places)), key=lambda index: places[index].slot)
        ready = [index for index in order if self._arena.locate(places[index].slot)]
        num_refused = len(places) - len(ready)
        runs = self._arena.runs([places[index].slot for index in ready], self._max_blocks)
        taken = iter(ready)
        for segment, first, count in runs:
            indices = list(itertools.islice(taken, count))
            if self.is_paused:
                num_refused += count
                continue
            records = [places[index].record for index in indices]
            ok = self._write_run(segment, first, records, [payloads[index] for index in indices])
            for index in indices:
                stored[index] = ok
        if num_refused:
            self._tally.add("refused_writes", num_refused)
        return stored

    def forget(self, slots: Sequence[int]) -> None:
        """Make these slots free."""
        for segment, first, count in self._arena.runs(sorted(slots), self._max_blocks):
            with segment.lock:
                self._free(segment, first, count)

    def forget_entry(self, segment: Segment, index: int, raw: bytes) -> None:
        """Make a slot free if its entry is still this one."""
        with segment.lock:
            if segment.entries(index, 1) == [raw]:
                self._free(segment, index, 1)

    def _free(self, segment: Segment, first: int, count: int) -> None:
        """Free neighbouring slots; the caller holds the segment's lock.

        Where the medium refuses, the block is forgotten here and may be found at the next opening,
        whole, since its payload is still there.
        """
        free = [self._layout.free_entry] * count
        if segment.entries(first, count) == free:
            return
        try:
            segment.put_entries(first, free)
        except OSError as error:
            segment.put_mirror(first, free)
            self._failed(error)

    def _write_run(
        self,
        segment: Segment,
        first: int,
        records: Sequence[BlockRecord],
        payloads: Sequence[memoryview],
    ) -> bool:
        """Write neighbouring slots: all of them or, as far as anyone can see, none."""
        count = len(records)
        free = [self._layout.free_entry] * count
        with segment.lock:
            try:
                if segment.entries(first, count) != free:
                    segment.put_entries(first, free)
                sums = self._write_payloads(segment, first, payloads)
                entries = [
                    self._layout.pack_entry(Entry(record, digest, next(self._sequence)))
                    for record, digest in zip(records, sums, strict=True)
                ]
                segment.put_entries(first, entries)
            except OSError as error:
                segment.put_mirror(first, free)
                self._tally.add("failed_writes", count)
                self._failed(error)
                return False
        if self._backoff.succeeded():
            _log.info("writing segments again", directory=str(segment.path.parent))
        return True

    def _write_payloads(
        self, segment: Segment, first: int, payloads: Sequence[memoryview]
    ) -> list[bytes]:
        """Write payloads, from where they are if the disk takes them so; returns checksums.

        A payload must not change meanwhile; if it does, its block is a miss later.
        """
        if all(is_aligned(payload) for payload in payloads):
            if len(payloads) * self._layout.block_bytes < _MIN_HELPED_BYTES:
                segment.write_slots(first, payloads)
                return _checksums(payloads)
            sums = self._helpers.submit(_checksums, payloads)
            segment.write_slots(first, payloads)
            return sums.result()
        stride = self._layout.stride_bytes
        with self._bounce.take() as bounce:
            slots = [bounce[at * stride : (at + 1) * stride] for at in range(len(payloads))]
            for slot, payload in zip(slots, payloads, strict=True):
                # numpy's copy, unlike a slice's, lets other threads run.
                np.copyto(
                    np.frombuffer(slot, np.uint8, payload.nbytes), np.frombuffer(payload, np.uint8)
                )
            segment.write_slots(first, slots)
            return _checksums([slot[: self._layout.block_bytes] for slot in slots])

    def _failed(self, error: OSError) -> None:
        if self._backoff.failed():
            self._tally.add("pauses")
            _log.warning("writing segments paused", error=str(error), retry_s=self._backoff.delay_s)


def _checksums(payloads: Sequence[memoryview]) -> list[bytes]:
    return [checksum(payload) for payload in payloads]
