"""The page of all metrics: ``docs/reference/metrics.md``.

Everything that can be configured is, so that every family is there; nothing is started.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.reload.metrics import ReloadCollector
from gateway.reload.reloader import ConfigFile, Reloader
from gateway.serve import Gateway
from gateway.settings import load
from gateway.supervisor.operations import Operations
from runner.metrics import RunnerMetrics, TransferMeter
from runner.tiers.types import TierStats
from runner.types import EngineStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.settings import Location
    from runner.tiers.types import Direction

SUFFIXES = {"counter": "_total"}
HEAD = """\
<!-- Written by `python -m deploy.reference`; a test compares it with the code. -->
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


@dataclass(frozen=True)
class _Pulled:
    """What was pulled from a peer: something of everything, so that every family has a sample."""

    bytes: int = 1
    tokens: int = 1
    seconds: float = 1.0
    failed: int = 1


@dataclass(frozen=True)
class _Served:
    """What was served to peers, likewise."""

    served_blocks: int = 1
    served_bytes: int = 1
    refused: int = 1
    cut_short: int = 1


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
        flags: dict[Location, Any] = {
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
        stats=_stats,
        transfers=transfers,
        pulls=lambda: {"http://a:1": _Pulled()},
        served=_Served,
    )
    transfers.transferred("cpu", "read", 0.1, 1)
    transfers.transferred("cpu", "write", 0.1, 1)
    metrics.first_token(0.1, 10, 5)
    yield from metrics.registry.collect()


def page() -> str:
    """Return the page."""
    return "".join(
        (
            HEAD,
            *_table("Gateway", rows(gateway_metrics())),
            *_table("Runner", rows(runner_metrics())),
        )
    )


def _stats() -> EngineStats:
    by_direction: dict[Direction, int] = {"read": 1, "write": 1}
    tiers = [
        TierStats(
            name,
            capacity_bytes=1,
            used_bytes=1,
            queue_bytes=by_direction,
            oldest_s={"read": 1.0, "write": 1.0},
            moved_bytes_total=by_direction,
            moved_blocks_total=by_direction,
        )
        for name in ("cpu", "disk", "remote", "peer")
    ]
    return EngineStats(
        num_running=1,
        num_waiting=1,
        pool_blocks=2,
        free_blocks=1,
        cached_blocks=1,
        active_blocks=1,
        block_size=16,
        block_bytes=1,
        hit_tokens_total=1,
        query_tokens_total=2,
        evictions_total=1,
        preemptions_total=1,
        prompt_tokens_total=2,
        generation_tokens_total=1,
        hit_tokens={"gpu": 1},
        miss_tokens={"cold": 1},
        tiers=tuple(tiers),
    )


def _table(title: str, found: Iterable[Row]) -> Iterator[str]:
    yield f"\n## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n"
    for row in found:
        labels = ", ".join(f"`{label}`" for label in row.labels) or "none"
        text = row.text.replace("|", r"\|").rstrip(".")
        yield f"| `{row.name}` | {row.kind} | {labels} | {text} |\n"
