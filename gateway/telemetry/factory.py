"""The gateway's own counters and histograms: plain numbers that are read when somebody scrapes.

prometheus_client guards each of its numbers with a lock, and a histogram looks through its buckets
one by one; a request counts into a dozen of them. These belong to the event loop and need neither.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


class Count:
    """One series of a counter.

    Attributes:
        value: What was counted; only ever grows.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count ``amount`` more."""
        self.value += amount


class Distribution:
    """One series of a histogram.

    Attributes:
        counts: Values per bucket, the last one above all bounds.
        total: Their sum.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; one that equals a bound is below it."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


_Child = TypeVar("_Child", Count, Distribution)


class _Family(Collector, Generic[_Child]):
    """The series of one metric, by the values of its labels."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], make: Callable[[], _Child]
    ) -> None:
        self._name = name
        self._text = text
        self._names = labels
        self._make: Callable[[], _Child] = make
        self._children: dict[tuple[str, ...], _Child] = {}

    def labels(self, *values: str) -> _Child:
        """Return the series of these labels; it exists from here on."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._make()
        return child

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Remove all series that have these labels."""
        wanted = [(self._names.index(name), value) for name, value in labels.items()]
        for values in list(self._children):
            if all(values[at] == value for at, value in wanted):
                del self._children[values]


class Counter(_Family[Count]):
    """A counter; one event loop only."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, text, labels, Count)

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        family = CounterMetricFamily(self._name, self._text, labels=self._names)
        for values, child in self._children.items():
            family.add_metric(values, child.value)
        yield family


class Histogram(_Family[Distribution]):
    """A histogram; one event loop only."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]
    ) -> None:
        super().__init__(name, text, labels, lambda: Distribution(bounds))
        self._bounds: list[str] = list(map(floatToGoString, (*bounds, inf)))

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._names)
        for values, child in self._children.items():
            buckets = list(zip(self._bounds, accumulate(child.counts), strict=True))
            family.add_metric(values, buckets, child.total)
        yield family


class Factory:
    """Makes counters and histograms; names are written without ``_total``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Make a counter."""
        counter = Counter(name, text, labels)
        self._registry.register(counter)
        return counter

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        """Make a histogram."""
        histogram = Histogram(name, text, labels, buckets)
        self._registry.register(histogram)
        return histogram
