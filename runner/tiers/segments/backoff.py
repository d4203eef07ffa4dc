"""Waiting longer after each failure in a row."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Short enough that a hiccup costs little, long enough that a full disk is not hammered.
_FIRST_S = 1.0
_LONGEST_S = 60.0


class Backoff:
    """A pause that doubles with each failure in a row. Any thread.

    Attributes:
        delay_s: Of the pause that the last failure began; 0 after a success.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s = float("-inf")
        self.delay_s = 0.0

    @property
    def remaining_s(self) -> float:
        """Seconds until the next try; 0 when there is no pause."""
        return max(0.0, self._until_s - self._clock())

    def failed(self) -> bool:
        """Begin a pause; False if one is under way, begun by another thread's failure."""
        with self._lock:
            if self.remaining_s:
                return False
            self.delay_s = min(max(_FIRST_S, 2 * self.delay_s), _LONGEST_S)
            self._until_s = self._clock() + self.delay_s
            return True

    def succeeded(self) -> bool:
        """End the series of failures; returns whether there was one.

        A pause that began meanwhile stays: what succeeded had started before it.
        """
        if not self.delay_s:
            return False
        with self._lock:
            if self.remaining_s or not self.delay_s:
                return False
            self.delay_s = 0.0
            return True
