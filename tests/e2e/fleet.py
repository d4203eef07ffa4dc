"""Real processes for the end-to-end tests: bundled runners and a gateway, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support import free_port

START_DEADLINE_S = 240


@dataclass
class Process:
    """One child process that serves HTTP on ``port`` and logs into ``log``."""

    args: list[str]
    port: int
    log: Path
    ready_path: str
    child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", *self.args],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def wait_ready(self) -> None:
        assert self.child is not None
        end = time.monotonic() + START_DEADLINE_S
        with httpx.Client(timeout=2) as client:  # making one takes longer than asking
            while time.monotonic() < end:
                assert self.child.poll() is None, self.log.read_text()[-2000:]
                try:
                    if client.get(self.url + self.ready_path).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
        raise AssertionError(f"not ready: {self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        if self.child is None:
            return 0
        self.child.send_signal(number)
        code = self.child.wait(30)
        self.child = None
        return code


@dataclass
class Runner(Process):
    """A bundled runner with KV events."""

    events: str = ""
    replay: str = ""


@dataclass
class Fleet:
    """Two runners; gateways are added per test module."""

    folder: Path
    runners: list[Runner]
    gateways: list[Process] = field(default_factory=list)

    def gateway(self, name: str, *, with_events: bool = True) -> Process:
        """Start a gateway in front of the runners and wait until it reads prompts exactly."""
        workers: list[dict[str, Any]] = []
        for index, runner in enumerate(self.runners):
            worker = {"id": f"w{index}", "url": runner.url}
            if with_events:
                worker |= {"kv_events": runner.events, "kv_replay": runner.replay}
            else:  # an empty list: not to be discovered either
                worker |= {"kv_events": []}
            workers.append(worker)
        pool = {
            "name": "chat",
            "models": ["smollm2"],
            "aliases": {"gpt-4o-mini": "smollm2"},
            "engine": "runner",
            "workers": workers,
        }
        port = free_port()
        config = self.folder / f"{name}.json"
        config.write_text(
            json.dumps({"server": {"host": "127.0.0.1", "port": port}, "pools": [pool]})
        )
        gateway = Process(
            ["gateway", "serve", "--config", str(config)],
            port,
            self.folder / f"{name}.log",
            "/health/ready",
        )
        gateway.start()
        self.gateways.append(gateway)
        gateway.wait_ready()
        wait_for(lambda: all(w["mode"] != "text" for w in workers_of(gateway)), "prompts are read")
        return gateway


@contextmanager
def running_fleet(folder: Path, model: Path) -> Iterator[Fleet]:
    """Two engines that serve until the block is left, with every gateway started for them."""
    fleet = Fleet(folder, [make_runner(folder, f"runner-{i}", model) for i in range(2)])
    try:
        for runner in fleet.runners:
            runner.start()
        for runner in fleet.runners:
            runner.wait_ready()
        yield fleet
    finally:
        for process in (*fleet.gateways, *fleet.runners):
            process.stop()


def make_runner(folder: Path, name: str, model: Path) -> Runner:
    port, events, replay = free_port(), free_port(), free_port()
    args = [
        *("runner", "--model", str(model), "--served-model-name", "smollm2"),
        *("--port", str(port), "--dtype", "bfloat16", "--pool-tokens", "16384"),
        *("--kv-events", f"tcp://127.0.0.1:{events}"),
        *("--kv-replay", f"tcp://127.0.0.1:{replay}"),
    ]
    runner = Runner(args, port, folder / f"{name}.log", "/health")
    runner.events, runner.replay = f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}"
    return runner


def workers_of(gateway: Process) -> list[dict[str, Any]]:
    answer = httpx.get(f"{gateway.url}/admin/v1/workers", timeout=5).json()
    workers: list[dict[str, Any]] = answer["workers"]
    return workers


def wait_for(condition: Any, what: str, *, deadline_s: float = 40.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not reached within {deadline_s} s: {what}"
        time.sleep(0.05)


def chat(
    base: str, document: str, question: str, *, max_tokens: int = 4, **more: Any
) -> httpx.Response:
    """Ask one question about a document, without any hint, and say which worker answered."""
    body = {
        "model": "smollm2",
        "messages": [
            {"role": "system", "content": document},
            {"role": "user", "content": question},
        ],
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }
    headers = {"x-warmlane-explain": "1"}
    return httpx.post(f"{base}/v1/chat/completions", json=body, headers=headers, timeout=60)


def cached_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def document(name: str, rules: int = 24) -> str:
    """Text of about 25 tokens a rule that shares no block with another name's."""
    return f"You are the clerk of {name}.\n" + "\n".join(
        f"Rule {n}: gate {n * 7 % 50} of {name} opens at {n % 12 + 7} and admits {n * 13 % 90}."
        for n in range(1, rules + 1)
    )
