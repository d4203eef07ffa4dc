"""The demo's client: sends the workload over HTTP and measures what a user would see."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from gateway.demo.fleet import MODEL, DemoError
from gateway.demo.report import Row
from gateway.demo.workload import FOLLOW_UP, MAX_TOKENS, WORKLOAD, Ask, messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

ANSWER_DEADLINE_S = 120.0


def run_workload(base: str) -> list[Row]:
    """Send the workload to the gateway at ``base``, one request after the other."""
    import httpx  # 0.4 s to import: only when the demo runs

    with httpx.Client(base_url=base, timeout=ANSWER_DEADLINE_S) as client:
        rows = [_ask(client, ask, []) for ask in WORKLOAD]
        first = next(row for row in rows if row.ask.document == FOLLOW_UP.document)
        rows.append(_ask(client, FOLLOW_UP, [(first.ask.question, first.answer)]))
    return rows


def _ask(client: httpx.Client, ask: Ask, answered: list[tuple[str, str]]) -> Row:
    body = {
        "model": MODEL,
        "messages": messages(ask, answered),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.monotonic()
    ttft_s: float | None = None
    answer: list[str] = []
    usage: dict[str, Any] = {}
    headers = {"x-warmlane-explain": "1"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            raise DemoError(f"{ask.label}: {response.status_code} {response.read().decode()[:300]}")
        for event in _events(response.iter_lines()):
            if "error" in event:
                raise DemoError(f"{ask.label}: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    ttft_s = ttft_s or time.monotonic() - start
                    answer.append(text)
        sent = response.headers
    return Row(
        ask=ask,
        worker=sent["x-warmlane-worker"],
        prompt_tokens=usage["prompt_tokens"],
        predicted_hit_tokens=int(sent["x-warmlane-hit-tokens"]),
        observed_hit_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        ttft_s=ttft_s or time.monotonic() - start,
        answer="".join(answer),
    )


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: ") :])
