"""The gateway's own counters and histograms: plain numbers that are read when somebody scrapes.

prometheus_client guards each of its numbers with a lock, and a histogram looks through its buckets
one by one; a request counts into a dozen of them. These belong to the event loop and need neither.

A family is yielded in parts of the same name, so that a scrape of many series can be interrupted;
``gateway/telemetry/exposition.py`` puts them together.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from bisect import bisect_left
from collections import Counter as Counts
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from gateway.telemetry.labels import LabelValues, OverflowCollector
from gateway.telemetry.parts import PART_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

# More values of a label than that have no series of their own: workers are a fleet, everything
# else is named in a configuration or in the code.
MAX_VALUES = {"worker": 4096}
MAX_OTHER_VALUES = 256


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
        exemplars: Bucket -> the value in it whose request was traced last.
    """

    __slots__ = ("_bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Count a value; one that equals a bound is below it.

        Args:
            value: The value.
            trace_id: Trace of the request that had it; None where it has none.
        """
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())


_Child = TypeVar("_Child", Count, Distribution)


class _Family(Collector, Generic[_Child]):
    """The series of one metric, by the values of its labels."""

    def __init__(
        self, name: str, text: str, labels: tuple[LabelValues, ...], make: Callable[[], _Child]
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._names = tuple(label.name for label in labels)
        self._make: Callable[[], _Child] = make
        self._children: dict[tuple[str, ...], _Child] = {}

    def labels(self, *values: str) -> _Child:
        """Return the series of these labels; it exists from here on."""
        child = self._children.get(values)
        if child is None:
            pairs = zip(self._labels, values, strict=True)
            bounded = tuple(label.of(value) for label, value in pairs)
            child = self._children.get(bounded)
            if child is None:
                child = self._children[bounded] = self._make()
        return child

    def remove_by_labels(self, labels: Mapping[str, str]) -> None:
        """Remove all series that have these labels."""
        wanted = [(self._names.index(name), value) for name, value in labels.items()]
        for values in list(self._children):
            if all(values[at] == value for at, value in wanted):
                del self._children[values]

    def describe(self) -> Iterator[Metric]:
        """Yield the family without series, for the registry to know its name."""
        yield self._part(())

    def _collect(self, num_children: int) -> Iterator[Metric]:
        # Series may come and go between two parts.
        children = list(self._children.items())
        for start in range(0, max(1, len(children)), num_children):
            yield self._part(children[start : start + num_children])

    @abstractmethod
    def _part(self, children: Iterable[tuple[tuple[str, ...], _Child]]) -> Metric: ...


class Counter(_Family[Count]):
    """A counter; one event loop only."""

    def __init__(self, name: str, text: str, labels: tuple[LabelValues, ...]) -> None:
        super().__init__(name, text, labels, Count)

    def collect(self) -> Iterator[Metric]:
        """Yield the family in parts."""
        yield from self._collect(PART_SAMPLES)

    def _part(self, children: Iterable[tuple[tuple[str, ...], Count]]) -> Metric:
        family = CounterMetricFamily(self._name, self._text, labels=self._names)
        for values, child in children:
            family.add_metric(values, child.value)
        return family


class Histogram(_Family[Distribution]):
    """A histogram; one event loop only."""

    def __init__(
        self, name: str, text: str, labels: tuple[LabelValues, ...], bounds: tuple[float, ...]
    ) -> None:
        super().__init__(name, text, labels, lambda: Distribution(bounds))
        self._bounds: list[str] = list(map(floatToGoString, (*bounds, inf)))

    def collect(self) -> Iterator[Metric]:
        """Yield the family in parts; the buckets of one series stay together."""
        # With its sum and its count.
        yield from self._collect(max(1, PART_SAMPLES // (len(self._bounds) + 2)))

    def _part(self, children: Iterable[tuple[tuple[str, ...], Distribution]]) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=self._names)
        for values, child in children:
            family.add_metric(values, self._buckets(child), child.total)
        return family

    def _buckets(
        self, child: Distribution
    ) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        buckets += zip(self._bounds, accumulate(child.counts), strict=True)
        for at, exemplar in child.exemplars.items():
            buckets[at] = (*buckets[at][:2], exemplar)
        return buckets


class Factory:
    """Makes counters and histograms with bounded labels; names are written without ``_total``.

    Args:
        registry: Gets them.

    Attributes:
        overflows: Label -> times that a value of it had no series of its own.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._labels: dict[str, LabelValues] = {}
        self.overflows: Counts[str] = Counts()
        registry.register(OverflowCollector(self.overflows))

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Make a counter."""
        counter = Counter(name, text, tuple(map(self.label, labels)))
        self._registry.register(counter)
        return counter

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        """Make a histogram."""
        histogram = Histogram(name, text, tuple(map(self.label, labels)), buckets)
        self._registry.register(histogram)
        return histogram

    def label(self, name: str) -> LabelValues:
        """Return the values that a label may have in all families together."""
        values = self._labels.get(name)
        if values is None:
            max_values = MAX_VALUES.get(name, MAX_OTHER_VALUES)
            values = LabelValues(name, self.overflows, max_values=max_values)
            self._labels[name] = values
        return values
