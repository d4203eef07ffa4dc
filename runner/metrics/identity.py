"""The label sets of a runner's samples, and how each kind of family is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    UnknownMetricFamily,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily | UnknownMetricFamily

Rows: TypeAlias = "Iterable[tuple[tuple[str, ...], float | None]]"
"""Label values and what was reported under them; None for what nobody reports."""

# One runner process is one engine.
ENGINE = "0"


def typed_labels(model: str) -> dict[str, str]:
    """Return the labels of everything typed, as vLLM has them."""
    return {"model_name": model, "engine": ENGINE}


@dataclass(frozen=True, slots=True)
class Identity:
    """Writes families under this runner's labels.

    Attributes:
        vllm: Labels of everything typed.
        worker: Labels of the bare samples.
    """

    vllm: dict[str, str]
    worker: dict[str, str]

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """Return a gauge with one sample."""
        return filled(GaugeMetricFamily(name, text, labels=[*self.vllm]), self.vllm, value)

    def counter(self, name: str, text: str, value: float) -> Metric:
        """Return a counter with one sample; ``_total`` is added to the name."""
        return filled(CounterMetricFamily(name, text, labels=[*self.vllm]), self.vllm, value)

    def bare_gauge(self, name: str, text: str, value: float) -> Metric:
        """Return a gauge of the contract's bare names."""
        return filled(GaugeMetricFamily(name, text, labels=[*self.worker]), self.worker, value)

    def bare_total(self, name: str, text: str, value: float) -> Metric:
        """Return a cumulative sample of the contract's bare names.

        Untyped: the client library renames a counter to ``_total``.
        """
        return filled(UnknownMetricFamily(name, text, labels=[*self.worker]), self.worker, value)

    def gauges(self, name: str, text: str, labels: tuple[str, ...], rows: Rows) -> list[Metric]:
        """Return a gauge with a sample per row, or nothing if nobody reports one."""
        names = [*self.vllm, *labels]
        return self._rows(GaugeMetricFamily(name, text, labels=names), rows)

    def counters(self, name: str, text: str, labels: tuple[str, ...], rows: Rows) -> list[Metric]:
        """Return a counter with a sample per row, or nothing if nobody reports one."""
        names = [*self.vllm, *labels]
        return self._rows(CounterMetricFamily(name, text, labels=names), rows)

    def _rows(self, family: Family, rows: Rows) -> list[Metric]:
        return fill_rows(family, [*self.vllm.values()], rows)


def filled(family: Family, labels: dict[str, str], value: float) -> Metric:
    """Put one sample into a family."""
    family.add_metric([*labels.values()], value)
    return family


def fill_rows(family: Family, first: list[str], rows: Rows) -> list[Metric]:
    """Put a sample per reported row into a family; an empty family is none."""
    for labels, value in rows:
        if value is not None:
            family.add_metric([*first, *labels], value)
    return [family] if family.samples else []
