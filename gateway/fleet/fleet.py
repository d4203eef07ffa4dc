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

from gateway.fleet.feed import Feed
from gateway.fleet.parity import ParityCheck
from gateway.fleet.prompts import PoolPrompts
from gateway.fleet.watch import Watch
from gateway.routing.pool import Pool, Worker
from gateway.upstream.client import Upstream

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    import zmq.asyncio

    from gateway.config import PoolConfig, Settings, WorkerConfig
    from gateway.fleet.scrape import Scrape
    from gateway.routing.dispatch import Plan, Ticket
    from gateway.telemetry.record import RequestRecord

SILENCE_CHECK_S = 1.0
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
        feeds: Worker id -> its event feed, for workers that have one.
        watches: Worker id -> its watch.
        parities: Worker id -> the standing check of its tokens.

    Raises:
        ConfigError: If a configured tokenizer or template cannot be used.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.pools: list[Pool] = []
        self.feeds: dict[str, Feed] = {}
        self.watches: dict[str, Watch] = {}
        self.parities: dict[str, ParityCheck] = {}
        self._clock = clock
        self._log_prompts = settings.telemetry.log_prompts
        self._prompts: dict[str, PoolPrompts] = {}
        self._configs: dict[str, WorkerConfig] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._context: zmq.asyncio.Context | None = None
        for config in settings.pools:
            self._add_pool(config, settings)

    async def start(self) -> None:
        """Start watching; returns when every worker was asked once or ``FIRST_CHECK_S`` is over."""
        for pool in self.pools:
            for worker in pool.workers.values():
                self._watch(pool, worker)
            self._start_feeds(pool)
        self._spawn(self._look_for_silence())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECK_S):
                for watch in self.watches.values():
                    await watch.checked.wait()

    async def stop(self) -> None:
        """Stop all tasks and close all connections to the workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self.pools:
            for worker in pool.workers.values():
                if worker.upstream is not None:
                    worker.upstream.close()
        if self._context is not None:
            self._context.term()

    def observe(self, record: RequestRecord) -> None:
        """Learn from a finished request which workers owe us events."""
        feed = self.feeds.get(record.worker)
        if feed is None or record.outcome != "ok":
            return
        pool = next(pool for pool in self.pools if record.worker in pool.workers)
        if record.prompt_tokens - (record.observed_hit_tokens or 0) > pool.block_size:
            feed.saw_new_prompt()

    def finished(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of an attempt that is over; the dispatcher's ``on_finish``."""
        parity = self.parities.get(ticket.worker.id)
        if parity is not None:
            parity.finished(plan, ticket)

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
        """Whether a worker is configured to announce its blocks."""
        config = self._configs.get(worker.id)
        return config is not None and config.kv_events is not None

    def _add_pool(self, config: PoolConfig, settings: Settings) -> None:
        limits = settings.server.limits
        pool = Pool(
            config.name,
            models=config.models,
            aliases=config.aliases,
            engine=config.engine,
            affinity_keys=config.affinity.keys,
            set_size=config.affinity.set_size,
            is_strict=config.affinity.mode == "strict",
        )
        for item in config.workers:
            upstream = Upstream(
                item.url, first_byte_s=limits.first_byte_s, total_s=limits.request_s
            )
            worker = Worker(
                item.id, item.url, upstream=upstream, max_batched_tokens=config.max_batched_tokens
            )
            if isinstance(config.capacity_tokens, int):
                worker.capacity_tokens = config.capacity_tokens
            pool.add(worker)
            self._configs[item.id] = item
        self._prompts[pool.name] = PoolPrompts(pool, config, max_blocks=settings.index.max_blocks)
        self.pools.append(pool)

    def _watch(self, pool: Pool, worker: Worker) -> None:
        upstream = worker.upstream
        assert upstream is not None, "a worker of the fleet has its connections"
        parity = self._add_parity(pool, worker, upstream)

        def new_epoch() -> None:
            log.info("worker_restarted", worker=worker.id)
            parity.restarted()
            feed = self.feeds.get(worker.id)
            if feed is not None:
                feed.new_epoch()
            else:
                pool.forget(worker)

        async def alive(scrape: Scrape) -> None:
            prompts = self._prompts[pool.name]
            if prompts.is_wanted:
                await prompts.learn(upstream, scrape.block_size)
                self._start_feeds(pool)
            if parity.is_due:
                self._spawn(parity.check())

        watch = Watch(worker, upstream, on_epoch=new_epoch, on_alive=alive, clock=self._clock)
        self.watches[worker.id] = watch
        self._spawn(watch.run())

    def _add_parity(self, pool: Pool, worker: Worker, upstream: Upstream) -> ParityCheck:
        def resume() -> None:
            feed = self.feeds.get(worker.id)
            if feed is not None:
                feed.resume()

        parity = self.parities[worker.id] = ParityCheck(
            pool,
            worker,
            upstream,
            resume=resume,
            log_prompts=self._log_prompts,
            clock=self._clock,
        )
        return parity

    def _start_feeds(self, pool: Pool) -> None:
        """Follow the workers' events as soon as the pool has an index to put them into."""
        if pool.index is None:
            return
        for worker in pool.workers.values():
            config = self._configs[worker.id]
            if config.kv_events is None or worker.id in self.feeds:
                continue
            if self._context is None:
                import zmq.asyncio

                self._context = zmq.asyncio.Context()
            feed = self.feeds[worker.id] = Feed(
                pool,
                worker,
                pool.index,
                events=config.kv_events,
                replay=config.kv_replay,
                context=self._context,
                clock=self._clock,
            )
            self._spawn(feed.run())

    async def _look_for_silence(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            for feed in self.feeds.values():
                feed.check_silence()

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A worker nobody watches would be routed to for ever: say it loudly.
            log.error("background_task_failed", error=repr(error), exc_info=error)
