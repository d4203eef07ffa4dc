"""Sliding-window statistics: mean and quantiles of the last minutes in bounded memory.

Time slots, each with a log-bucket histogram, and the sum of those before the current one: adding
and reading are O(1), whatever the number of slots.
Source: the log-bucket idea of DDSketch (Masson et al., 2019); relative error is half a bucket.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

WINDOW_S = 300.0
SLOT_S = 10.0
NUM_SLOTS = int(WINDOW_S / SLOT_S)
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


def slot_of(now_s: float) -> int:
    """Return the number of the slot of a time, counted from the clock's zero."""
    return int(now_s / SLOT_S)


def bucket_of(value: float) -> int:
    """Return the bucket of a value."""
    return math.floor(math.log(max(value, SMALLEST)) / LOG_GROWTH)


class Window:
    """Values of the last ``WINDOW_S`` seconds. Not thread safe: one event loop owns it.

    Adding looks at the current slot alone; those before it are summed up when it ends.
    """

    __slots__ = ("_number", "_past", "_past_slots", "_slot")

    def __init__(self) -> None:
        self._number = -1
        self._slot = Summary()
        self._past_slots: deque[tuple[int, Summary]] = deque()
        self._past = Summary()

    def add(self, value: float, now_s: float) -> None:
        """Add one value observed at ``now_s`` (monotonic seconds)."""
        self.put(value, bucket_of(value), slot_of(now_s))

    def put(self, value: float, bucket: int, number: int) -> None:
        """Do the same, for who adds a value to several windows."""
        if number > self._number:
            self._begin(number)
        slot = self._slot
        slot.count += 1
        slot.total += value
        slot.buckets[bucket] = slot.buckets.get(bucket, 0) + 1

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
        """Return what is in the window now; a copy."""
        number = slot_of(now_s)
        if number > self._number:
            self._begin(number)
        whole = Summary(self._past.count, self._past.total, dict(self._past.buckets))
        whole.add(self._slot)
        return whole

    def _begin(self, number: int) -> None:
        """Go on to another slot, and drop those that are over."""
        if self._slot.count:
            self._past_slots.append((self._number, self._slot))
            self._past.add(self._slot)
            self._slot = Summary()
        self._number = number
        oldest = number - NUM_SLOTS
        while self._past_slots and self._past_slots[0][0] <= oldest:
            _, over = self._past_slots.popleft()
            for bucket, count in over.buckets.items():
                self._past.fill(bucket, -count)
            # Taking sums off a sum would leave dust.
            self._past.total = sum(slot.total for _, slot in self._past_slots)


class Sums:
    """The sum of the last ``WINDOW_S`` seconds' values; one event loop owns it."""

    __slots__ = ("_numbers", "_totals")

    def __init__(self) -> None:
        self._numbers = [-1] * NUM_SLOTS
        self._totals = [0.0] * NUM_SLOTS

    def put(self, value: float, number: int) -> None:
        """Add a value of the slot of that number."""
        at = number % NUM_SLOTS
        if self._numbers[at] != number:
            self._numbers[at], self._totals[at] = number, 0.0
        self._totals[at] += value

    def total(self, now_s: float) -> float:
        """Return the sum at ``now_s`` (monotonic seconds)."""
        oldest = slot_of(now_s) - NUM_SLOTS
        pairs = zip(self._numbers, self._totals, strict=True)
        return sum(total for number, total in pairs if number > oldest)
