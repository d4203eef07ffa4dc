"""How long a client is willing to wait: ``x-request-timeout``, in seconds.

It counts from the request's head and covers everything: its body, the wait for a worker, the
worker's first byte, the whole answer. Workers are told what is left of it, and a little more, so
that the first word that it is over is ours and no worker's failure. What SDKs say about their own
timeouts (``x-stainless-timeout``) is information of theirs and no wish; it passes as it came.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, TypeVar

from gateway.errors import DeadlineExceeded, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable

_T = TypeVar("_T")

HEADER = "x-request-timeout"
# A stream is cut up to a quarter of a second late, and a busy event loop adds to that.
WORKERS_MORE_S = 0.5
# What ``float`` takes besides (``inf``, ``1_0``, blanks) is no number of seconds.
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def deadline_of(given: str, started_s: float, now_s: float) -> float:
    """Return when a request's time is over (monotonic).

    Args:
        given: The value of its ``x-request-timeout``.
        started_s: When the request came.
        now_s: What time it is.

    Raises:
        InvalidRequest: If what is said is no positive number of seconds.
        DeadlineExceeded: If it is over already.
    """
    timeout_s = float(given) if _SECONDS.fullmatch(given) else 0.0
    if timeout_s <= 0.0:
        raise InvalidRequest(
            f"{HEADER} must be a positive number of seconds such as 30 or 2.5, got {given[:40]!r}.",
            param=HEADER,
            code="invalid_timeout",
        )
    if started_s + timeout_s <= now_s:
        raise DeadlineExceeded(
            f"The {timeout_s:g} s that the client gave this request were over before its body was "
            "there."
        )
    return started_s + timeout_s


def line_of(left_s: float) -> bytes:
    """Return the header line that tells a worker how long to go on, in whole milliseconds."""
    return b"x-request-timeout: %.3f\r\n" % (max(left_s, 0.0) + WORKERS_MORE_S)


async def within(left_s: float, result: Awaitable[_T]) -> _T:
    """Wait for ``result`` for so long.

    Raises:
        TimeoutError: If it takes longer; it is cancelled then.
    """
    async with asyncio.timeout(left_s):
        return await result
