"""Write metrics as text: Prometheus' format, or OpenMetrics where the scraper asks for it.

prometheus_client writes a registry in one go, which takes a tenth of a second with a large fleet,
and the event loop would stand still meanwhile. Here families may come in parts, and whoever reads
the pieces decides when to go on. Only OpenMetrics has a place for exemplars.

Source: Prometheus text format 0.0.4; OpenMetrics 1.0 (``openmetrics-text``).
"""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric
    from prometheus_client.samples import Exemplar, Sample

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def wants_open_metrics(accept: str) -> bool:
    """Say whether a scraper wants OpenMetrics.

    Args:
        accept: Its ``accept`` header; those that take both name OpenMetrics first.
    """
    return "application/openmetrics-text" in accept


def content_type(*, open_metrics: bool) -> str:
    """Return the content type of a text."""
    return OPEN_TYPE if open_metrics else TEXT_TYPE


def write(metrics: Iterable[Metric], *, open_metrics: bool) -> Iterator[str]:
    """Yield the text in pieces.

    Args:
        metrics: Families; parts of one family follow each other.
        open_metrics: The format.
    """
    last = ""
    for metric in metrics:
        lines = [] if metric.name == last else _head(metric, open_metrics=open_metrics)
        last = metric.name
        lines += [_line(sample, open_metrics=open_metrics) for sample in metric.samples]
        yield "".join(lines)
    if open_metrics:
        yield "# EOF\n"


def number(value: float) -> str:
    """Return a value as both formats have it."""
    value = float(value)
    return repr(value) if isfinite(value) else {inf: "+Inf", -inf: "-Inf"}.get(value, "NaN")


def _head(metric: Metric, *, open_metrics: bool) -> list[str]:
    name, kind = metric.name, metric.type
    text = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
    if open_metrics:
        text = text.replace('"', r"\"")
    elif kind == "counter":
        name += "_total"
    elif kind == "unknown":
        kind = "untyped"
    return [f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n"]


def _line(sample: Sample, *, open_metrics: bool) -> str:
    labels = ""
    if sample.labels:
        # In one order whoever wrote them, so that lines can be compared.
        named = sorted(sample.labels.items())
        pairs = ",".join([f'{name}="{_escaped(value)}"' for name, value in named])
        labels = f"{{{pairs}}}"
    behind = ""
    if open_metrics and sample.exemplar is not None:
        behind = _exemplar(sample.exemplar)
    return f"{sample.name}{labels} {number(sample.value)}{behind}\n"


def _exemplar(exemplar: Exemplar) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in exemplar.labels.items())
    at = "" if exemplar.timestamp is None else f" {exemplar.timestamp:.3f}"
    return f" # {{{pairs}}} {number(exemplar.value)}{at}"


def _escaped(value: str) -> str:
    # Most label values are plain names.
    if value.isalnum():
        return value
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
