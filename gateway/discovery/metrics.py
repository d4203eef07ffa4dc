"""What is found, and how asking goes, read at scrape time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.discovery.discovery import Discovery


class DiscoveryCollector(Collector):
    """Yields ``warmlane_discovery_*`` of all pools whose workers are found."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: names here are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        workers = GaugeMetricFamily(
            "warmlane_discovery_workers",
            "Workers that a pool's discovery found, by what became of them",
            labels=("pool", "state"),
        )
        failures = CounterMetricFamily(
            "warmlane_discovery_failures",
            "Times a pool's discovery had no usable answer",
            labels=("pool",),
        )
        succeeded = GaugeMetricFamily(
            "warmlane_discovery_last_success_timestamp_seconds",
            "When a pool's discovery answered last",
            labels=("pool",),
        )
        up = GaugeMetricFamily(
            "warmlane_discovery_up",
            "1 while a pool's discovery gives usable answers; what it said last holds otherwise",
            labels=("pool",),
        )
        discovery = self._discovery
        for name, listing in discovery.listings.items():
            counts: Counter[str] = Counter(serving=0, waiting=0, refused=len(listing.bad))
            for found in listing.found or ():
                counts[discovery.state_of(found.worker.id)] += 1
            for state, count in counts.items():
                workers.add_metric((name, state), count)
            failures.add_metric((name,), listing.num_failures)
            up.add_metric((name,), float(not listing.is_failing))
            if listing.succeeded_unix_s is not None:
                succeeded.add_metric((name,), listing.succeeded_unix_s)
        yield workers
        yield failures
        yield succeeded
        yield up
