"""What was decided about requests, as metrics: sources, pulls, routes, waits, offload caps.

A series exists once something was counted in it. What the routing rule would have done where it did
not decide is counted in ``gateway/routing/rollout.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.telemetry.factory import Count, Counter, Factory
    from gateway.telemetry.record import RequestRecord

# A wait ends with the next free worker, within a few steps, or at the pool's deadline.
WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Choices:
    """Counts what finished requests say about choices; event loop only."""

    def __init__(self, make: Factory) -> None:
        self._sources = make.counter(
            "warmlane_sources",
            "Requests by where the KV of their prefix was to come from",
            *("pool", "source"),
        )
        self._pulls = make.counter(
            "warmlane_pulls", "Requests whose KV was fetched from elsewhere", "pool", "worker"
        )
        self._pulled = make.counter(
            "warmlane_pulled_tokens", "Tokens of KV to be fetched", "pool", "worker"
        )
        self._routes = make.counter(
            "warmlane_route_requests", "Requests by configured route", "pool", "route"
        )
        self._waits = make.histogram(
            "warmlane_queue_seconds",
            "Waiting in the gateway, of the requests that had to",
            WAIT_BUCKETS_S,
            "pool",
        )
        self._offload = make.counter(
            "warmlane_offload_caps",
            "Requests with an offload cap, by what it allows",
            *("pool", "allows"),
        )
        # Children looked up once: ``labels`` costs more than counting.
        self._children: dict[tuple[Counter, str, str], Count] = {}

    def add(self, record: RequestRecord) -> None:
        """Count one finished request."""
        if not record.worker:
            return
        pool = record.pool
        if record.source:
            # A peer is named in the log; here that would be a series per pair.
            self._count(self._sources, pool, record.source.partition(":")[0])
        if record.pull_tokens:
            self._pulls.labels(pool, record.worker).inc()
            self._pulled.labels(pool, record.worker).inc(record.pull_tokens)
        if record.route:
            self._count(self._routes, pool, record.route)
        if record.queue_s > 0.0:
            self._waits.labels(pool).observe(record.queue_s)
        if record.offload_tokens is not None:
            self._count(self._offload, pool, "some" if record.offload_tokens else "none")

    def forget_worker(self, worker: str) -> None:
        """Remove the series of a worker that left."""
        for metric in (self._pulls, self._pulled):
            metric.remove_by_labels({"worker": worker})

    def _count(self, metric: Counter, pool: str, value: str) -> None:
        key = (metric, pool, value)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(pool, value)
        child.inc()
