"""A whole small fleet that Prometheus watches: two runners, two gateways, a shared index."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.toy_model import KV_BYTES_PER_TOKEN, write_toy_model
from tests.e2e.fleet import Process, Runner, wait_for, workers_of
from tests.support import free_port
from tests.tools import tool
from tests.valkey import Valkey

REPOSITORY = Path(__file__).parents[2]
RULES = REPOSITORY / "helm" / "warmlane" / "rules" / "warmlane.yaml"
# Twice a second: a window of some seconds has enough samples to be cut at any of them.
SCRAPE_MS = 500
TENANTS = ("acme", "globex", "initech")
# Two documents of some hundred tokens fill a pool, one more its host memory; the rest is on disk.
POOL_TOKENS = 1536
HOST_BYTES = 1280 * KV_BYTES_PER_TOKEN
DISK_BYTES = 64 * 2**20


@dataclass
class Prometheus:
    """Debian's own, over the HTTP API."""

    url: str
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30))

    def get(self, path: str, **params: Any) -> Any:
        answer = self.client.get(f"{self.url}/api/v1/{path}", params=params)
        assert answer.status_code == 200, f"{params}: {answer.text}"
        return answer.json()["data"]

    def query(self, expr: str, at_s: float | None = None) -> list[dict[str, Any]]:
        at = {} if at_s is None else {"time": f"{at_s:.3f}"}
        rows: list[dict[str, Any]] = self.get("query", query=expr, **at)["result"]
        return rows

    def number(self, expr: str, at_s: float | None = None) -> float:
        rows = self.query(expr, at_s)
        assert len(rows) == 1, f"{expr}: {rows}"
        return float(rows[0]["value"][1])

    def scraped_s(self) -> dict[str, float]:
        """When each target was read last, in seconds since 1970."""
        return {
            row["metric"]["instance"]: float(row["value"][1])
            for row in self.query("timestamp(up == 1)")
        }


@dataclass
class ObservedFleet:
    """What runs, and how to ask it."""

    folder: Path
    runners: list[Runner]
    valkey: Valkey
    gateways: list[Process] = field(default_factory=list)
    prometheus: Prometheus = field(default_factory=lambda: Prometheus(""))
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def wait_scraped(self) -> dict[str, float]:
        """Wait until every target has been read after now; returns when each was."""
        now_s, num = time.time(), len(self.runners) + len(self.gateways)

        def is_read() -> bool:
            times_s = self.prometheus.scraped_s()
            return len(times_s) == num and min(times_s.values()) > now_s

        wait_for(is_read, "every target is read", deadline_s=60.0)
        return self.prometheus.scraped_s()

    def wait_samples(self, number: int, since_s: float) -> None:
        """Wait until every target has been read that often since a time."""

        def are_read() -> bool:
            window = f"{round(1000 * (time.time() - since_s))}ms"
            rows = self.prometheus.query(f"sum_over_time(up[{window}])")
            return min(float(row["value"][1]) for row in rows) >= number

        wait_for(are_read, "every target is read often", deadline_s=60.0)

    def text_of(self, process: Process) -> str:
        """What a process exports now."""
        return self.prometheus.client.get(f"{process.url}/metrics").text

    def request_lines(self) -> list[dict[str, Any]]:
        """The log lines of all gateways' finished requests, in order of time."""
        lines = [
            json.loads(line)
            for gateway in self.gateways
            for line in gateway.log.read_text().splitlines(keepends=True)
            if line.startswith('{"event":"request_finished"') and line.endswith("}\n")
        ]
        return sorted(lines, key=lambda line: str(line["timestamp"]))

    def counted(self, series: str, *processes: Process) -> float:
        """Add a series up over all its labels, as processes (or all gateways) say it now."""
        return sum(
            float(line.split()[1])
            for process in processes or self.gateways
            for line in self.text_of(process).splitlines()
            if line.startswith((series + "{", series + " "))
        )

    def wait_rest(self) -> None:
        """Wait until no tier has anything to write, and every gateway tells what workers told last.

        Writing goes on behind the requests, and with it evictions.
        """
        wait_for(
            lambda: self.counted("warmlane_tier_queue_bytes", *self.runners) == 0.0,
            "tiers have written all",
            deadline_s=60.0,
        )
        self.wait_twins()

    def wait_twins(self) -> None:
        """Wait until every gateway tells what the workers told last."""

        def are_equal() -> bool:
            told = self.counted("kv_cache_eviction_count", *self.runners)
            twins = [self.counted("warmlane_worker_evictions_total", it) for it in self.gateways]
            return all(twin == told for twin in twins)

        wait_for(are_equal, "gateways know of all evictions", deadline_s=60.0)


@contextmanager
def observed_fleet(folder: Path, tokenizer: Path) -> Iterator[ObservedFleet]:
    """Start everything and wait until Prometheus reads all of it."""
    prometheus = tool("prometheus")
    valkey = Valkey(folder)
    model = write_toy_model(folder / "toy", tokenizer)
    fleet = ObservedFleet(folder, [_runner(folder, k, model) for k in range(2)], valkey)
    try:
        for runner in fleet.runners:
            runner.start()
        valkey.start()
        for runner in fleet.runners:
            runner.wait_ready()
        fleet.gateways = [_gateway(fleet, k) for k in range(2)]
        for gateway in fleet.gateways:
            gateway.start()
        for gateway in fleet.gateways:
            gateway.wait_ready()
        _start_prometheus(fleet, prometheus)
        for gateway in fleet.gateways:
            wait_for(
                lambda gateway=gateway: all(w["mode"] == "exact" for w in workers_of(gateway)),
                "events are followed",
            )
        yield fleet
    finally:
        fleet.prometheus.client.close()
        for child in fleet.processes:
            child.send_signal(signal.SIGTERM)
            child.wait(30)
        for process in (*fleet.gateways, *fleet.runners):
            process.stop()
        valkey.stop()


def _runner(folder: Path, number: int, model: Path) -> Runner:
    port, events, replay = free_port(), free_port(), free_port()
    runner = Runner(
        [
            *("runner", "--model", str(model), "--served-model-name", "smollm2"),
            *("--port", str(port), "--dtype", "bfloat16", "--pool-tokens", str(POOL_TOKENS)),
            *("--kv-events", f"tcp://127.0.0.1:{events}"),
            *("--kv-replay", f"tcp://127.0.0.1:{replay}"),
            *("--host-bytes", str(HOST_BYTES), "--ssd-dir", str(folder / f"disk-{number}")),
            *("--ssd-bytes", str(DISK_BYTES)),
        ],
        port,
        folder / f"runner-{number}.log",
        "/health",
    )
    runner.events, runner.replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
    return runner


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


def _gateway(fleet: ObservedFleet, number: int) -> Process:
    workers = [
        {"id": f"w{k}", "url": runner.url, "kv_events": runner.events, "kv_replay": runner.replay}
        for k, runner in enumerate(fleet.runners)
    ]
    tenants = []
    for tenant in TENANTS:
        keys = fleet.folder / f"{tenant}.keys"
        keys.write_text(hashlib.sha256(key_of(tenant).encode()).hexdigest() + "\n")
        tenants.append({"name": tenant, "keys_file": str(keys)})
    listed = fleet.folder / "workers.yaml"
    listed.write_text(yaml.safe_dump(workers))
    port = free_port()
    pool = {
        "name": "chat",
        "models": ["smollm2"],
        "engine": "runner",
        "discovery": {"type": "file", "path": str(listed)},
        "keep_warm": {"enabled": True, "store": True},
    }
    config = {
        "server": {"host": "127.0.0.1", "port": port},
        # A short queue is enough, so that a small crowd waits in the gateway.
        "routing": {"max_wait_s": 0.001},
        # Every request is traced, for nobody who listens.
        "telemetry": {"otlp_endpoint": f"http://127.0.0.1:{free_port()}", "trace_sample": 1.0},
        "index": {"backend": "redis", "url": fleet.valkey.url},
        "pools": [pool],
        "tenants": tenants,
    }
    path = fleet.folder / f"gateway-{number}.json"
    path.write_text(json.dumps(config))
    return Process(
        ["gateway", "serve", "--config", str(path)],
        port,
        fleet.folder / f"gateway-{number}.log",
        "/health/ready",
    )


def _start_prometheus(fleet: ObservedFleet, binary: Path) -> None:
    jobs = {"warmlane-gateway": fleet.gateways, "warmlane-runner": fleet.runners}
    config = {
        "global": {"scrape_interval": f"{SCRAPE_MS}ms", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": job,
                "static_configs": [{"targets": [f"127.0.0.1:{p.port}" for p in processes]}],
            }
            for job, processes in jobs.items()
        ],
    }
    path = fleet.folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    with (fleet.folder / "prometheus.log").open("wb") as log:
        child = subprocess.Popen(
            [
                str(binary),
                f"--config.file={path}",
                f"--storage.tsdb.path={fleet.folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    fleet.processes.append(child)
    fleet.prometheus = Prometheus(f"http://127.0.0.1:{port}")

    def is_ready() -> bool:
        assert child.poll() is None, (fleet.folder / "prometheus.log").read_text()[-2000:]
        try:
            url = f"{fleet.prometheus.url}/-/ready"
            return fleet.prometheus.client.get(url).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(is_ready, "Prometheus is ready")
    fleet.wait_scraped()
