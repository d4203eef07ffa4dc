"""When to leave a failing tier alone, and when to try it again."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

# One failure is a bad block or a dropped connection; three in a row are a sick medium.
TOLERATED_FAILURES = 3
# Long enough for a reconnect or a cleared disk, short enough that nobody misses the tier.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class Health:
    """Failures in a row of one tier and direction, and the pauses they cause.

    Pauses double while every try after one fails. One log line when it turns bad and one when it
    is well again. Engine thread only.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_failed = 0
        self._paused_until_s = float("-inf")

    def is_paused(self, now_s: float) -> bool:
        """Whether to leave it alone."""
        return now_s < self._paused_until_s

    def failed(self, now_s: float, error: BaseException | None = None) -> None:
        """Note a failure of the medium; those that come in during a pause change nothing.

        Args:
            now_s: The time.
            error: What was raised, for the log; None if the medium only said no.
        """
        if self.is_paused(now_s):
            return
        self._num_failed += 1
        num_pauses = self._num_failed - TOLERATED_FAILURES
        if num_pauses < 0:
            return
        # 2**16 s is beyond the longest pause: the power stays small however often it fails.
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_pauses, 16))
        self._paused_until_s = now_s + pause_s
        if not num_pauses:
            _log.warning(
                "%s fails: paused for %.0f s, then longer", self._name, pause_s, exc_info=error
            )

    def succeeded(self) -> None:
        """Note that it works."""
        if self._num_failed >= TOLERATED_FAILURES:
            _log.info("%s works again", self._name)
        self._num_failed = 0
        self._paused_until_s = float("-inf")
