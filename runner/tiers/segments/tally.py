"""What happened in a store since it was opened, counted from several threads."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

Counted = Literal[
    "damaged_reads",
    "damaged_entries",
    "failed_reads",
    "failed_writes",
    "refused_writes",
    "segments_set_aside",
    "segments_unreadable",
    "failed_segments",
    "pauses",
]


class Tally:
    """Counters. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Counted] = Counter()

    def add(self, what: Counted, amount: int = 1) -> int:
        """Count; returns the new figure."""
        with self._lock:
            self._counts[what] += amount
            return self._counts[what]

    def __getitem__(self, what: Counted) -> int:
        return self._counts[what]


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """Figures of a store at one moment; the ``_total`` ones only grow.

    Attributes:
        capacity_bytes: Of all files under the root, other namespaces' included.
        file_bytes: Of this store's segments.
        other_namespaces_bytes: Of other namespaces' files, which are left alone.
        set_aside_bytes: Of this namespace's ``.bad`` files.
        ready_slots: Slots that can be written.
        live_slots: Slots that hold a block.
        is_direct: Whether payload goes past the page cache.
        is_paused: Whether writing has stopped for a while.
        damaged_reads_total: Blocks whose payload failed its checksum or was cut off.
        damaged_entries_total: Table entries that were neither free nor whole at opening.
        failed_reads_total: Reads that the medium refused.
        failed_writes_total: Blocks that the medium did not take.
        refused_writes_total: Blocks not tried since writing was paused or the slot not ready.
        segments_set_aside_total: Files renamed to ``.bad`` at opening.
        segments_unreadable_total: Files that could be neither read nor set aside.
        failed_segments_total: New segments that the medium did not take.
        pauses_total: Times that writing stopped.
    """

    capacity_bytes: int
    file_bytes: int
    other_namespaces_bytes: int
    set_aside_bytes: int
    ready_slots: int
    live_slots: int
    is_direct: bool
    is_paused: bool
    damaged_reads_total: int
    damaged_entries_total: int
    failed_reads_total: int
    failed_writes_total: int
    refused_writes_total: int
    segments_set_aside_total: int
    segments_unreadable_total: int
    failed_segments_total: int
    pauses_total: int
