"""What the exchange counts, under Prometheus names, read at scrape time."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.replicas.load import LoadExchange


class LoadCollector(Collector):
    """Yields the families of one process; pools and kinds of errors are bounded sets."""

    def __init__(self, exchange: LoadExchange) -> None:
        self._exchange = exchange

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the names are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        exchange = self._exchange
        gateways = GaugeMetricFamily(
            "warmlane_other_gateways", "Other gateways that are heard", labels=("pool",)
        )
        age = GaugeMetricFamily(
            "warmlane_load_age_seconds",
            "Age of what is known of their load; absent while they cannot be heard",
            labels=("pool",),
        )
        for pool, others in exchange.others.items():
            gateways.add_metric((pool,), len(others))
            age_s = exchange.age_s(pool)
            if isfinite(age_s):
                age.add_metric((pool,), age_s)
        reports = CounterMetricFamily(
            "warmlane_load_reports", "Reports of load, by direction", labels=("direction",)
        )
        reports.add_metric(("sent",), exchange.num_sent)
        reports.add_metric(("heard",), exchange.num_heard)
        errors = CounterMetricFamily(
            "warmlane_load_errors",
            "Reports that could not be sent, heard or read",
            labels=("kind",),
        )
        for kind, count in exchange.errors.items():
            errors.add_metric((kind,), count)
        yield from (gateways, age, reports, errors)
