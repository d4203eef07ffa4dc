"""The miss report's counters, read at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.misses.report import MissReport


class MissCollector(Collector):
    """Yields ``warmlane_miss_tokens_total``; causes are a bounded set."""

    def __init__(self, report: MissReport) -> None:
        self._report = report

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the name is used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        family = CounterMetricFamily(
            "warmlane_miss_tokens",
            "Prompt tokens computed again because a prefix broke, by what broke it",
            labels=("pool", "cause"),
        )
        for (pool, cause), tokens in self._report.tally.tokens.items():
            family.add_metric((pool, cause.value), tokens)
        yield family
