"""How many retries a pool may make, and when a worker wants to be asked again.

Retries help when one worker fails and make things worse when all do, so they are paid for out of
the requests that came in: a share of the recent ones, all tenants together, since what is protected
are the workers. No request that could not be sent on costs anything.
"""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# A quiet gateway must still be able to retry its only request of the minute.
MIN_RETRIES_PER_S = 1.0
# Retries saved up by a busy or a quiet time; more would be spent at once when a worker dies.
MAX_SAVED = 20.0
# Seconds, or the milliseconds of OpenAI's header.
_NUMBER = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")


class RetryBudget:
    """A token bucket filled by requests; one event loop only.

    Args:
        ratio: Retries that one request pays for, 0 to 1. With 0 there are none at all.
        clock: Monotonic seconds.

    Attributes:
        ratio: As given; may be changed at any time.

    Source: Finagle's RetryBudget (ratio plus a minimum rate).
    """

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        self.ratio = ratio
        self._clock = clock
        self._saved = MAX_SAVED / 2 if ratio else 0.0
        self._filled_at_s = clock()

    def deposit(self) -> None:
        """Account for one request."""
        self._saved = min(MAX_SAVED, self._saved + self.ratio)

    def take(self) -> bool:
        """Spend one retry; False when there is none left."""
        now_s = self._clock()
        if self.ratio:
            earned = (now_s - self._filled_at_s) * MIN_RETRIES_PER_S
            self._saved = min(MAX_SAVED, self._saved + earned)
        self._filled_at_s = now_s
        if self._saved < 1.0 or not self.ratio:
            return False
        self._saved -= 1.0
        return True


def retry_after_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Return in how many seconds a worker wants to be asked again; None if it does not say.

    Args:
        headers: Of its answer, as sent.

    Source: RFC 9110, 10.2.3; a date is compared with the answer's own, whatever our clock says.
        ``retry-after-ms`` is OpenAI's, and finer.
    """
    found = {name.lower(): value.strip() for name, value in headers}
    given = found.get(b"retry-after-ms", b"")
    if _NUMBER.fullmatch(given):
        return float(given) / 1000 or None
    given = found.get(b"retry-after", b"")
    if _NUMBER.fullmatch(given):
        return float(given) or None
    at_s, sent_s = _unix_s(given), _unix_s(found.get(b"date", b""))
    if at_s is None or sent_s is None or at_s <= sent_s:
        return None
    return at_s - sent_s


def _unix_s(date: bytes) -> float | None:
    """Read an HTTP date; None if it is none."""
    try:
        return parsedate_to_datetime(date.decode("ascii")).timestamp()
    except (ValueError, OverflowError):
        return None
