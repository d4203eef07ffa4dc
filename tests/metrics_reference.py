"""Write the reference of all metrics from the code: python -m tests.metrics_reference.

Everything that can be configured is, so that every family is there; nothing is started.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gateway.reload.metrics import ReloadCollector
from gateway.reload.reloader import ConfigFile, Reloader
from gateway.serve import Gateway
from gateway.settings import load
from gateway.supervisor.operations import Operations
from runner.metrics import RunnerMetrics, TransferMeter
from tests.runner.metrics_parts import STATS
from tests.runner.test_metrics_tiers import Pulled, Served

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

REFERENCE = Path(__file__).parents[1] / "docs" / "metrics.md"
SUFFIXES = {"counter": "_total"}
HEAD = """\
<!-- Written by `python -m tests.metrics_reference`; a test compares it with the code. -->
# Metrics

Every family that a gateway or a runner exports on `/metrics`. A value that nobody reports is \
absent, never 0. Labels are bounded: pools, routes and tenants come from the configuration, \
workers from discovery, reasons and outcomes from the code; what goes beyond a bound is counted \
as `other` and in `warmlane_label_overflows_total`. The series of a worker leave with it. Who asks \
for OpenMetrics (`Accept: application/openmetrics-text`, as Prometheus does) gets exemplars with \
`trace_id` on TTFT and durations.

The twelve bare names, with `scope="fleet"` or `scope="worker"`, are the same on gateways and \
runners. Quantiles and means cannot be combined: alerts, dashboards and autoscaling use the typed \
families.

Several processes of one gateway (`server.processes`) answer as one: counters and histograms add \
up, processes that died included.
"""


class Row(NamedTuple):
    """One family."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def rows(metrics: Iterable[Metric]) -> Iterator[Row]:
    """Yield each family once, whatever parts it comes in."""
    labels: dict[str, dict[str, None]] = {}
    found: dict[str, Metric] = {}
    for metric in metrics:
        name = metric.name + SUFFIXES.get(metric.type, "")
        found.setdefault(name, metric)
        known = labels.setdefault(name, {})
        known.update(dict.fromkeys(getattr(metric, "_labelnames", ())))
        for sample in metric.samples:
            known.update(dict.fromkeys(label for label in sample.labels if label != "le"))
    for name, metric in sorted(found.items()):
        kind = "untyped" if metric.type == "unknown" else metric.type
        yield Row(name, kind, tuple(labels[name]), metric.documentation)


def gateway_metrics() -> Iterator[Metric]:
    """Yield what a gateway exports that has every part there is."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            ("server",): {"access": {"trusted_peers": ["127.0.0.1"]}},
            ("index",): {"backend": "redis", "url": "redis://127.0.0.1:1"},
            ("pools",): [
                {"name": "chat", "models": ["m"], "engine": "openai",
                 "workers": [{"id": "w0", "url": "http://127.0.0.1:1"}]}
            ],
            ("tenants",): [{"name": "acme", "requests_per_min": 1}],
            ("telemetry",): {
                "decision_log": f"{folder}/decisions", "otlp_endpoint": "http://127.0.0.1:1",
            },
        }  # fmt: skip
        settings, _ = load(None, flags=flags, environ={})
        gateway = Gateway(settings)
        yield from gateway.telemetry.registry.collect()
        gateway.observing.close()
    reloader = Reloader(ConfigFile(None, {}), settings, gateway.reload)
    own = ReloadCollector(reloader).collect
    yield from Operations([], {}, lambda: 0.0, 0, own).own_metrics()


def runner_metrics() -> Iterator[Metric]:
    """Yield what a runner exports that has every tier there is."""
    transfers = TransferMeter("smollm2")
    metrics = RunnerMetrics(
        model="smollm2",
        worker="127.0.0.1:8101",
        stats=lambda: STATS,
        transfers=transfers,
        pulls=lambda: {"http://a:1": Pulled()},
        served=Served,
    )
    transfers.transferred("cpu", "read", 0.1, 1)
    transfers.transferred("cpu", "write", 0.1, 1)
    metrics.first_token(0.1, 10, 5)
    yield from metrics.registry.collect()


def reference() -> str:
    """Return the page."""
    return "".join(
        (
            HEAD,
            *_table("Gateway", rows(gateway_metrics())),
            *_table("Runner", rows(runner_metrics())),
        )
    )


def _table(title: str, found: Iterable[Row]) -> Iterator[str]:
    yield f"\n## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n"
    for row in found:
        labels = ", ".join(f"`{label}`" for label in row.labels) or "none"
        text = row.text.replace("|", r"\|").rstrip(".")
        yield f"| `{row.name}` | {row.kind} | {labels} | {text} |\n"


if __name__ == "__main__":
    REFERENCE.write_text(reference())
    print(f"wrote {REFERENCE}", file=sys.stderr)
