"""Two gateways in front of the same engines, with a Redis between them: all real processes."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.fleet import Process, document, wait_for
from tests.support import free_port
from tests.valkey import Valkey

# A prompt of 600 tokens then takes 0.6 s: long enough to be seen everywhere while it is computed.
SLOWDOWN = 30.0
_COMPUTED = re.compile(r"^vllm:(prompt_tokens|prefix_cache_hits)_total\{[^}]*\} (\S+)", re.M)


@dataclass
class Replicas:
    """Mock engines, a Valkey, and gateways that come and go."""

    folder: Path
    model: Path
    valkey: Valkey
    engines: list[Process] = field(default_factory=list)
    workers: list[dict[str, str]] = field(default_factory=list)
    gateways: list[Process] = field(default_factory=list)

    def engine(self, name: str) -> None:
        port = free_port()
        events, replay = (f"ipc://{self.folder}/{name}-{kind}" for kind in ("events", "replay"))
        args = [
            *("bench.mock_engine", "--port", str(port), "--tokenizer", str(self.model)),
            *("--kv-events", events, "--kv-replay", replay, "--slowdown", str(SLOWDOWN)),
        ]
        engine = Process(args, port, self.folder / f"{name}.log", "/health")
        engine.start()
        self.engines.append(engine)
        url = f"http://127.0.0.1:{port}"
        self.workers.append({"id": name, "url": url, "kv_events": events, "kv_replay": replay})

    def gateway(self, name: str) -> Process:
        port = free_port()
        config = {
            "server": {"host": "127.0.0.1", "port": port},
            "index": {"backend": "redis", "url": self.valkey.url, "timeout_ms": 300},
            "pools": [
                {
                    "name": "chat",
                    "models": ["m"],
                    "engine": "vllm",
                    "tokenizer": str(self.model),
                    "workers": self.workers,
                }
            ],
        }
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        args = ["gateway", "serve", "--config", str(path)]
        gateway = Process(args, port, self.folder / f"{name}.log", "/health/ready")
        gateway.start()
        self.gateways.append(gateway)
        return gateway

    def computed_tokens(self) -> float:
        """Prompt tokens that the engines computed, not found in their caches."""
        total = 0.0
        for engine in self.engines:
            for kind, value in _COMPUTED.findall(httpx.get(engine.url + "/metrics").text):
                total += float(value) if kind == "prompt_tokens" else -float(value)
        return total


@pytest.fixture(scope="module")
def replicas(smollm2_dir: Path) -> Iterator[Replicas]:
    with tempfile.TemporaryDirectory(prefix="wl-replicas-") as name:
        folder = Path(name)
        valkey = Valkey(folder)
        valkey.start()
        found = Replicas(folder, smollm2_dir, valkey)
        try:
            for engine in ("e0", "e1"):
                found.engine(engine)
            for engine in found.engines:
                engine.wait_ready()
            for gateway in [found.gateway("a"), found.gateway("b")]:
                gateway.wait_ready()
            yield found
        finally:
            for process in (*found.gateways, *found.engines):
                process.stop()
            valkey.stop()


def body(text: str, question: str = "Which gate?", max_tokens: int = 4) -> dict[str, Any]:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "max_tokens": max_tokens, "stream": True}


def ask(gateway: Process, document: dict[str, Any]) -> int:
    """Send a request, read all of its answer and return the status."""
    url = f"{gateway.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=document, timeout=60) as answer:
        text = answer.read()
    assert answer.status_code != 200 or b"[DONE]" in text
    return answer.status_code


class Asking:
    """A request under way in a thread; its client does not mind how it ends."""

    def __init__(self, gateway: Process, document: dict[str, Any]) -> None:
        self._thread = threading.Thread(target=self._run, args=(gateway, document))
        self._thread.start()

    def _run(self, gateway: Process, document: dict[str, Any]) -> None:
        with contextlib.suppress(httpx.TransportError):
            ask(gateway, document)

    def join(self) -> None:
        self._thread.join(60)


def view(gateway: Process, text: str = "Nobody asks this.") -> dict[str, Any]:
    """How a gateway sees its workers, by way of explaining a request that is not sent."""
    found = httpx.post(f"{gateway.url}/admin/v1/explain", json=body(text), timeout=10)
    assert found.status_code == 200, found.text
    explained: dict[str, Any] = found.json()
    return explained


def in_flight(gateway: Process) -> int:
    return sum(c.get("in_flight", 0) for c in view(gateway)["input"]["candidates"])


def hears_others(gateway: Process) -> bool:
    return view(gateway)["state"]["load_age_s"] is not None


def test_what_one_gateway_has_in_flight_counts_at_the_other(replicas: Replicas) -> None:
    a, b = replicas.gateways[:2]
    wait_for(lambda: hears_others(a) and hears_others(b), "both are connected")

    asking = Asking(a, body(document("one"), max_tokens=8))

    wait_for(lambda: in_flight(b) == 1, "the other gateway sees it")
    asking.join()
    wait_for(lambda: in_flight(b) == 0, "and sees that it is over")


def test_siblings_follow_one_prefill_through_whichever_gateway_they_come(
    replicas: Replicas,
) -> None:
    text = document("siblings", rules=40)
    before = replicas.computed_tokens()
    a, b = replicas.gateways[:2]
    first = Asking(a, body(text, "first?"))
    wait_for(lambda: in_flight(b) == 1, "the other gateway sees the first")
    seen = view(b, text)
    with ThreadPoolExecutor(12) as pool:
        statuses = list(
            pool.map(lambda n: ask(replicas.gateways[n % 2], body(text, f"number {n}?")), range(12))
        )
    first.join()

    prompt_tokens = seen["prompt_tokens"]
    assert max(c["pending_tokens"] for c in seen["candidates"]) > prompt_tokens / 2
    assert set(statuses) == {200}
    # Thirteen questions about one document: at most two prefills of it, and every question's own.
    assert replicas.computed_tokens() - before < 2 * prompt_tokens + 13 * 48


def test_a_gateway_that_is_killed_takes_its_load_with_it(replicas: Replicas) -> None:
    b = replicas.gateways[1]
    late = replicas.gateway("late")
    late.wait_ready()
    asking = Asking(late, body(document("killed", rules=60), max_tokens=40))
    wait_for(lambda: in_flight(b) == 1, "a gateway that came later is heard")

    late.kill()
    replicas.gateways.remove(late)

    wait_for(lambda: in_flight(b) == 0, "what it had in flight counts no more")
    asking.join()


@pytest.mark.parametrize("fault", ["killed", "stands still"])
def test_without_redis_no_request_waits_or_fails_and_sharing_comes_back(
    fault: str, replicas: Replicas
) -> None:
    a, b = replicas.gateways[:2]
    valkey = replicas.valkey
    wait_for(lambda: hears_others(a) and hears_others(b), "both are connected")
    valkey.stop() if fault == "killed" else valkey.pause()
    # Nothing answers meanwhile, so a request that waited would wait for ever.
    statuses = [ask((a, b)[n % 2], body(document(f"{fault} {n}", rules=2))) for n in range(10)]
    wait_for(lambda: not hears_others(a), "the gateway knows that it is alone")
    valkey.start() if fault == "killed" else valkey.resume()

    assert set(statuses) == {200}
    wait_for(lambda: hears_others(a) and hears_others(b), "both are connected again")
    asking = Asking(a, body(document(f"{fault}, again"), max_tokens=8))
    wait_for(lambda: in_flight(b) == 1, "and share again")
    asking.join()
