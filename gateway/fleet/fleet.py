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

from gateway.fleet.engine import Engine
from gateway.fleet.fingerprints import Identity, regroup
from gateway.fleet.follow import Following
from gateway.fleet.index_state import index_state
from gateway.fleet.parity import ParityCheck
from gateway.fleet.prompts import PoolPrompts
from gateway.fleet.reset import reset_cache
from gateway.fleet.watch import Watch
from gateway.routing.outcome import Outcome, is_comparable
from gateway.routing.pool import Pool
from gateway.settings import ConfigError
from gateway.tls import TlsError, worker_context
from gateway.upstream.client import Upstream

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine
    from typing import Any

    from gateway.config import PoolConfig, Settings
    from gateway.fleet.feed import Feed
    from gateway.fleet.scrape import Scrape
    from gateway.fleet.sources import EventSource
    from gateway.routing.dispatch import Plan, Ticket
    from gateway.routing.pool import Worker
    from gateway.telemetry.record import RequestRecord
    from prefix_index.names import Names

SILENCE_CHECK_S = 1.0
# Blocks freed in one go: about two milliseconds.
SWEEP_BLOCKS = 1_000
# Slices freed each time; new blocks free some on their own.
MAX_SWEEPS = 50
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
        feeds: Worker id -> its event feed, for workers that this process follows.
        watches: Worker id -> the watch of its address.
        parities: Worker id -> the standing check of its tokens.
        on_followable: Called with each worker whose events can be followed from here on; follows
            it. Replace it before ``start`` where somebody else decides who follows whom.
        on_gone: Called with each worker that is no more, before it leaves its pool.

    Raises:
        ConfigError: If a configured tokenizer or template cannot be used.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.pools: list[Pool] = []
        self.watches: dict[str, Watch] = {}
        self.parities: dict[str, ParityCheck] = {}
        self.on_followable: Callable[[Worker], object] = self.follow
        self.on_gone: Callable[[Worker], object] = self.unfollow
        self._clock = clock
        self._log_prompts = settings.telemetry.log_prompts
        self._prompts: dict[str, PoolPrompts] = {}
        # Worker id -> its pool and address.
        self._homes: dict[str, tuple[Pool, Engine]] = {}
        self._followable: set[str] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._following = Following(self._spawn, clock)
        self.feeds: dict[str, Feed] = self._following.feeds
        for config in settings.pools:
            self._add_pool(config, settings)

    async def start(self) -> None:
        """Start watching; returns when every worker was asked once or ``FIRST_CHECK_S`` is over."""
        for pool in self.pools:
            for engine in self._engines(pool):
                self._watch(pool, engine)
            self._start_feeds(pool)
        self._spawn(self._look_after_feeds())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECK_S):
                for watch in list(self.watches.values()):
                    await watch.checked.wait()

    async def stop(self) -> None:
        """Stop all tasks and close all connections to the workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self.pools:
            for engine in self._engines(pool):
                engine.upstream.close()
        self._following.close()

    def observe(self, record: RequestRecord) -> None:
        """Learn from a finished request which workers owe us events."""
        feed = self.feeds.get(record.worker)
        if feed is None or record.outcome != "ok":
            return
        if record.prompt_tokens - (record.observed_hit_tokens or 0) > feed.announced_tokens:
            feed.saw_new_prompt()

    def finished(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of an attempt that is over; the dispatcher's ``on_finish``."""
        parity = self.parities.get(ticket.worker.id)
        if parity is not None:
            parity.finished(plan, ticket)
        feed = self.feeds.get(ticket.worker.id)
        if feed is None or ticket.outcome != Outcome.OK:
            return
        body = plan.inbound.body
        if plan.prompt is not None and plan.prompt.num_tokens >= feed.announced_tokens:
            is_salted = bool(body.get("cache_salt"))
            feed.saw_prompt(plan.prompt.block_hashes[0], is_salted=is_salted)
        observed = ticket.observed_hit_tokens
        # Workers that never report any are not asked to report many.
        if observed is not None and ticket.worker.reports_cached and is_comparable(body):
            feed.saw_hit(predicted_tokens=ticket.predicted_hit_tokens, observed_tokens=observed)

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

    def _engines(self, pool: Pool) -> list[Engine]:
        """Return the addresses of a pool, each once."""
        return list({self._homes[worker_id][1]: None for worker_id in pool.workers})

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
                item.url,
                ssl=_context(config, item.url),
                first_byte_s=limits.first_byte_s,
                total_s=limits.request_s,
            )
            engine = Engine(item, config, upstream)
            for worker in engine.workers:
                pool.add(worker)
                self._homes[worker.id] = pool, engine
        self._prompts[pool.name] = PoolPrompts(pool, config, max_blocks=settings.index.max_blocks)
        self.pools.append(pool)

    def _watch(self, pool: Pool, engine: Engine) -> None:
        identity = Identity(pool, engine.workers, engine.upstream)
        asking: asyncio.Task[object] | None = None

        def new_epoch() -> None:
            log.info("worker_restarted", worker=engine.id)
            identity.restarted()
            for worker in engine.workers:
                self.parities[worker.id].restarted()
                feed = self.feeds.get(worker.id)
                if feed is not None:
                    feed.new_epoch()
                else:
                    pool.forget(worker)

        async def alive(scrape: Scrape) -> None:
            nonlocal asking
            for feed in self._feeds_of(engine):
                feed.tell_block_size()
            gone = await engine.learn(scrape, self._clock())
            if gone:
                self._replace(pool, gone, engine, watch)
            prompts = self._prompts[pool.name]
            if prompts.is_wanted:
                await prompts.learn(engine.upstream, engine.workers[0].block_size)
            self._start_feeds(pool)
            if asking is None or asking.done():
                asking = self._spawn(identity.check(scrape.kv_dtype))
            for worker in engine.workers:
                parity = self.parities[worker.id]
                if parity.is_due:
                    self._spawn(parity.check())

        watch = Watch(
            engine.id,
            engine.workers,
            engine.upstream,
            on_epoch=new_epoch,
            on_alive=alive,
            clock=self._clock,
        )
        for worker in engine.workers:
            self._look_after(pool, worker, engine, watch)
        self._spawn(watch.run())

    def _look_after(self, pool: Pool, worker: Worker, engine: Engine, watch: Watch) -> None:
        def resume() -> None:
            feed = self.feeds.get(worker.id)
            if feed is not None:
                feed.resume()

        self.watches[worker.id] = watch
        self.parities[worker.id] = ParityCheck(
            pool,
            worker,
            engine.upstream,
            resume=resume,
            log_prompts=self._log_prompts,
            clock=self._clock,
        )

    def _replace(self, pool: Pool, gone: list[Worker], engine: Engine, watch: Watch) -> None:
        """Put an address's new workers into the places of those it had before."""
        for worker in gone:
            self.on_gone(worker)
            pool.remove(worker.id)
            self._followable.discard(worker.id)
            for table in (self._homes, self.watches, self.parities):
                table.pop(worker.id, None)
        for worker in engine.workers:
            pool.add(worker)
            self._homes[worker.id] = pool, engine
            self._look_after(pool, worker, engine, watch)
        regroup(pool)

    def _feeds_of(self, engine: Engine) -> list[Feed]:
        return [self.feeds[w.id] for w in engine.workers if w.id in self.feeds]

    def _start_feeds(self, pool: Pool) -> None:
        """Say whose events can be followed, once the pool has an index to put them into."""
        if pool.index is None:
            return
        for worker in pool.workers.values():
            if worker.id not in self._followable and self.has_events(worker):
                self._followable.add(worker.id)
                self.on_followable(worker)

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

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A worker nobody watches would be routed to for ever: say it loudly.
            log.error("background_task_failed", error=repr(error), exc_info=error)


def _context(config: PoolConfig, url: str) -> ssl.SSLContext | None:
    """Return what a worker of a pool is verified with; None if it speaks plain HTTP."""
    if not url.lower().startswith("https:"):
        return None
    try:
        return worker_context(config.worker_ca)
    except TlsError as error:
        raise ConfigError(f"pools[{config.name}].worker_ca: {error}") from error
