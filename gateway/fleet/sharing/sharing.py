"""Shares a fleet's index with other gateways; decides who reads which worker's events."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from gateway.fleet.sharing.pool import SharedPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.fleet.fleet import Fleet
    from gateway.routing.pool import Pool, Worker
    from prefix_index.blocks import BlockHash
    from prefix_index.replica.link import Link

_CHECK_EVERY_S: Final = 1.0

log = structlog.get_logger("warmlane")


class Sharing:
    """Shares the fleet's index through Redis; event loop only.

    Create it before the fleet is started: from then on it decides whose events are followed here.

    Args:
        fleet: Whose ``on_followable`` and ``on_gone`` it takes over.
        link: Connection, run by the caller.
        name: Name of this process, different from all others' and without blanks.
        clock: Monotonic seconds.

    Attributes:
        pools: Pool name -> what is shared of it, once it has an index.
    """

    def __init__(
        self, fleet: Fleet, link: Link, *, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pools: dict[str, SharedPool] = {}
        self.link = link
        self.name = name
        self._fleet = fleet
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_told = False
        fleet.on_followable = self._share
        fleet.on_gone = self._part
        link.on_up(self._tell_up)
        link.on_down(self._tell_down)

    async def run(self) -> None:
        """Share until cancelled; then give up what was held, before the link closes."""
        try:
            while True:
                for pool in self._fleet.pools:
                    self._shared_pool(pool)
                for name, shared in self.pools.items():
                    self._keep_running(name, shared)
                    shared.look_after()
                await asyncio.sleep(_CHECK_EVERY_S)
                if not (self.link.is_up or self._is_told):
                    self._tell_down("not reached")
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def age_s(self) -> float:
        """Return how long ago the oldest view was known to be the truth; inf before it was."""
        return max((shared.replica.age_s() for shared in self.pools.values()), default=0.0)

    def routed(
        self, pool: Pool, worker: Worker, hashes: Sequence[BlockHash], root: BlockHash
    ) -> None:
        """Take note of a request that went to a worker; returns at once.

        Args:
            pool: The worker's.
            worker: Where it went.
            hashes: Full blocks of its prompt from the first one on.
            root: Root of the chain.
        """
        shared = self._shared_pool(pool)
        if shared is not None:
            shared.routed(worker, hashes, root)

    def state(self) -> dict[str, Any]:
        """Return what an operator may want to know, as plain values."""
        age_s = self.age_s()
        return {
            "is_up": self.link.is_up,
            "down_s": _since(self._clock(), self.link.down_since_s),
            "errors": dict(self.link.errors),
            "name": self.name,
            "index_age_s": age_s if age_s != float("inf") else None,
            "pools": {name: self._pool_state(shared) for name, shared in self.pools.items()},
        }

    def _pool_state(self, shared: SharedPool) -> dict[str, Any]:
        replica, now_s = shared.replica, self._clock()
        return {
            "published_blocks": replica.publisher.published,
            "refused_deltas": dict(replica.publisher.refused),
            "decode_errors": shared.num_decode_errors,
            "dropped_touches": shared.touches.dropped,
            "looked_up": shared.lookup.asked,
            "workers": {
                view.worker: {
                    "role": view.role,
                    "holder": view.holder or None,
                    "generation": view.generation,
                    "blocks": view.num_shared,
                    "pending_blocks": view.publication.num_pending,
                    "loads": view.loads,
                    "republished": view.publication.restarts,
                    "decode_errors": view.decode_errors,
                    "age_s": 0.0 if view.is_following else _since(now_s, view.current_s),
                }
                for view in replica.views.values()
            },
        }

    def _share(self, worker: Worker) -> None:
        for pool in self._fleet.pools:
            if worker.id in pool.workers:
                shared = self._shared_pool(pool)
                assert shared is not None, "a worker is followable once its pool has an index"
                shared.add(worker)

    def _part(self, worker: Worker) -> None:
        for shared in self.pools.values():
            shared.replica.remove(worker.id)
        self._fleet.unfollow(worker)

    def _shared_pool(self, pool: Pool) -> SharedPool | None:
        shared = self.pools.get(pool.name)
        if shared is None and pool.index is not None:
            shared = self.pools[pool.name] = SharedPool(
                self._fleet, pool, pool.index, self.link, name=self.name, clock=self._clock
            )
        return shared

    def _keep_running(self, name: str, shared: SharedPool) -> None:
        """Start what is shared of a pool, again if it failed: nobody else would read its events."""
        task = self._tasks.get(name)
        if task is None or task.done():
            task = asyncio.get_running_loop().create_task(shared.run())
            task.add_done_callback(_tell_failure)
            self._tasks[name] = task

    def _tell_up(self) -> None:
        self._is_told = True
        log.info("redis_up")

    def _tell_down(self, reason: str) -> None:
        self._is_told = True
        effect = "workers' events are read by every process itself until it is back"
        log.warning("redis_down", reason=reason, effect=effect)


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background_task_failed", exc_info=error)


def _since(now_s: float, then_s: float | None) -> float | None:
    return None if then_s is None else now_s - then_s
