"""A worker whose cache is empty gets a growing share of the requests, not all of them at once.

To the routing rule an empty worker is an idle worker, and everything that nobody holds would go
there while its hot documents are still being computed. So it takes few requests at first and more
with time; what it holds already it may always take. Bounded in time: it ends by itself.

Source: the slow start of load balancers (Envoy's ``slow_start_config``), by share of requests
instead of by weight, since this choice has no weights.
"""

from __future__ import annotations

# Share of the requests from the first moment on: enough to show that the worker works.
FIRST_SHARE = 0.05
# After so long a worker has its full share, whatever became of its warm-up: 100,000 tokens take a
# 135M model on a CPU or an 8B model on one GPU less.
LASTS_S = 60.0


class SlowStart:
    """The growing share of one worker; one event loop only.

    Args:
        started_s: When it began (monotonic).
        lasts_s: When the share is whole.
    """

    __slots__ = ("_credit", "_lasts_s", "_started_s")

    def __init__(self, started_s: float, *, lasts_s: float = LASTS_S) -> None:
        self._started_s = started_s
        self._lasts_s = lasts_s
        self._credit = 0.0

    def share(self, now_s: float) -> float:
        """Return the share of the requests that may go there now, from ``FIRST_SHARE`` to 1."""
        passed = max(0.0, now_s - self._started_s) / self._lasts_s
        # Slowly at first: what comes while little is there must be computed by those who come.
        return min(1.0, FIRST_SHARE + (1.0 - FIRST_SHARE) * passed * passed)

    def is_over(self, now_s: float) -> bool:
        """Whether the share is whole."""
        return now_s - self._started_s >= self._lasts_s

    def lets_in(self, now_s: float) -> bool:
        """Say whether the next request may go there: evenly, as many as the share says."""
        self._credit += self.share(now_s)
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True
