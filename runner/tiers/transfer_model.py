"""How long a tier takes to move bytes, learned from every finished transfer."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from runner.tiers.fit import RelativeFit

if TYPE_CHECKING:
    from runner.tiers.types import Direction, TierName

# (latency in seconds, bytes per second) believed before the first transfer. Low on purpose: a
# rate four times too high costs more than one four times too low, and a probe soon knows better.
_START: dict[TierName, tuple[float, float]] = {
    "cpu": (100e-6, 1e9),
    "disk": (500e-6, 200e6),
    "remote": (1e-3, 100e6),
    "peer": (2e-3, 100e6),
}

# In transfers.
_MEMORY = 64.0

# How much of a transfer's distance from what was expected is believed at once: up to a factor of
# two it is noise, beyond it is news.
_NOISE_SHARE = 0.1
_NEWS_SHARE = 0.4
_NEWS_LOG = math.log(2.0)

# How far transfers of one size are from it: a habit, not a mood.
_SIZE_SHARE = 0.03

# A size differs from the line by its pieces, at most fourfold; beyond that the tier is slow.
_MAX_SIZE_LOG = math.log(4.0)

# A stopped clock must not take a tier out for good.
_MAX_DRIFT_LOG = math.log(1e5)

# Sizes of 64 KiB and less, then one class per factor of four, the last from 256 MiB.
_SMALLEST_BYTES_LOG2 = 16
_NUM_SIZES = 8

# Enough for a ninetieth percentile.
_MAX_RECENT = 64

# Peers come from the configuration; this bounds what a mistake there can grow.
_MAX_LINES = 256

_Key: TypeAlias = "tuple[TierName, Direction, str]"


class TransferModel:
    """Expected seconds per tier and direction; for peers per pair. Owned by the engine thread.

    Attributes:
        num_observed: Transfers seen in all.
    """

    def __init__(self) -> None:
        self._lines: dict[_Key, _Line] = {}
        self.num_observed = 0

    def observe(
        self,
        tier: TierName,
        direction: Direction,
        num_bytes: int,
        elapsed_s: float,
        source: str = "",
    ) -> None:
        """Learn from one finished transfer, one call of a store.

        Args:
            tier: Which.
            direction: From its side: ``read`` brings blocks up.
            num_bytes: All that the call moved.
            elapsed_s: Since it began to move, without its wait in our queue.
            source: The peer's address.
        """
        if num_bytes < 1 or not math.isfinite(elapsed_s) or elapsed_s < 0:
            return
        self.num_observed += 1
        self._line(tier, direction, source).observe(num_bytes, elapsed_s)

    def expect_s(
        self,
        tier: TierName,
        direction: Direction,
        num_bytes: int,
        queued_bytes: int = 0,
        source: str = "",
    ) -> float:
        """Return when ``num_bytes`` should be there, ``queued_bytes`` being before them."""
        return self._line(tier, direction, source).expect_s(num_bytes, queued_bytes)

    def tail(self, tier: TierName, direction: Direction, source: str = "") -> float:
        """Return how much longer than expected one transfer in ten takes, at least 1."""
        return self._line(tier, direction, source).tail

    def count(self, tier: TierName, direction: Direction, source: str = "") -> int:
        """Return how many transfers have been seen."""
        line = self._lines.get((tier, direction, source))
        return line.count if line is not None else 0

    def believe_latest(self, tier: TierName, direction: Direction, source: str = "") -> None:
        """Take the tier's speed from its latest transfer alone: it has come back."""
        self._line(tier, direction, source).believe_latest()

    def _line(self, tier: TierName, direction: Direction, source: str) -> _Line:
        key = (tier, direction, source)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= _MAX_LINES:
                del self._lines[next(known for known in self._lines if known[0] == "peer")]
            line = self._lines[key] = _Line(*_START[tier])
        return line


class _Line:
    """Latency and rate, times how the tier does now, times how it does with that size."""

    __slots__ = ("_drift_log", "_fit", "_latest_log", "_recent", "_size_logs", "tail")

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._fit = RelativeFit((latency_s, 1.0 / bytes_per_s), memory=_MEMORY)
        self._drift_log = 0.0
        self._latest_log = 0.0
        self._size_logs = [0.0] * _NUM_SIZES
        self._recent: deque[float] = deque(maxlen=_MAX_RECENT)
        # How much longer than expected the ninetieth percentile takes, at least 1.
        self.tail = 1.0

    @property
    def count(self) -> int:
        return self._fit.count

    def observe(self, num_bytes: int, elapsed_s: float) -> None:
        if self._fit.count:
            self._recent.append(elapsed_s / max(self.expect_s(num_bytes, 0), 1e-9))
            ordered = sorted(self._recent)
            self.tail = max(1.0, ordered[-(-len(ordered) * 9 // 10) - 1])
        self._fit.observe((1.0, float(num_bytes)), elapsed_s)
        size = _size_class(num_bytes)
        off_log = math.log(max(elapsed_s, 1e-9) / self._fit.expect_s((1.0, float(num_bytes))))
        rest_log = off_log - self._size_logs[size]
        step_log = rest_log - self._drift_log
        share = _NEWS_SHARE if abs(step_log) > _NEWS_LOG else _NOISE_SHARE
        self._drift_log = _within(self._drift_log + share * step_log, _MAX_DRIFT_LOG)
        self._size_logs[size] += _SIZE_SHARE * (off_log - self._drift_log - self._size_logs[size])
        self._size_logs[size] = _within(self._size_logs[size], _MAX_SIZE_LOG)
        self._latest_log = rest_log

    def believe_latest(self) -> None:
        self._drift_log = _within(self._latest_log, _MAX_DRIFT_LOG)

    def expect_s(self, num_bytes: int, queued_bytes: int) -> float:
        latency_s, per_byte_s = self._fit.solved()
        size_factor = math.exp(self._size_logs[_size_class(num_bytes)])
        own_s = (latency_s + num_bytes * per_byte_s) * size_factor
        return (own_s + queued_bytes * per_byte_s) * math.exp(self._drift_log)


def _size_class(num_bytes: int) -> int:
    return min((num_bytes >> _SMALLEST_BYTES_LOG2).bit_length() // 2, _NUM_SIZES - 1)


def _within(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)
