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
# The first pause after the breaker opened, doubled at each failed trial up to the last. A worker
# that names a longer one itself is not believed: nobody would notice when it is back.
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 30.0
# Factor added to the cost per consecutive failure: enough to lose against any warm alternative.
BIAS_PER_FAILURE = 3.0
# The bias halves in this time, or a worker nobody tries again would keep it for ever.
BIAS_HALF_LIFE_S = 5.0
# Weight of one request in the share of those that failed: about the last sixteen count.
REQUEST_WEIGHT = 1 / 16
# A share of failures that says nothing yet: one of the last sixteen is a restart or a bad request.
FREE_SHARE = 0.1
# What is left of one failure after some two dozen good requests: too little to go on counting.
FORGOTTEN_SHARE = FREE_SHARE / 8
# Factor added to the cost per share of failures beyond that: with 3 of 10 failing it is about 3. It
# is compared within one pool, so where all fail alike it makes no difference.
BIAS_PER_SHARE = 16.0
# This bias lasts longer: at few requests a minute the next failure must find it still there.
SHARE_HALF_LIFE_S = 15.0
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
        is_dear: Whether it is worth asking for the ``bias``; cheap to read.
        num_ejections: Times its breaker opened.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.is_suspect = False
        self.is_dear = False
        self.num_ejections = 0
        self._ready = True
        self._failed_checks = 0
        self._checked_at_s: float | None = None
        self._failed_at_s = float("-inf")
        self._failed_share = 0.0
        self._alive_at_s = float("-inf")
        self._opened_at_s = float("-inf")
        self._open_until_s: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._trial_in_flight = False
        # Until when the worker itself asked for no more requests, or for fewer.
        self._wait_until_s = float("-inf")
        self._spare_until_s = float("-inf")

    def breaker(self, now_s: float) -> Breaker:
        """Return the breaker's state.

        Where health checks are made, one must have succeeded since it opened before it is half
        open: no client's request is risked on what the gateway can find out itself.
        """
        if self._open_until_s is None:
            return Breaker.CLOSED
        is_unproven = self._checked_at_s is not None and self._checked_at_s < self._opened_at_s
        return Breaker.OPEN if now_s < self._open_until_s or is_unproven else Breaker.HALF_OPEN

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
        return not self._trial_in_flight and self.breaker(now_s) is Breaker.HALF_OPEN

    def seems_alive(self, now_s: float) -> bool:
        """Whether nothing but failed requests speaks against it: neither checks nor itself."""
        return self._ready and not self._failed_checks and now_s >= self._wait_until_s

    def bias(self, now_s: float) -> float:
        """Return the factor on this worker's cost: 1 when healthy."""
        bias = 1.0
        ago_s = self._failed_at_s - now_s
        if self.failures:
            bias += BIAS_PER_FAILURE * self.failures * exp2(ago_s / BIAS_HALF_LIFE_S)
        if self._failed_share > FREE_SHARE:
            share = self._failed_share - FREE_SHARE
            bias += BIAS_PER_SHARE * share * exp2(ago_s / SHARE_HALF_LIFE_S)
        return bias if now_s >= self._spare_until_s else bias + BIAS_PER_FAILURE

    def routed(self) -> bool:
        """Note that a request goes there; returns whether it is the half-open trial."""
        if self._open_until_s is None or self._trial_in_flight:
            return False
        self._trial_in_flight = True
        return True

    def succeeded(self, now_s: float) -> None:
        """Note an answer (a refusal of the request by the engine is one): closes the breaker.

        Not so while the worker itself asked for time: what it has begun before ends well.
        """
        self._failed_checks = 0
        self._alive_at_s = now_s
        if self.is_dear or self.is_suspect:
            self._recover(now_s)

    def _recover(self, now_s: float) -> None:
        self.failures = 0
        self._failed_share *= 1 - REQUEST_WEIGHT
        if self._failed_share < FORGOTTEN_SHARE:
            self._failed_share = 0.0
        self.is_dear = self._failed_share > 0.0 or now_s < self._spare_until_s
        if now_s >= self._wait_until_s:
            self._open_until_s = None
            self._pause_s = FIRST_PAUSE_S
        self._trial_in_flight = False
        self.ready = True

    def failed(self, now_s: float) -> None:
        """Note a request that failed because of the worker; may open the breaker."""
        self.failures += 1
        self.is_dear = True
        self._failed_at_s = now_s
        self._failed_share += REQUEST_WEIGHT * (1 - self._failed_share)
        self._alive_at_s = float("-inf")
        self._trial_in_flight = False
        if self._open_until_s is not None:
            # Requests sent before it opened fail one after another: only a trial doubles the pause.
            if now_s >= self._open_until_s:
                self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
                self._open(now_s, self._pause_s)
        elif self.failures >= MAX_FAILURES:
            self._open(now_s, self._pause_s)

    def asked_to_wait(self, now_s: float, wait_s: float) -> None:
        """Send it nothing for a while, as it asked itself; bounded by ``LAST_PAUSE_S``."""
        wait_s = min(wait_s, LAST_PAUSE_S)
        self._wait_until_s = max(self._wait_until_s, now_s + wait_s)
        if self._open_until_s is None or self._open_until_s < now_s + wait_s:
            self._open(now_s, wait_s)

    def asked_for_less(self, now_s: float, wait_s: float) -> None:
        """Make it dearer for a while: it refused one client, which need not concern the others."""
        self._spare_until_s = max(self._spare_until_s, now_s + min(wait_s, LAST_PAUSE_S))
        self.is_dear = True

    def _open(self, now_s: float, pause_s: float) -> None:
        self.num_ejections += self._open_until_s is None
        self._opened_at_s = now_s
        self._open_until_s = now_s + pause_s
        self.is_suspect = True

    def trial_ended(self) -> None:
        """Note that the half-open trial ended without a verdict (the client left)."""
        self._trial_in_flight = False

    def alive(self, now_s: float) -> None:
        """Note bytes from the worker, for example a first token."""
        self._alive_at_s = now_s

    def check_succeeded(self, now_s: float) -> None:
        """Note a good health check; to close the breaker is left to the requests."""
        self._failed_checks = 0
        self._checked_at_s = now_s
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
