"""What became of spans, read at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.tracing.sampling import Exports


class SpanCollector(Collector):
    """Yields ``warmlane_spans_total``: exported, dropped (too many wait), failed (not taken)."""

    def __init__(self, export: Exports) -> None:
        self._export = export

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the name is used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        export = self._export
        family = CounterMetricFamily(
            "warmlane_spans", "Spans by what became of them", labels=("result",)
        )
        family.add_metric(("exported",), export.exported)
        family.add_metric(("dropped",), export.dropped)
        family.add_metric(("failed",), export.failed)
        yield family
