"""Label values are bounded: the values of a label beyond a number become one, ``other``.

Pools and routes come from the configuration and workers from discovery; a name that clients choose
must never make series without end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

# What stands for all values that have no series of their own.
OTHER = "other"


class LabelValues:
    """The values of one label that may have series: first come, first served; event loop only.

    Args:
        name: Of the label.
        overflows: Label -> times that a value of it had no series; counted here.
        max_values: How many may have some.
    """

    def __init__(self, name: str, overflows: Counter[str], *, max_values: int) -> None:
        self.name = name
        self._overflows = overflows
        self._max_values = max_values
        self._values: set[str] = set()

    def of(self, value: str) -> str:
        """Return the value, or ``other`` where it has no series."""
        if value not in self._values:
            if len(self._values) >= self._max_values:
                self._overflows[self.name] += 1
                return OTHER
            self._values.add(value)
        return value

    def forget(self, value: str) -> None:
        """Give the place of a value to another one."""
        self._values.discard(value)


class OverflowCollector(Collector):
    """Yields ``warmlane_label_overflows_total``."""

    def __init__(self, overflows: Counter[str]) -> None:
        self._overflows = overflows

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the name is used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        family = CounterMetricFamily(
            "warmlane_label_overflows",
            "Times a value of a label was counted as other, having no series of its own",
            labels=("label",),
        )
        for label, count in self._overflows.items():
            family.add_metric((label,), count)
        yield family
