"""Everything that runs beside the requests: watches, event feeds, prompt readers of all pools.

Built from the settings; started and stopped by ``gateway/serve.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import structlog

from gateway.fleet import learned
from gateway.fleet.engine import Engine
from gateway.fleet.fingerprints import regroup
from gateway.fleet.follow import Following
from gateway.fleet.index_state import index_state
from gateway.fleet.prompts import PoolPrompts
from gateway.fleet.reset import reset_cache
from gateway.fleet.tending import Tending
from gateway.fleet.upstreams import make_upstream
from gateway.routing.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from gateway.config import PoolConfig, Settings, WorkerConfig
    from gateway.fleet.feed import Feed
    from gateway.fleet.parity import ParityCheck
    from gateway.fleet.sources import EventSource
    from gateway.fleet.watch import Watch
    from gateway.routing.dispatch import Plan, Ticket
    from gateway.routing.pool import Worker
    from gateway.telemetry.record import RequestRecord
    from prefix_index.names import Names

SILENCE_CHECK_S = 1.0
# Blocks freed in one go: about two milliseconds.
SWEEP_BLOCKS = 1_000
# Slices freed each time; new blocks free some on their own.
MAX_SWEEPS = 50
# A worker that left is looked at this often, until its last request is over.
LEFT_CHECK_S = 1.0
# How long the start waits for every worker's first answer; one that hangs must not hold it up.
FIRST_CHECK_S = 3.0

log = structlog.get_logger("warmlane")


class Fleet:
    """The pools and the tasks that keep them current; used from one event loop.

    Args:
        settings: Validated configuration.
        clock: Monotonic seconds.

    Attributes:
        pools: In the configuration's order.
        configs: Pool name -> its configuration, as it is now.
        feeds: Worker id -> its event feed, for workers that this process follows.
        watches: Worker id -> the watch of its address.
        parities: Worker id -> the standing check of its tokens.
        on_followable: Called with each worker whose events can be followed from here on; follows
            it. Replace it before ``start`` where somebody else decides who follows whom.
        on_gone: Called with each worker that is no more, before it leaves its pool.
        on_left: Called with each worker that is no more, once its last request is over.
        on_models: Called with an address's id and its list of models, each time it gave one.

    Raises:
        ConfigError: If a configured tokenizer or template cannot be used.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.pools: list[Pool] = []
        self.watches: dict[str, Watch] = {}
        self.parities: dict[str, ParityCheck] = {}
        self.on_followable: Callable[[Worker], object] = self.follow
        self.on_gone: Callable[[Worker], object] = self.unfollow
        self.on_left: Callable[[Worker], object] = lambda _worker: None
        self.on_models: Callable[[str, object], object] = lambda _id, _document: None
        self._clock = clock
        self._settings = settings
        self._prompts: dict[str, PoolPrompts] = {}
        self.configs: dict[str, PoolConfig] = {}
        # Address -> who tends it.
        self._tendings: dict[str, Tending] = {}
        # Worker id -> its pool and address.
        self._homes: dict[str, tuple[Pool, Engine]] = {}
        # Workers that left and still have requests under way.
        self._leaving: dict[Engine, list[Worker]] = {}
        self._is_started = False
        self._followable: set[str] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._following = Following(self.spawn, clock)
        self.feeds: dict[str, Feed] = self._following.feeds
        for config in settings.pools:
            self._add_pool(config)

    async def start(self) -> None:
        """Start watching; returns when every worker was asked once or ``FIRST_CHECK_S`` is over."""
        self._is_started = True
        for tending in list(self._tendings.values()):
            tending.start()
        for pool in self.pools:
            self.start_feeds(pool)
        self.spawn(self._look_after_feeds())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECK_S):
                for watch in list(self.watches.values()):
                    await watch.checked.wait()

    async def stop(self) -> None:
        """Stop all tasks and close all connections to the workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in (*(t.engine for t in self._tendings.values()), *self._leaving):
            engine.upstream.close()
        self._following.close()

    def members(self) -> dict[str, Tending]:
        """Return every address by its id: configured, found or registered."""
        return dict(self._tendings)

    def add(self, pool: str, config: WorkerConfig, *, by: str = "") -> list[Worker]:
        """Add an address to a pool; it gets requests from here on.

        Args:
            pool: Name of the pool.
            config: The address.
            by: Who adds it; empty = the configuration or its discovery, which may take it back.

        Returns:
            Its workers, as far as its ranks are known.

        Raises:
            ValueError: If the id is taken, or there is no such pool.
            ConfigError: If what the pool verifies workers with cannot be used.
        """
        found = next((one for one in self.pools if one.name == pool), None)
        if found is None:
            raise ValueError(f"there is no pool {pool!r}")
        if config.id in self._tendings or config.id in self._homes:
            raise ValueError(f"worker id {config.id!r} is taken")
        tending = self._join(found, config, by)
        regroup(found)
        if self._is_started:
            tending.start()
            self.start_feeds(found)
        return list(tending.engine.workers)

    def remove(self, address_id: str) -> bool:
        """Take an address out of its pool: no new requests, no cut ones.

        Its connections close once its last request is over.

        Returns:
            Whether there was one.
        """
        tending = self._tendings.pop(address_id, None)
        if tending is None:
            return False
        tending.stop()
        self._drop(tending.pool, list(tending.engine.workers))
        regroup(tending.pool)
        self._leaving[tending.engine] = list(tending.engine.workers)
        self.spawn(self._see_off(tending.engine))
        return True

    def drain(self, address_id: str, *, draining: bool = True) -> None:
        """Send an address no new requests, or send it some again.

        Raises:
            KeyError: If there is none.
        """
        for worker in self._tendings[address_id].engine.workers:
            worker.draining = draining

    def reconfigure(self, settings: Settings) -> None:
        """Take over what may be configured anew: what addresses that are added from here on get.

        Args:
            settings: With the same pools.
        """
        self._settings = settings
        self.configs = {config.name: config for config in settings.pools}

    def observe(self, record: RequestRecord) -> None:
        """Learn from a finished request which workers owe us events."""
        feed = self.feeds.get(record.worker)
        if feed is not None:
            learned.of_record(record, feed)

    def finished(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of an attempt that is over; the dispatcher's ``on_finish``."""
        worker_id = ticket.worker.id
        parity, feed = self.parities.get(worker_id), self.feeds.get(worker_id)
        if parity is not None:
            parity.finished(plan, ticket)
        if feed is not None:
            learned.of_attempt(plan, ticket, feed)

    def follow(
        self,
        worker: Worker,
        *,
        first_sequence: int = 0,
        last_digest: int = 0,
        names: Names | None = None,
    ) -> Feed | None:
        """Follow a worker's events in this process.

        The feed takes nothing before the caller gives up control, so that its ``ingest`` can be
        given names and an ``on_change`` first.

        Args:
            worker: Of one of the pools.
            first_sequence: Batch to go on with, where those before it are in the index already.
            last_digest: Digest of the batch before that one.
            names: Engine hashes of the blocks that are in the index already.

        Returns:
            Its feed; None if it does not publish, or its pool has no index yet.
        """
        pool, _ = self._homes[worker.id]
        source = self.source_of(worker)
        if source is None or pool.index is None:
            return None
        return self._following.follow(
            pool,
            worker,
            source,
            first_sequence=first_sequence,
            last_digest=last_digest,
            names=names,
        )

    def unfollow(self, worker: Worker) -> None:
        """Follow a worker's events no more in this process; what is known of it stays."""
        self._following.unfollow(worker.id)

    def source_of(self, worker: Worker) -> EventSource | None:
        """Return where a worker publishes its events; None if it does not, or nobody knows."""
        home = self._homes.get(worker.id)
        return None if home is None else home[1].source_of(worker)

    async def reset_cache(self, worker: Worker) -> bool:
        """Have a worker drop its prefix cache, and forget it here at once.

        Returns:
            Whether it did; False as well if it cannot be asked.
        """
        pool, engine = self._homes[worker.id]
        feeds = [self.feeds.get(rank.id) for rank in engine.workers]
        if not await reset_cache(engine.upstream, pool.engine, [feed for feed in feeds if feed]):
            return False
        for rank, feed in zip(engine.workers, feeds, strict=True):
            if feed is None:
                pool.forget(rank)
        return True

    def index_state(self, worker: Worker) -> dict[str, Any]:
        """Return what an operator may want to know about a worker's part of the index."""
        pool, engine = self._homes[worker.id]
        return index_state(
            pool,
            worker,
            source=engine.source_of(worker),
            refused=engine.refused,
            feed=self.feeds.get(worker.id),
            now_s=self._clock(),
        )

    def parity_of(self, worker: Worker) -> int:
        """Return 1 if a worker's tokens equal ours, 0 if they diverged, -1 if nobody knows."""
        parity = self.parities.get(worker.id)
        return worker.parity if parity is None else parity.value

    def divergence_of(self, worker: Worker) -> dict[str, Any] | None:
        """Return where a worker's tokens part from ours, as plain values; else None."""
        parity = self.parities.get(worker.id)
        found = None if parity is None else parity.divergence
        return None if found is None else asdict(found)

    def has_events(self, worker: Worker) -> bool:
        """Whether a worker announces its blocks, as configured or as it says."""
        return self.source_of(worker) is not None

    def renew(self, tending: Tending, gone: list[Worker]) -> None:
        """Put an address's new workers into the places of those it had before."""
        is_draining = any(worker.draining for worker in gone)
        self._drop(tending.pool, gone)
        for worker in gone:
            self.watches.pop(worker.id, None)
            self.parities.pop(worker.id, None)
        for worker in tending.engine.workers:
            worker.draining = is_draining
            tending.pool.add(worker)
            self._homes[worker.id] = tending.pool, tending.engine
        tending.look_after()
        regroup(tending.pool)

    def start_feeds(self, pool: Pool) -> None:
        """Say whose events can be followed, once the pool has an index to put them into."""
        if pool.index is None:
            return
        for worker in pool.workers.values():
            if worker.id not in self._followable and self.has_events(worker):
                self._followable.add(worker.id)
                self.on_followable(worker)

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Start a task that ends with the fleet, and whose failure is said."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _add_pool(self, config: PoolConfig) -> None:
        pool = Pool(
            config.name,
            models=config.models,
            aliases=config.aliases,
            engine=config.engine,
            affinity_keys=config.affinity.keys,
            set_size=config.affinity.set_size,
            is_strict=config.affinity.mode == "strict",
        )
        max_blocks = self._settings.index.max_blocks
        self.configs[pool.name] = config
        self._prompts[pool.name] = PoolPrompts(pool, config, max_blocks=max_blocks)
        for item in config.workers:
            self._join(pool, item, "")
        self.pools.append(pool)

    def _join(self, pool: Pool, item: WorkerConfig, by: str) -> Tending:
        config = self.configs[pool.name]
        upstream = make_upstream(config, item, self._settings.server.limits, by=by)
        tending = self._tendings[item.id] = Tending(
            self,
            pool,
            Engine(item, config, upstream),
            item,
            by=by,
            prompts=self._prompts[pool.name],
            log_prompts=self._settings.telemetry.log_prompts,
            clock=self._clock,
        )
        for worker in tending.engine.workers:
            pool.add(worker)
            self._homes[worker.id] = pool, tending.engine
        return tending

    def _drop(self, pool: Pool, workers: list[Worker]) -> None:
        for worker in workers:
            self.on_gone(worker)
            pool.remove(worker.id)
            self._followable.discard(worker.id)
            self._homes.pop(worker.id, None)

    async def _see_off(self, engine: Engine) -> None:
        """Wait for the last requests of an address that left, and close its connections."""
        workers = self._leaving[engine]
        while any(worker.books.in_flight for worker in workers):  # noqa: ASYNC110  # no event
            await asyncio.sleep(LEFT_CHECK_S)
        # A request is accounted for a moment after its worker is free.
        await asyncio.sleep(LEFT_CHECK_S)
        del self._leaving[engine]
        engine.upstream.close()
        for worker in workers:
            if worker.id not in self._homes:
                self.on_left(worker)

    async def _look_after_feeds(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            self._following.check()
            for _ in range(MAX_SWEEPS):
                if not self._sweep():
                    break
                await asyncio.sleep(0)

    def _sweep(self) -> bool:
        is_more = self._following.sweep()
        for pool in self.pools:
            if pool.index is not None:
                is_more |= pool.index.sweep(SWEEP_BLOCKS)
        return is_more

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A worker nobody watches would be routed to for ever: say it loudly.
            log.error("background_task_failed", exc_info=error)
