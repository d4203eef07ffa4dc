"""Whether this gateway takes requests, and which ones are running.

Serving -> draining (no new requests, running ones go on) -> over (running ones are told to end).
"""

from __future__ import annotations

import asyncio


class Lifecycle:
    """State of one process; used from its event loop only.

    Attributes:
        draining: No new requests are taken; ``/health/ready`` says so.
        is_over: Running requests were told to end.
        not_ready: Why requests cannot be served yet, shown by ``/health/ready``; "" when they can.
    """

    def __init__(self) -> None:
        self.draining = False
        self.is_over = False
        self.not_ready = ""
        self._running: set[asyncio.Task[object]] = set()
        self._idle: asyncio.Event | None = None

    @property
    def num_running(self) -> int:
        """Requests under way on inference paths."""
        return len(self._running)

    def enter(self, task: asyncio.Task[object]) -> None:
        """Count the request that ``task`` serves."""
        self._running.add(task)

    def leave(self, task: asyncio.Task[object]) -> None:
        """Forget it."""
        self._running.discard(task)
        if self._idle is not None and not self._running:
            self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests; True when all running ones ended within ``timeout_s``."""
        self.draining = True
        if not self._running:
            return True
        idle = self._idle = self._idle or asyncio.Event()
        idle.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await idle.wait()
        except TimeoutError:
            return False
        return True

    async def end(self, timeout_s: float) -> None:
        """Tell running requests to end with an error, and wait for them to do so."""
        self.draining = self.is_over = True
        for task in tuple(self._running):
            task.cancel()
        await self.drain(timeout_s)
