"""What the tiers' transfers and restores report while they happen; any thread."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from prometheus_client import Histogram

from runner.metrics.identity import typed_labels
from runner.metrics.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.tiers.types import Direction, TierName

# From one block within a host to a prefix from a disk that hangs.
TRANSFER_BUCKETS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class TransferMeter:
    """A ``TransferObserver`` that exists before the engine, whose figures ``RunnerMetrics`` shows.

    Attributes:
        times: Histogram by tier and direction; in no registry yet.
        recent: Seconds of the last minutes' transfers, by direction.
        predicted_s: What finished restores were expected to save.
        gained_s: What those saved that were quicker than computing.
        lost_s: What those lost that were slower.

    Args:
        model: Served model name.
        clock: Monotonic seconds.
    """

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._labels = typed_labels(model)
        self._lock = threading.Lock()
        self.times = Histogram(
            "warmlane_runner_transfer_seconds",
            "Time of one transfer of a lower tier.",
            [*self._labels, "tier", "direction"],
            buckets=TRANSFER_BUCKETS_S,
            registry=None,
        )
        self.recent: dict[Direction, Window[float]] = {
            "read": Window(clock),
            "write": Window(clock),
        }
        self.predicted_s = 0.0
        self.gained_s = 0.0
        self.lost_s = 0.0

    def transferred(
        self, tier: TierName, direction: Direction, elapsed_s: float, num_bytes: int
    ) -> None:
        """Note a finished transfer; its bytes are counted by the tier."""
        del num_bytes
        self.times.labels(**self._labels, tier=tier, direction=direction).observe(elapsed_s)
        self.recent[direction].add(elapsed_s)

    def gained(self, predicted_s: float, actual_s: float) -> None:
        """Note what a finished restore was to save and did; negative if it lost."""
        with self._lock:
            self.predicted_s += max(0.0, predicted_s)
            self.gained_s += max(0.0, actual_s)
            self.lost_s += max(0.0, -actual_s)
