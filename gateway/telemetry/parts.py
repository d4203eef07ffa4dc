"""Families in parts of some dozen samples, for what may have thousands of series.

Making a sample takes a microsecond or two; parts let a scrape be interrupted. Parts of one family
have one name and follow each other.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UntypedMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    Rows: TypeAlias = Iterable[tuple[tuple[str, ...], float]]

# A few hundred microseconds to make and to write.
PART_SAMPLES = 50


def gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Iterator[Metric]:
    """Yield a gauge; ``rows`` are label values and the value, read as they are needed."""
    return _parts(GaugeMetricFamily, name, text, labels, rows)


def counter(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Iterator[Metric]:
    """Yield a counter, its name without ``_total``."""
    return _parts(CounterMetricFamily, name, text, labels, rows)


def untyped(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Iterator[Metric]:
    """Yield a family without type: the contract's bare names that only grow."""
    return _parts(UntypedMetricFamily, name, text, labels, rows)


def _parts(
    kind: type[GaugeMetricFamily | CounterMetricFamily | UntypedMetricFamily],
    name: str,
    text: str,
    labels: tuple[str, ...],
    rows: Rows,
) -> Iterator[Metric]:
    left = iter(rows)
    is_first = True
    while (part := list(islice(left, PART_SAMPLES))) or is_first:
        is_first = False
        family = kind(name, text, labels=labels)
        for values, value in part:
            family.add_metric(values, value)
        yield family
