"""Sliding-window statistics: mean and quantiles of the last minutes in bounded memory.

A ring of time slots, each with a log-bucket histogram, and their sum: adding is O(1), reading takes
the slots that are over off the sum.
Source: the log-bucket idea of DDSketch (Masson et al., 2019); relative error is half a bucket.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec

WINDOW_S = 300.0
SLOT_S = 10.0
# 5 % wide buckets: a quantile is right to 2.5 %, finer than any two runs of an engine agree.
LOG_GROWTH = math.log(1.05)
# Values below a microsecond are one bucket: nothing measured here is shorter.
SMALLEST = 1e-6


class Summary(msgspec.Struct, array_like=True):
    """Values of some time, as log buckets; summaries of several processes add up."""

    count: int = 0
    total: float = 0.0
    buckets: dict[int, int] = {}

    @property
    def mean(self) -> float | None:
        """Return the mean, or None of nothing."""
        return self.total / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """Return the ``q`` quantile (0..1), or None of nothing."""
        rank = q * self.count
        for bucket in sorted(self.buckets):
            rank -= self.buckets[bucket]
            if rank <= 0:
                return math.exp((bucket + 0.5) * LOG_GROWTH)
        return None

    def fill(self, bucket: int, count: int) -> None:
        """Put values into a bucket, or take some out of it, which leaves their sum as it is."""
        held = self.buckets.get(bucket, 0) + count
        self.count += count
        if held:
            self.buckets[bucket] = held
        else:
            del self.buckets[bucket]

    def add(self, other: Summary) -> None:
        """Add all values of another one."""
        for bucket, count in other.buckets.items():
            self.fill(bucket, count)
        self.total += other.total


@dataclass(slots=True)
class _Slot:
    """What was added within one ``SLOT_S``; ``number`` counts them from the clock's zero."""

    number: int = -1
    values: Summary = field(default_factory=Summary)


class Window:
    """Values of the last ``WINDOW_S`` seconds. Not thread safe: one event loop owns it."""

    def __init__(self) -> None:
        self._slots = [_Slot() for _ in range(int(WINDOW_S / SLOT_S))]
        # All slots together; reading them one by one takes two milliseconds.
        self._whole = Summary()

    def add(self, value: float, now_s: float) -> None:
        """Add one value observed at ``now_s`` (monotonic seconds)."""
        number = int(now_s / SLOT_S)
        slot = self._slots[number % len(self._slots)]
        if slot.number != number:
            self._empty(slot)
            slot.number = number
        bucket = math.floor(math.log(max(value, SMALLEST)) / LOG_GROWTH)
        for summary in (slot.values, self._whole):
            summary.fill(bucket, 1)
            summary.total += value

    def mean(self, now_s: float) -> float | None:
        """Return the mean of the window, or None if it is empty."""
        return self.summary(now_s).mean

    def total(self, now_s: float) -> float:
        """Return the sum of the window (0.0 if it is empty)."""
        return self.summary(now_s).total

    def quantile(self, q: float, now_s: float) -> float | None:
        """Return the ``q`` quantile (0..1) of the window, or None if it is empty."""
        return self.summary(now_s).quantile(q)

    def summary(self, now_s: float) -> Summary:
        """Return what is in the window; not a copy: it changes with the next value."""
        oldest = int(now_s / SLOT_S) - len(self._slots)
        is_stale = False
        for slot in self._slots:
            if slot.number <= oldest and slot.values.count:
                self._empty(slot)
                is_stale = True
        if is_stale:
            # Taking sums off a sum would leave dust.
            self._whole.total = sum(slot.values.total for slot in self._slots)
        return self._whole

    def _empty(self, slot: _Slot) -> None:
        for bucket, count in slot.values.buckets.items():
            self._whole.fill(bucket, -count)
        self._whole.total -= slot.values.total
        slot.values = Summary()
