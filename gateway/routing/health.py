"""What is believed about one worker's health: a bias on its cost first, an ejection last.

Two sources: the outcomes of requests (a breaker with half-open probes) and health checks. Whether
an ejected worker is used all the same, because it would be the last one, is decided where the
candidates of a request are known (``gateway/routing/candidates.py``).
"""

from __future__ import annotations

from enum import StrEnum
from math import exp2

# Consecutive failed requests that open the breaker: two can be one restart seen twice.
MAX_FAILURES = 3
# Consecutive failed health checks that make a worker not ready.
MAX_FAILED_CHECKS = 3
# The first pause after the breaker opened, doubled at each failed trial up to the last.
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
# Factor added to the cost per consecutive failure: enough to lose against any warm alternative.
BIAS_PER_FAILURE = 3.0
# The bias halves in this time, or a worker nobody tries again would keep it for ever.
BIAS_HALF_LIFE_S = 5.0
# A worker that gave an answer this recently is alive whatever its health check says.
ALIVE_S = 5.0


class Breaker(StrEnum):
    """State of the breaker (bounded: it is a metric label)."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Health:
    """Health of one worker; one event loop only. Times are monotonic seconds.

    Attributes:
        failures: Consecutive failed requests.
        is_suspect: Whether it is worth asking ``ready`` and ``may_route``; cheap to read.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.is_suspect = False
        self._ready = True
        self._failed_checks = 0
        self._failed_at_s = float("-inf")
        self._alive_at_s = float("-inf")
        self._open_until_s: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._trial_in_flight = False

    def breaker(self, now_s: float) -> Breaker:
        """Return the breaker's state; time alone moves it from open to half-open."""
        if self._open_until_s is None:
            return Breaker.CLOSED
        return Breaker.OPEN if now_s < self._open_until_s else Breaker.HALF_OPEN

    @property
    def ready(self) -> bool:
        """Last verdict of the health checks; a worker starts ready, else nothing could start."""
        return self._ready

    @ready.setter
    def ready(self, ready: bool) -> None:
        self._ready = ready
        self.is_suspect = not ready or self._open_until_s is not None

    def may_route(self, now_s: float) -> bool:
        """Whether the breaker lets a request through: one at a time while half-open."""
        if self._open_until_s is None:
            return True
        return now_s >= self._open_until_s and not self._trial_in_flight

    def bias(self, now_s: float) -> float:
        """Return the factor on this worker's cost: 1 when healthy."""
        if not self.failures:
            return 1.0
        fade = exp2((self._failed_at_s - now_s) / BIAS_HALF_LIFE_S)
        return 1.0 + BIAS_PER_FAILURE * self.failures * fade

    def routed(self) -> bool:
        """Note that a request goes there; returns whether it is the half-open trial."""
        if self._open_until_s is None or self._trial_in_flight:
            return False
        self._trial_in_flight = True
        return True

    def succeeded(self, now_s: float) -> None:
        """Note an answer (a refusal of the request by the engine is one): closes the breaker."""
        self.failures = 0
        self._failed_checks = 0
        self._alive_at_s = now_s
        self._open_until_s = None
        self._pause_s = FIRST_PAUSE_S
        self.ready = True
        self._trial_in_flight = False

    def failed(self, now_s: float) -> None:
        """Note a request that failed because of the worker; may open the breaker."""
        self.failures += 1
        self._failed_at_s = now_s
        self._alive_at_s = float("-inf")
        self._trial_in_flight = False
        if self._open_until_s is not None:
            # Requests sent before it opened fail one after another: only a trial doubles the pause.
            if now_s >= self._open_until_s:
                self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
                self._open_until_s = now_s + self._pause_s
        elif self.failures >= MAX_FAILURES:
            self._open_until_s = now_s + self._pause_s
            self.is_suspect = True

    def trial_ended(self) -> None:
        """Note that the half-open trial ended without a verdict (the client left)."""
        self._trial_in_flight = False

    def alive(self, now_s: float) -> None:
        """Note bytes from the worker, for example a first token."""
        self._alive_at_s = now_s

    def check_succeeded(self) -> None:
        """Note a good health check; the breaker is left to the requests."""
        self._failed_checks = 0
        self.ready = True

    def check_failed(self, now_s: float, *, timed_out: bool, is_streaming: bool) -> None:
        """Note a failed health check.

        Args:
            now_s: When.
            timed_out: No answer in time, as opposed to a refused connection or an error status.
            is_streaming: Requests are past their first token there. A slow check on a worker
                that is busy streaming, or that answered just before, says nothing.
        """
        if timed_out and (is_streaming or now_s - self._alive_at_s < ALIVE_S):
            return
        self._failed_checks += 1
        if self._failed_checks >= MAX_FAILED_CHECKS:
            self.ready = False
