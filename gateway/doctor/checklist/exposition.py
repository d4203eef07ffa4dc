"""Reads a metrics text: families by name, and one histogram's buckets added up."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def family_names(text: str) -> set[str]:
    """Return the names of all families, those without a sample too."""
    lines = (line.split() for line in text.splitlines() if line.startswith("# TYPE "))
    return {words[2] for words in lines if len(words) == 4}


def samples_of(text: str, family: str) -> Iterator[tuple[Mapping[str, str], str, float]]:
    """Yield labels, name and value of each sample of a family, named without ``_total``."""
    prefix = (f"{family}{{", f"{family}_", f"{family} ", f"# TYPE {family}")
    lines = [line for line in text.splitlines() if line.startswith(prefix)]
    for found in text_string_to_metric_families("\n".join(lines) + "\n"):
        if found.name.removesuffix("_total") == family:
            for sample in found.samples:
                if not sample.name.endswith("_created"):
                    yield sample.labels, sample.name, sample.value


class Bucketed:
    """A histogram, all of whose series are added up.

    Attributes:
        count: Observations.
        total_s: Their sum.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.total_s = 0.0
        self._below: dict[float, float] = {}

    def add(self, labels: Mapping[str, str], name: str, value: float) -> None:
        """Take a sample."""
        if name.endswith("_bucket"):
            bound = float(labels["le"])
            self._below[bound] = self._below.get(bound, 0.0) + value
        elif name.endswith("_count"):
            self.count += value
        elif name.endswith("_sum"):
            self.total_s += value

    @property
    def mean_s(self) -> float:
        """Mean; 0 without an observation."""
        return self.total_s / self.count if self.count else 0.0

    def share_within(self, bound: float) -> float:
        """Return the share of observations in the buckets up to ``bound``; 0 without any."""
        fitting = [at for at in self._below if at <= bound]
        whole = self._below.get(inf, 0.0)
        return self._below[max(fitting)] / whole if fitting and whole else 0.0
