"""Small helpers shared by all tests: free ports and polling with a deadline."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Awaitable, Callable


def free_port() -> int:
    """Return a TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def neighbour_ports() -> tuple[int, int]:
    """Return two TCP ports, one after the other, that nobody listens on right now."""
    while True:
        first = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", first + 1))
            except (OSError, OverflowError):
                continue
            return first, first + 1


async def poll_until(
    condition: Callable[[], bool | Awaitable[bool]], *, deadline_s: float = 30.0, what: str = ""
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


def cpu_s(call: Callable[[], object], *, repeats: int = 2) -> float:
    """Return the CPU seconds one call takes in this thread, the least of a few.

    For tests of growth only: how long something takes is a benchmark's business. The collector is
    off meanwhile, since what it walks is the whole suite's heap and not the call's own.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        times_s = []
        for _ in range(repeats):
            start_s = time.thread_time()
            call()
            times_s.append(time.thread_time() - start_s)
        return min(times_s)
    finally:
        if was_enabled:
            gc.enable()
