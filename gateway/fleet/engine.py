"""One configured address: the workers behind it and where they publish.

An engine with several data-parallel ranks has one URL and as many caches. Each rank is a worker of
its own, ``ID#RANK``: with its own blocks and books, on shared connections and with shared health.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from gateway.fleet.sources import (
    EventSource,
    SourceRefusedError,
    can_ask,
    configured,
    discover,
    spread,
)
from gateway.routing.health import Health
from gateway.routing.pool import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.config import PoolConfig, WorkerConfig
    from gateway.fleet.scrape import Scrape
    from gateway.upstream.client import Upstream

# A worker that publishes nothing is asked again after so long: it may have been reconfigured.
ASK_AGAIN_S = 60.0

log = structlog.get_logger("warmlane")


class Engine:
    """One address and its workers; used from the event loop only.

    Attributes:
        id: As configured.
        workers: One, or one for each rank; never empty.
        upstream: Connections that they share.
        refused: Why what it says about its publishers is not believed; empty if it is.
    """

    def __init__(self, config: WorkerConfig, pool: PoolConfig, upstream: Upstream) -> None:
        self.id = config.id
        self.upstream = upstream
        self.refused = ""
        self._config = config
        self._pool = pool
        self._health = Health()
        self._sources: list[EventSource] = configured(config)
        self._asked_s = float("-inf")
        self._asked_epoch: float | None = None
        self.workers = self._make_workers()

    def source_of(self, worker: Worker) -> EventSource | None:
        """Return where a worker of it publishes, as far as is known."""
        for source in self._sources:
            if source.rank == worker.rank:
                return source
        return None

    async def learn(self, scrape: Scrape, now_s: float) -> list[Worker]:
        """Ask it what its configuration does not say, at most once a minute and process.

        Args:
            scrape: What its metrics said.
            now_s: Monotonic seconds.

        Returns:
            The workers that are no more, if its ranks turn out to be others: ``workers`` are the
            new ones then.
        """
        is_due = now_s - self._asked_s >= ASK_AGAIN_S or scrape.epoch != self._asked_epoch
        if not is_due or not self._has_questions() or not can_ask(self._pool.engine):
            return []
        self._asked_s, self._asked_epoch = now_s, scrape.epoch
        try:
            found = await discover(self.upstream, self._pool.engine)
        except SourceRefusedError as error:
            if self.refused != str(error):
                log.warning("kv_event_source_refused", worker=self.id, reason=str(error))
            self.refused = str(error)
            return []
        if found is None:
            return []
        self.refused = ""
        gone = self._use(found.sources)
        for worker in self.workers:
            worker.block_size = scrape.block_size or found.block_size
            worker.capacity_tokens = worker.capacity_tokens or found.capacity_tokens or 0
            worker.epoch = scrape.epoch
        return gone

    def _has_questions(self) -> bool:
        # A list names all publishers, an empty one that none is to be followed. SGLang's metrics
        # do not tell the block size.
        return not isinstance(self._config.kv_events, list) or self._pool.engine == "sglang"

    def _use(self, found: Sequence[EventSource]) -> list[Worker]:
        sources = configured(self._config)
        if self._config.kv_events is None:
            sources = list(found)
        elif isinstance(self._config.kv_events, str):
            sources = spread(sources[0], len(found))
        if sources == self._sources or not sources:
            return []
        ranks = [source.rank for source in sources]
        self._sources = sources
        if ranks == [worker.rank for worker in self.workers]:
            return []
        log.info("worker_ranks", worker=self.id, ranks=len(ranks))
        before = list(self.workers)
        self.workers[:] = self._make_workers()
        return before

    def _make_workers(self) -> list[Worker]:
        config, pool = self._config, self._pool
        workers = []
        for rank in [source.rank for source in self._sources] or [None]:
            worker = Worker(
                config.id if rank is None else f"{config.id}#{rank}",
                config.url,
                upstream=self.upstream,
                max_batched_tokens=pool.max_batched_tokens,
                health=self._health,
                rank=rank,
            )
            if isinstance(pool.capacity_tokens, int):
                worker.capacity_tokens = pool.capacity_tokens
            workers.append(worker)
        return workers
