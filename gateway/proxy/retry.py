"""How many retries a pool may make: a share of its recent requests.

Retries help when one worker fails and make things worse when all do, so they are paid for out of
the requests that came in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# A quiet gateway must still be able to retry its only request of the minute.
MIN_RETRIES_PER_S = 1.0
# Retries saved up by a busy or a quiet time; more would be spent at once when a worker dies.
MAX_SAVED = 20.0


class RetryBudget:
    """A token bucket filled by requests; one event loop only.

    Args:
        ratio: Retries that one request pays for, 0 to 1. With 0 there are none at all.
        clock: Monotonic seconds.

    Source: Finagle's RetryBudget (ratio plus a minimum rate).
    """

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        self._ratio = ratio
        self._clock = clock
        self._saved = MAX_SAVED / 2 if ratio else 0.0
        self._filled_at_s = clock()

    def deposit(self) -> None:
        """Account for one request."""
        self._saved = min(MAX_SAVED, self._saved + self._ratio)

    def take(self) -> bool:
        """Spend one retry; False when there is none left."""
        now_s = self._clock()
        if self._ratio:
            earned = (now_s - self._filled_at_s) * MIN_RETRIES_PER_S
            self._saved = min(MAX_SAVED, self._saved + earned)
        self._filled_at_s = now_s
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
