"""What each worker's cache saved in the last hour, older savings fading."""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.routing.pool import Pool, Worker

# A steady saving of v seconds an hour shows as v, as in the worth report.
WINDOW_S = 3600.0


class Value(NamedTuple):
    """What one worker's cache is worth.

    Attributes:
        pool: The worker's pool.
        worker: Its id.
        saved_s: Prefill seconds saved in the last hour, older ones fading.
        requests: Requests served there, likewise.
        watched_s: For how long it was watched: a value of less than an hour is low since it is
            young.
    """

    pool: str
    worker: str
    saved_s: float
    requests: float
    watched_s: float


class _Fading:
    """The sums of one life of a worker's cache."""

    __slots__ = ("_at_s", "epoch", "requests", "saved_s", "since_s")

    def __init__(self, epoch: float | None, now_s: float) -> None:
        self.epoch = epoch
        self.since_s = self._at_s = now_s
        self.saved_s = self.requests = 0.0

    def fade(self, now_s: float) -> None:
        if now_s > self._at_s:
            keep = exp((self._at_s - now_s) / WINDOW_S)
            self._at_s = now_s
            self.saved_s *= keep
            self.requests *= keep


class CacheValues:
    """The workers' caches as one process sees them; event loop only.

    Args:
        pools: All; workers that are in none of them are forgotten when the values are read.
    """

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools
        self._workers: dict[tuple[str, str], _Fading] = {}

    def add(self, pool: str, worker: Worker, saved_s: float, now_s: float) -> None:
        """Take note of a request that a worker served, and of what its cache saved it."""
        found = self._of(pool, worker, now_s)
        found.fade(now_s)
        found.requests += 1.0
        found.saved_s += saved_s

    def read(self, now_s: float) -> Iterator[Value]:
        """Yield the value of each worker whose speed is known; of others nothing can be said."""
        here = {(pool.name, worker) for pool in self._pools for worker in pool.workers}
        for key in [key for key in self._workers if key not in here]:
            del self._workers[key]
        for pool in self._pools:
            for worker in pool.workers.values():
                found = self._of(pool.name, worker, now_s)
                if worker.learner.model is None:
                    continue
                found.fade(now_s)
                watched_s = now_s - found.since_s
                yield Value(pool.name, worker.id, found.saved_s, found.requests, watched_s)

    def _of(self, pool: str, worker: Worker, now_s: float) -> _Fading:
        found = self._workers.get((pool, worker.id))
        # What the cache of an earlier process saved says nothing about this one.
        if found is None or found.epoch != worker.epoch:
            found = self._workers[pool, worker.id] = _Fading(worker.epoch, now_s)
        return found
