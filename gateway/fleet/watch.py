"""Keeps asking one address how it is: health every second, metrics every few seconds.

What it learns (alive, capacity, block size, epoch, KV figures) it writes into its workers: one, or
one for each data-parallel rank behind it, which share their health.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from gateway.errors import ConnectFailed, UpstreamError
from gateway.fleet.scrape import KV_USAGE_NAMES, Scrape, parse_in_pieces

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

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
    """Watches one address; used from the event loop only.

    Args:
        name: Of the address.
        workers: Get what is learned; never empty, and may change meanwhile.
        upstream: Its connections.
        on_epoch: Called when its process turns out to be a new one.
        on_alive: Awaited after each scrape while it is healthy.

    Attributes:
        name: What logs and metrics call it.
        scrape: The last reading of its metrics.
        checked: Set once the first check has an answer or has failed.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[Worker],
        upstream: Upstream,
        *,
        on_epoch: Callable[[], None],
        on_alive: Callable[[Scrape], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scrape = Scrape()
        self.checked = asyncio.Event()
        self.name = name
        self._workers = workers
        self._upstream = upstream
        self._on_epoch = on_epoch
        self._on_alive = on_alive
        self._clock = clock
        self._scraped_s = float("-inf")
        self._knew_usage = True
        # Why the last check that failed did.
        self._reason = ""

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            was_ready = self._workers[0].health.ready
            healthy = await self._check()
            if was_ready != self._workers[0].health.ready:
                self._say_ready(not was_ready)
            if healthy and self._clock() - self._scraped_s >= SCRAPE_EVERY_S:
                await self._scrape()
            self.checked.set()
            await asyncio.sleep(CHECK_EVERY_S)

    def _say_ready(self, is_ready: bool) -> None:
        told = {"worker": self.name, "ready": is_ready, "url": self._workers[0].url}
        if is_ready:
            log.info("worker_ready", **told)
        else:
            log.warning("worker_ready", **told, reason=self._reason)

    async def _check(self) -> bool:
        health = self._workers[0].health
        try:
            status, _ = await self._get("/health", CHECK_DEADLINE_S)
        except UpstreamError as error:
            self._reason = str(error)
            health.check_failed(
                self._clock(),
                timed_out=not isinstance(error, ConnectFailed),
                is_streaming=any(worker.books.num_decoding > 0 for worker in self._workers),
            )
            # A worker that is gone comes back as a new process: look at once then.
            self._scraped_s = float("-inf")
            # What it said is over, and nobody knows how it is now.
            self.scrape = Scrape()
            return False
        # Some OpenAI servers have no such path; any answer but a server error means alive.
        if status >= 500:
            self._reason = f"/health answered {status}"
            health.check_failed(self._clock(), timed_out=False, is_streaming=False)
            return False
        health.check_succeeded(self._clock())
        return True

    async def _scrape(self) -> None:
        try:
            status, body = await self._get("/metrics", SCRAPE_DEADLINE_S)
        except UpstreamError:
            return
        self._scraped_s = self._clock()
        scrape = await parse_in_pieces(body) if status == 200 else Scrape()
        self.scrape = scrape
        self._say_unknown(scrape)
        is_new = False
        for worker in self._workers:
            if scrape.capacity_tokens is not None:
                worker.capacity_tokens = scrape.capacity_tokens
            if scrape.block_size is not None:
                worker.block_size = scrape.block_size
            if scrape.epoch is not None:
                is_new = is_new or worker.epoch not in (None, scrape.epoch)
                worker.epoch = scrape.epoch
        if is_new:
            self._on_epoch()
        await self._on_alive(scrape)

    def _say_unknown(self, scrape: Scrape) -> None:
        """Say once that a worker does not tell its KV usage: an engine may have renamed it."""
        if self._knew_usage and scrape.kv_usage is None:
            log.warning("worker_kv_usage_unknown", worker=self.name, looked_for=KV_USAGE_NAMES)
        self._knew_usage = scrape.kv_usage is not None

    async def _get(self, path: str, deadline_s: float) -> tuple[int, bytes]:
        response = await self._upstream.request(
            "GET", path, [], first_byte_s=deadline_s, total_s=deadline_s
        )
        try:
            return response.status, await response.read()
        finally:
            response.close()
