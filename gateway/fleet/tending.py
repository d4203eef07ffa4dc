"""What is kept current about one address: its health, what it tells about itself, its checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from gateway.fleet.fingerprints import Identity
from gateway.fleet.parity import ParityCheck
from gateway.fleet.watch import Watch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from gateway.config import WorkerConfig
    from gateway.fleet.engine import Engine
    from gateway.fleet.feed import Feed
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.prompts import PoolPrompts
    from gateway.fleet.scrape import Scrape
    from gateway.routing.pool import Pool, Worker

log = structlog.get_logger("warmlane")


class Tending:
    """Tends one address of a pool; used from the event loop only.

    Args:
        fleet: Whose tables of watches, parities and feeds it keeps.
        pool: Of the address.
        engine: The address and its workers.
        config: As configured, or found.
        by: Who added it; empty = the configuration or its discovery.
        prompts: Reads the pool's prompts.
        log_prompts: Whether text of live prompts may be logged.
        clock: Monotonic seconds.

    Attributes:
        pool, engine, config, by: As given.
    """

    def __init__(
        self,
        fleet: Fleet,
        pool: Pool,
        engine: Engine,
        config: WorkerConfig,
        *,
        by: str,
        prompts: PoolPrompts,
        log_prompts: bool,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.engine = engine
        self.config = config
        self.by = by
        self._fleet = fleet
        self._prompts = prompts
        self._log_prompts = log_prompts
        self._clock = clock
        self._identity = Identity(
            pool,
            engine.workers,
            engine.upstream,
            on_models=lambda document: fleet.on_models(engine.id, document),
        )
        self._asking: asyncio.Task[object] | None = None
        self._running: asyncio.Task[object] | None = None
        self._watch = Watch(
            engine.id,
            engine.workers,
            engine.upstream,
            on_epoch=self._new_epoch,
            on_alive=self._alive,
            clock=clock,
        )

    def start(self) -> None:
        """Begin to ask; ``stop`` ends it."""
        self.look_after()
        self._running = self._fleet.spawn(self._watch.run())

    def stop(self) -> None:
        """Ask no more; what it wrote into the fleet's tables is gone."""
        for task in (self._running, self._asking):
            if task is not None:
                task.cancel()
        for worker in self.engine.workers:
            self._fleet.watches.pop(worker.id, None)
            self._fleet.parities.pop(worker.id, None)

    def look_after(self) -> None:
        """Give each of its workers a place in the fleet's tables."""
        for worker in self.engine.workers:
            self._fleet.watches[worker.id] = self._watch
            self._fleet.parities[worker.id] = ParityCheck(
                self.pool,
                worker,
                self.engine.upstream,
                resume=lambda worker=worker: self._resume(worker),  # type: ignore[misc]
                log_prompts=self._log_prompts,
                clock=self._clock,
            )

    def _resume(self, worker: Worker) -> None:
        feed = self._fleet.feeds.get(worker.id)
        if feed is not None:
            feed.resume()

    def _new_epoch(self) -> None:
        log.info("worker_restarted", worker=self.engine.id)
        self._identity.restarted()
        for worker in self.engine.workers:
            self._fleet.parities[worker.id].restarted()
            feed = self._fleet.feeds.get(worker.id)
            if feed is not None:
                feed.new_epoch()
            else:
                self.pool.forget(worker)

    async def _alive(self, scrape: Scrape) -> None:
        for feed in self._feeds():
            feed.tell_block_size()
        gone = await self.engine.learn(scrape, self._clock())
        if gone:
            self._fleet.renew(self, gone)
        if self._prompts.is_wanted:
            await self._prompts.learn(self.engine.upstream, self.engine.workers[0].block_size)
        self._fleet.start_feeds(self.pool)
        if self._asking is None or self._asking.done():
            self._asking = self._fleet.spawn(self._identity.check(scrape.kv_dtype))
        for worker in self.engine.workers:
            parity = self._fleet.parities[worker.id]
            if parity.is_due:
                self._fleet.spawn(parity.check())

    def _feeds(self) -> list[Feed]:
        feeds = self._fleet.feeds
        return [feeds[w.id] for w in self.engine.workers if w.id in feeds]
