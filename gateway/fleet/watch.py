"""Keeps asking one worker how it is: health every second, metrics every few seconds.

What it learns (alive, capacity, block size, epoch, KV figures) it writes into the ``Worker``.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from gateway.errors import ConnectFailed, UpstreamError
from gateway.fleet.scrape import Scrape, parse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.routing.pool import Worker
    from gateway.upstream.client import Upstream

# Ejection takes three failed checks, so a dead idle worker is out after three seconds.
CHECK_EVERY_S = 1.0
# Metrics tell a restart and the capacity; neither changes often.
SCRAPE_EVERY_S = 5.0
# Longer than any step of a busy engine takes to answer from its HTTP thread.
CHECK_DEADLINE_S = 2.0
SCRAPE_DEADLINE_S = 5.0

log = structlog.get_logger("warmlane")


class Watch:
    """Watches one worker; used from the event loop only.

    Args:
        worker: Gets what is learned.
        upstream: Its connections.
        on_epoch: Called when the worker's process turns out to be a new one.
        on_alive: Awaited after each scrape of a healthy worker.

    Attributes:
        scrape: The last reading of its metrics.
        checked: Set once the first check has an answer or has failed.
    """

    def __init__(
        self,
        worker: Worker,
        upstream: Upstream,
        *,
        on_epoch: Callable[[], None],
        on_alive: Callable[[Scrape], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scrape = Scrape()
        self.checked = asyncio.Event()
        self._worker = worker
        self._upstream = upstream
        self._on_epoch = on_epoch
        self._on_alive = on_alive
        self._clock = clock
        self._scraped_s = float("-inf")

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            was_ready = self._worker.health.ready
            healthy = await self._check()
            if was_ready != self._worker.health.ready:
                log.warning("worker_ready", worker=self._worker.id, ready=not was_ready)
            if healthy and self._clock() - self._scraped_s >= SCRAPE_EVERY_S:
                await self._scrape()
            self.checked.set()
            await asyncio.sleep(CHECK_EVERY_S)

    async def _check(self) -> bool:
        health = self._worker.health
        try:
            status, _ = await self._get("/health", CHECK_DEADLINE_S)
        except UpstreamError as error:
            health.check_failed(
                self._clock(),
                timed_out=not isinstance(error, ConnectFailed),
                is_streaming=self._worker.books.num_decoding > 0,
            )
            # A worker that is gone comes back as a new process: look at once then.
            self._scraped_s = float("-inf")
            return False
        # Some OpenAI servers have no such path; any answer but a server error means alive.
        if status >= 500:
            health.check_failed(self._clock(), timed_out=False, is_streaming=False)
            return False
        health.check_succeeded()
        return True

    async def _scrape(self) -> None:
        try:
            status, body = await self._get("/metrics", SCRAPE_DEADLINE_S)
        except UpstreamError:
            return
        self._scraped_s = self._clock()
        scrape = parse(body.decode("utf-8", "replace")) if status == 200 else Scrape()
        self.scrape = scrape
        worker = self._worker
        if scrape.capacity_tokens is not None:
            worker.capacity_tokens = scrape.capacity_tokens
        if scrape.block_size is not None:
            worker.block_size = scrape.block_size
        if scrape.epoch is not None:
            if worker.epoch is not None and worker.epoch != scrape.epoch:
                self._on_epoch()
            worker.epoch = scrape.epoch
        await self._on_alive(scrape)

    async def _get(self, path: str, deadline_s: float) -> tuple[int, bytes]:
        response = await self._upstream.request(
            "GET", path, [], first_byte_s=deadline_s, total_s=deadline_s
        )
        try:
            return response.status, await response.read()
        finally:
            response.close()
