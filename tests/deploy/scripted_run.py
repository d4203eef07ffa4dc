"""A short run of everything that dashboards show, and what its clients saw of it."""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.deploy.observed_fleet import TENANTS, ObservedFleet, key_of
from tests.e2e.fleet import document, wait_for

MARKER = "\0question\0"
# Of `document`: below 512 tokens, and well above.
SHORT_RULES, LONG_RULES = 10, 26
HURRY = {"x-request-timeout": "0.1"}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


@dataclass(frozen=True)
class Answer:
    """What a client saw of one request; nothing but the status if it failed."""

    tenant: str
    status: int
    total_s: float
    ttft_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Seen:
    """What came of one run.

    Attributes:
        answers: In the order in which they came.
        warm_computed_tokens: What warm-up said it computed.
        warm_hit_tokens: What a client found of it.
    """

    answers: list[Answer]
    warm_computed_tokens: int
    warm_hit_tokens: int


@dataclass
class Clients:
    """Ask through all gateways in turn, and remember the answers."""

    fleet: ObservedFleet
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._urls = itertools.cycle(gateway.url for gateway in self.fleet.gateways)
        self._tenants = itertools.cycle(TENANTS)
        self._client = httpx.Client(timeout=60)

    def close(self) -> None:
        self._client.close()

    def ask(
        self,
        system: str,
        question: Any = "Which gate is open?",
        *,
        stream: bool = True,
        headers: dict[str, str] | None = None,
        max_tokens: int = 8,
    ) -> Answer:
        tenant = next(self._tenants)
        body = {
            "model": "smollm2",
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
            ],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        sent = {"authorization": f"Bearer {key_of(tenant)}", **(headers or {})}
        url = f"{next(self._urls)}/v1/chat/completions"
        began_s = time.perf_counter()
        with self._client.stream("POST", url, json=body, headers=sent) as response:
            status = response.status_code
            if stream and status == 200:
                ttft_s, usage = _read(response, began_s)
            else:
                ttft_s, usage = None, json.loads(response.read()).get("usage") or {}
        answer = Answer(
            tenant,
            status,
            time.perf_counter() - began_s,
            ttft_s,
            usage.get("prompt_tokens", 0),
            usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
            usage.get("completion_tokens", 0),
        )
        self.answers.append(answer)
        return answer

    def at_once(self, systems: list[str]) -> None:
        with ThreadPoolExecutor(len(systems)) as pool:
            list(pool.map(self.ask, systems))


def _read(response: httpx.Response, began_s: float) -> tuple[float | None, dict[str, Any]]:
    """Return when the first token came, and the usage of the last chunk."""
    ttft_s, usage = None, {}
    for line in response.iter_lines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if ttft_s is None and any(it["delta"].get("content") for it in chunk["choices"]):
            ttft_s = time.perf_counter() - began_s
        usage = chunk.get("usage") or usage
    return ttft_s, usage


def run(clients: Clients, name: str, *, documents: int) -> Seen:
    """Do everything once: cold prompts, hits, evictions, restores, a warm-up, a missed deadline."""
    began = len(clients.answers)
    texts = [document(f"{name}{n}", LONG_RULES) for n in range(documents)]
    short = document(f"{name}-short", SHORT_RULES)
    for text in (short, *texts):
        clients.ask(text)
    clients.ask(short, "And which is closed?")
    # More than the pools hold by now: the first ones come back from the tiers below.
    for _ in range(2):
        for text in texts:
            clients.ask(text, "And which is closed?")
    # Begin like one and go on differently: part of it is there.
    clients.ask(texts[-1][: len(texts[-1]) // 3] + document(f"{name}-rest", 18))
    clients.ask(texts[-1][: len(texts[-1]) * 2 // 3] + document(f"{name}-tail", 8))
    clients.ask(short, "Any gate?", stream=False)
    # The hour at the top breaks the prefix of what follows.
    for minute in range(3):
        clients.ask(f"It is 2026-11-30 10:0{minute}:00.\n{document(name + '-dated', SHORT_RULES)}")
    # More at once than two workers start on.
    clients.at_once([document(f"{name}-crowd{n}", SHORT_RULES) for n in range(10)])
    for _ in clients.fleet.gateways:
        # A thousand tokens within a tenth of a second; a picture that no model here can see.
        late = clients.ask("Count.", stream=False, max_tokens=1000, headers=HURRY)
        assert late.status == 504, late
        clients.ask("Look.", [{"type": "image_url", "image_url": {"url": PICTURE}}])
    computed = _warm_up(clients.fleet, "warmed")
    warm = [clients.ask(document("warmed", SHORT_RULES)) for _ in clients.fleet.gateways]
    assert all(it.cached_tokens > 0 for it in warm), warm
    _lose_caches(clients.fleet)
    return Seen(clients.answers[began:], computed, sum(it.cached_tokens for it in warm))


def _warm_up(fleet: ObservedFleet, name: str) -> int:
    """Warm one document on both workers, twice; returns the tokens computed."""
    computed = 0
    body = {
        "model": "smollm2",
        "messages": [
            {"role": "system", "content": document(name, SHORT_RULES)},
            {"role": "user", "content": MARKER},
        ],
    }
    items = [{"id": name, "body": body, "marker": MARKER, "copies": 2}]
    for gateway in fleet.gateways:
        answer = httpx.post(
            f"{gateway.url}/admin/v1/warm", json={"model": "smollm2", "items": items}, timeout=60
        )
        events = [json.loads(line) for line in answer.text.splitlines() if line]
        assert events[-1]["event"] == "end", answer.text
        assert events[-1]["warm"] == 1, answer.text
        computed += events[-1]["computed_tokens"]
    return computed


def _lose_caches(fleet: ObservedFleet) -> None:
    """Both workers forget everything, and are filled again by the gateways."""
    before = fleet.counted("warmlane_warm_keep_runs_total")
    for worker in ("w0", "w1"):
        url = f"{fleet.gateways[0].url}/admin/v1/workers/{worker}/reset"
        answer = httpx.post(url, json={}, timeout=30)
        assert answer.status_code == 200, answer.text
    wait_for(
        lambda: fleet.counted("warmlane_warm_keep_runs_total") > before, "caches are filled again"
    )
