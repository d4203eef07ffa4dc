"""Sliding-window statistics: mean and quantiles of the last minutes in bounded memory.

A ring of time slots, each with a log-bucket histogram: adding is O(1), reading merges live slots.
Source: the log-bucket idea of DDSketch (Masson et al., 2019); relative error is half a bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

WINDOW_S = 300.0
SLOT_S = 10.0
# 5 % wide buckets: a quantile is right to 2.5 %, finer than any two runs of an engine agree.
LOG_GROWTH = math.log(1.05)
# Values below a microsecond are one bucket: nothing measured here is shorter.
SMALLEST = 1e-6


class Slot(msgspec.Struct, array_like=True):
    """What was added within one ``SLOT_S``; ``number`` counts them from the clock's zero."""

    number: int = -1
    count: int = 0
    total: float = 0.0
    buckets: dict[int, int] = {}


class Window:
    """Values of the last ``WINDOW_S`` seconds. Not thread safe: one event loop owns it."""

    def __init__(self) -> None:
        self._slots = [Slot() for _ in range(int(WINDOW_S / SLOT_S))]

    def add(self, value: float, now_s: float) -> None:
        """Add one value observed at ``now_s`` (monotonic seconds)."""
        number = int(now_s / SLOT_S)
        slot = self._slots[number % len(self._slots)]
        if slot.number != number:
            slot.number, slot.count, slot.total = number, 0, 0.0
            slot.buckets.clear()
        slot.count += 1
        slot.total += value
        bucket = math.floor(math.log(max(value, SMALLEST)) / LOG_GROWTH)
        slot.buckets[bucket] = slot.buckets.get(bucket, 0) + 1

    def mean(self, now_s: float) -> float | None:
        """Return the mean of the window, or None if it is empty."""
        live = self._live(now_s)
        count = sum(slot.count for slot in live)
        return sum(slot.total for slot in live) / count if count else None

    def total(self, now_s: float) -> float:
        """Return the sum of the window (0.0 if it is empty)."""
        return sum(slot.total for slot in self._live(now_s))

    def quantile(self, q: float, now_s: float) -> float | None:
        """Return the ``q`` quantile (0..1) of the window, or None if it is empty."""
        merged: Counter[int] = Counter()
        for slot in self._live(now_s):
            merged.update(slot.buckets)
        rank = q * merged.total()
        for bucket in sorted(merged):
            rank -= merged[bucket]
            if rank <= 0:
                return math.exp((bucket + 0.5) * LOG_GROWTH)
        return None

    def slots(self) -> list[Slot]:
        """Return the slots that something was added to, for ``merge`` in another process."""
        return [slot for slot in self._slots if slot.count]

    def merge(self, slots: Iterable[Slot]) -> None:
        """Add what another window of the same clock has."""
        for slot in slots:
            into = self._slots[slot.number % len(self._slots)]
            if slot.number > into.number:
                into.number, into.count, into.total = slot.number, 0, 0.0
                into.buckets.clear()
            if slot.number == into.number:
                into.count += slot.count
                into.total += slot.total
                for bucket, count in slot.buckets.items():
                    into.buckets[bucket] = into.buckets.get(bucket, 0) + count

    def _live(self, now_s: float) -> list[Slot]:
        oldest = int(now_s / SLOT_S) - len(self._slots)
        return [slot for slot in self._slots if slot.number > oldest]
