"""Small helpers shared by all tests: free ports and polling with a deadline."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable


def free_port() -> int:
    """Return a TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def poll_until(
    condition: Callable[[], bool | Awaitable[bool]], *, deadline_s: float = 10.0, what: str = ""
) -> None:
    """Poll ``condition`` every 10 ms until it is true.

    Raises:
        AssertionError: If it is still false after ``deadline_s`` seconds.
    """
    end = time.monotonic() + deadline_s
    while True:
        answer = condition()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < end, f"not reached within {deadline_s} s: {what or condition}"
        await asyncio.sleep(0.01)
