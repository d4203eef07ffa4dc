"""The rule file as Python sees it, and the metrics that real exporters have for it."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from runner.config import PoolSize, RunnerConfig
from tests.e2e.fleet import Process, chat, document, wait_for, workers_of
from tests.live_runner import LiveRunner
from tests.support import free_port
from tests.valkey import Valkey

REPOSITORY = Path(__file__).parents[2]
RULES = REPOSITORY / "helm" / "warmlane" / "rules" / "warmlane.yaml"
TESTS = sorted((REPOSITORY / "deploy" / "alerts").glob("*.yaml"))
RUNBOOKS = REPOSITORY / "docs" / "runbooks"

# What Prometheus adds to every sample.
TARGET_LABELS = frozenset({"namespace", "job", "instance"})
# Names that Prometheus writes itself.
OWN_NAMES = frozenset({"ALERTS", "up"})

_STRING = re.compile(r'"[^"]*"')
_SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\b(?:by|without|on) \(([^)]*)\)")
_CALLED = re.compile(r"\s*\(|\s+by\b|\s+without\b")
_WORDS = frozenset({"and", "or", "unless", "by", "without", "on", "offset"})
_RANGE = re.compile(r"\[[^\]]*\]|\boffset \w+")


class Selector(NamedTuple):
    """What an expression asks for: a metric, and the labels that it must have for it."""

    name: str
    labels: frozenset[str]
    matchers: str


@cache
def rules() -> list[dict[str, Any]]:
    """Every rule, in its order."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def names() -> list[str]:
    """Names of the alerts, each once."""
    return list(dict.fromkeys(alert["alert"] for alert in alerts()))


@cache
def unit_tests() -> list[dict[str, Any]]:
    """Every promtool test there is."""
    return [case for path in TESTS for case in yaml.safe_load(path.read_text())["tests"]]


def selectors(expr: str) -> Iterator[Selector]:
    """Yield what an expression reads; a label counts where the innermost grouping names it."""
    text = _RANGE.sub(lambda found: " " * len(found[0]), expr)
    groupings = list(_GROUPING.finditer(text))
    inside = [range(*found.span()) for found in groupings]
    for found in _SELECTOR.finditer(text):
        name, at = found[1], found.start(1)
        if name in _WORDS or any(at in span for span in inside):
            continue
        if found[2] is None and _CALLED.match(text, found.end(1)):
            continue  # a function or an aggregation
        before = [grouping[1] for grouping in groupings if grouping.end() <= at]
        grouped = set(re.findall(r"\w+", before[-1])) if before else set()
        matched = set(re.findall(r"\w+", _STRING.sub("", found[2] or "")))
        yield Selector(name, frozenset(grouped | matched) - TARGET_LABELS, found[2] or "")


def read_selectors() -> set[Selector]:
    """Everything that the rules read from exporters."""
    read = {selector for rule in rules() for selector in selectors(rule["expr"])}
    return {selector for selector in read if selector.name not in recorded_names() | OWN_NAMES}


def recorded_names() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def fenced(language: str) -> dict[str, list[str]]:
    """Name of a runbook -> its blocks in one language."""
    block = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {name: block.findall((RUNBOOKS / f"{name}.md").read_text()) for name in names()}


class Exposed(NamedTuple):
    """A gateway and a runner of it, and what both said when scraped."""

    gateway_url: str
    runner_url: str
    gateway: list[Metric]
    runner: list[Metric]

    @property
    def families(self) -> list[Metric]:
        return [*self.gateway, *self.runner]

    @property
    def samples(self) -> list[Sample]:
        return samples_of(self.families)


def samples_of(families: list[Metric]) -> list[Sample]:
    return [sample for family in families for sample in family.samples]


def families_of(url: str) -> list[Metric]:
    text = httpx.get(f"{url}/metrics", timeout=10).text
    return list(text_string_to_metric_families(text))


@contextmanager
def exposed_fleet(folder: Path, model: Path) -> Iterator[Exposed]:
    """Run one gateway with everything that can be watched, and one runner with tiers behind it."""
    runner = RunnerConfig(
        model=str(model),
        port=0,
        served_model_name="smollm2",
        pool=PoolSize(tokens=2_048),
        kv_events="tcp://127.0.0.1:0",
        kv_replay="tcp://127.0.0.1:0",
        host_bytes=16 << 20,
    )
    # Not the test's folder: a unix socket's path may have 107 bytes.
    with LiveRunner.start(runner) as live, tempfile.TemporaryDirectory(prefix="wl-") as short:
        redis = Valkey(Path(short))
        redis.start()
        gateway = _gateway(folder, live, redis)
        try:
            gateway.start()
            gateway.wait_ready()
            wait_for(lambda: [w["mode"] for w in workers_of(gateway)] == ["exact"], "events")
            for question in ("Who?", "When?"):
                body = chat(gateway.url, document("alerts", rules=8), question, stream=True)
                assert b"[DONE]" in body.content
            yield Exposed(gateway.url, live.url, families_of(gateway.url), families_of(live.url))
        finally:
            gateway.stop()
            redis.stop()


def _gateway(folder: Path, live: LiveRunner, redis: Valkey) -> Process:
    workers = folder / "workers.yaml"
    workers.write_text(json.dumps([{"id": "w0", "url": live.url}]))
    port = free_port()
    config = {
        "server": {"host": "127.0.0.1", "port": port},
        "index": {"backend": "redis", "url": redis.url},
        "pools": [
            {
                "name": "chat",
                "models": ["smollm2"],
                "engine": "runner",
                "discovery": {"type": "file", "path": str(workers)},
            }
        ],
        # Nobody listens there: spans are lost, and counted.
        "telemetry": {"otlp_endpoint": "http://127.0.0.1:9", "trace_sample": 1.0},
    }
    path = folder / "warmlane.json"
    path.write_text(json.dumps(config))
    args = ["gateway", "serve", "--config", str(path)]
    return Process(args, port, folder / "gateway.log", "/health/ready")
