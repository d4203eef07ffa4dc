"""What the shared index counts, under Prometheus names. Labels: pools and bounded words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.fleet.sharing.sharing import Sharing

_POOL = ("pool",)


class SharingCollector(Collector):
    """Yields the families of one process."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the names are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        link = self._sharing.link
        yield GaugeMetricFamily(
            "warmlane_index_age_seconds",
            "How long ago the oldest view of a worker was known to be the truth",
            value=self._sharing.age_s(),
        )
        yield GaugeMetricFamily(
            "warmlane_redis_up", "1 while Redis answers", value=float(link.is_up)
        )
        yield CounterMetricFamily(
            "warmlane_redis_outages", "Times that Redis went away", value=link.num_outages
        )
        yield CounterMetricFamily(
            "warmlane_redis_errors", "Calls to Redis that failed", value=link.errors.total()
        )
        yield from self._pools()

    def _pools(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "warmlane_index_leases", "Workers whose events this process reads", labels=_POOL
        )
        age = GaugeMetricFamily(
            "warmlane_index_pool_age_seconds", "The same age, by pool", labels=_POOL
        )
        shared = GaugeMetricFamily(
            "warmlane_index_shared_blocks", "(worker, block) entries in Redis", labels=_POOL
        )
        pending = GaugeMetricFamily(
            "warmlane_index_pending_blocks", "Blocks still to be published", labels=_POOL
        )
        published = CounterMetricFamily(
            "warmlane_index_published_blocks", "Block states published", labels=_POOL
        )
        refused = CounterMetricFamily(
            "warmlane_index_refused_deltas",
            "Deltas that the server did not take, by its reason",
            labels=(*_POOL, "reason"),
        )
        loads = CounterMetricFamily(
            "warmlane_index_loads", "Times a worker's whole state was read", labels=_POOL
        )
        dropped = CounterMetricFamily(
            "warmlane_index_dropped_touches",
            "Routings to workers without events that other gateways were not told of",
            labels=_POOL,
        )
        errors = CounterMetricFamily(
            "warmlane_index_decode_errors", "Shared values that could not be read", labels=_POOL
        )
        for name, pool in self._sharing.pools.items():
            views = pool.replica.views.values()
            at = (name,)
            held.add_metric(at, sum(view.role == "hold" for view in views))
            age.add_metric(at, pool.replica.age_s())
            shared.add_metric(at, sum(view.num_shared for view in views))
            pending.add_metric(at, sum(view.publication.num_pending for view in views))
            published.add_metric(at, pool.replica.publisher.published)
            for reason, count in pool.replica.publisher.refused.items():
                refused.add_metric((name, reason), count)
            loads.add_metric(at, sum(view.loads for view in views))
            dropped.add_metric(at, pool.touches.dropped)
            errors.add_metric(at, pool.num_decode_errors)
        yield from (held, age, shared, pending, published, refused, loads, dropped, errors)
