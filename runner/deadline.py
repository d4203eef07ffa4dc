"""How long whoever asks is willing to wait: ``x-request-timeout``, in seconds.

It counts from the request's head and covers its body, the wait for the engine and the whole answer.
A gateway in front says what is left of its client's time in the same words.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from runner.errors import DeadlineExceededError, invalid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

HEADER = "x-request-timeout"

# What ``float`` takes besides (``inf``, ``1_0``, blanks) is no number of seconds.
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class Deadline:
    """When a request's time is over; used on one event loop.

    Args:
        timeout_s: Seconds from now; None for no end.
        clock: Monotonic seconds.
    """

    def __init__(self, timeout_s: float | None, clock: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._at_s = None if timeout_s is None else clock() + timeout_s

    @classmethod
    def of(cls, given: str | None, clock: Callable[[], float]) -> Deadline:
        """Return the deadline that a request's header sets from now on.

        Raises:
            ApiError: 400 if what it says is no positive number of seconds.
        """
        if given is None:
            return cls(None, clock)
        timeout_s = float(given) if _SECONDS.fullmatch(given) else 0.0
        if timeout_s <= 0.0:
            raise invalid(
                f"{HEADER} must be a positive number of seconds such as 30 or 2.5, "
                f"got {given[:40]!r}",
                HEADER,
                "invalid_timeout",
            )
        return cls(timeout_s, clock)

    def left_s(self) -> float | None:
        """Return the seconds left, negative once it is over; None for no end."""
        return None if self._at_s is None else self._at_s - self._clock()

    def error(self) -> DeadlineExceededError:
        """Return what to answer once it is over."""
        return DeadlineExceededError(self._timeout_s or 0.0)

    def check(self) -> None:
        """Go on while there is time.

        Raises:
            DeadlineExceededError: If there is none.
        """
        if (left_s := self.left_s()) is not None and left_s <= 0.0:
            raise self.error()

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel what runs inside when the time is over.

        Raises:
            DeadlineExceededError: Then, and if there was none left at the end.
        """
        limited = asyncio.timeout(self.left_s())
        try:
            async with limited:
                yield
        except TimeoutError as error:
            if not limited.expired():
                raise
            raise self.error() from error
        self.check()
