"""Seconds that restores were to save, did save, and cost."""

from __future__ import annotations

import threading


class Savings:
    """Sums that only grow; any thread.

    Attributes:
        predicted_s: What finished restores were expected to save.
        gained_s: What those saved that were quicker than computing.
        lost_s: What those lost that were slower.
        stalled_s: How long the engine stood still for them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.predicted_s = 0.0
        self.gained_s = 0.0
        self.lost_s = 0.0
        self.stalled_s = 0.0

    def gained(self, predicted_s: float, actual_s: float) -> None:
        """Note a finished restore; a negative saving is a loss."""
        with self._lock:
            self.predicted_s += max(0.0, predicted_s)
            self.gained_s += max(0.0, actual_s)
            self.lost_s += max(0.0, -actual_s)

    def stalled(self, elapsed_s: float) -> None:
        """Note a standstill."""
        with self._lock:
            self.stalled_s += max(0.0, elapsed_s)
