"""What became of the decision log's lines, read at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.telemetry.decision_log import DecisionLog


class DecisionLogCollector(Collector):
    """Yields ``warmlane_decision_log_lines_total``: written, dropped (too many), failed (disk)."""

    def __init__(self, decision_log: DecisionLog) -> None:
        self._log = decision_log

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the name is used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        family = CounterMetricFamily(
            "warmlane_decision_log_lines",
            "Lines of the decision log by what became of them",
            labels=("result",),
        )
        family.add_metric(("written",), self._log.written)
        family.add_metric(("dropped",), self._log.dropped)
        family.add_metric(("failed",), self._log.failed)
        yield family
