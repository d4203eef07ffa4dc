"""Sends the requests of ``warmlane bench`` and measures what a client sees of each."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.client import may_use_proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import httpx

    from gateway.bench.workload import Ask

# An answer may wait for a cold prefill behind a full queue; a connection may not.
ANSWER_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 200


@dataclass(slots=True)
class Answer:
    """What came of a request; None where nothing was told.

    Attributes:
        is_first: Whether it was the first about its document.
        error: Why it failed; empty = it did not.
        ttft_s: Until the first generated text.
        duration_s: Until the end of the answer.
        prompt_tokens: As the engine counted.
        cached_tokens: Of these, found in its cache.
        completion_tokens: Tokens generated.
        worker: Who answered, if a Warmlane gateway was asked.
    """

    is_first: bool
    error: str = ""
    ttft_s: float | None = None
    duration_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    worker: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Who is asked: base URL without ``/v1``, model, and the client's key, if it needs one."""

    base: str
    model: str
    key: str | None


def served_models(base: str, key: str | None) -> list[str]:
    """Return the models of a server.

    Raises:
        ConnectionError: If it does not say; the message tells why.
    """
    import httpx  # 0.4 s to import: only when the command runs

    try:
        with httpx.Client(**_options(base, key), timeout=CONNECT_TIMEOUT_S) as client:
            answer = client.get("/v1/models")
            answer.raise_for_status()
            return [str(card["id"]) for card in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConnectionError(f"{base}/v1/models: expected a list of models: {error}") from error


async def measure(
    target: Target,
    asks: Sequence[Ask],
    *,
    concurrency: int,
    max_tokens: int,
    done: Callable[[int], None],
) -> list[Answer]:
    """Send all requests, ``concurrency`` at a time, and return their answers in order.

    Args:
        target: Who is asked.
        asks: The requests.
        concurrency: Clients, each of which asks again once it has its answer.
        max_tokens: Tokens to generate.
        done: Told how many answers have come, after each.
    """
    import httpx

    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=concurrency)
    answers: list[Answer | None] = [None] * len(asks)
    waiting = iter(enumerate(asks))
    num_done = 0

    async def run_client() -> None:
        nonlocal num_done
        for at, ask in waiting:
            answers[at] = await _answered(client, target.model, ask, max_tokens)
            num_done += 1
            done(num_done)

    async with httpx.AsyncClient(
        **_options(target.base, target.key), timeout=timeout, limits=limits
    ) as client:
        await asyncio.gather(*(run_client() for _ in range(concurrency)))
    return [answer for answer in answers if answer is not None]


def _options(base: str, key: str | None) -> dict[str, Any]:
    headers = {"x-warmlane-explain": "1"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    return {"base_url": base, "headers": headers, "trust_env": may_use_proxy(base)}


async def _answered(client: httpx.AsyncClient, model: str, ask: Ask, max_tokens: int) -> Answer:
    import httpx

    answer = Answer(ask.is_first)
    start_s = time.monotonic()
    try:
        await _stream(client, model, ask, max_tokens, answer, start_s)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
    answer.duration_s = time.monotonic() - start_s
    if not answer.error and answer.ttft_s is None:
        answer.error = "the stream ended without text"
    return answer


async def _stream(
    client: httpx.AsyncClient,
    model: str,
    ask: Ask,
    max_tokens: int,
    answer: Answer,
    start_s: float,
) -> None:
    body = {
        "model": model,
        "messages": ask.messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        answer.worker = response.headers.get("x-warmlane-worker")
        if response.status_code != 200:
            text = (await response.aread()).decode("utf-8", "replace")
            answer.error = f"{response.status_code} {text}"[:_MAX_ERROR_CHARS]
            return
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                continue
            event = json.loads(line[5:])
            if "error" in event:
                answer.error = f"in the stream: {event['error']}"[:_MAX_ERROR_CHARS]
                return
            if answer.ttft_s is None and any(_texts(event)):
                answer.ttft_s = time.monotonic() - start_s
            _read_usage(event.get("usage") or {}, answer)


def _texts(event: dict[str, Any]) -> Iterator[object]:
    """Yield what was generated, thoughts as well."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        yield from (delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"))


def _read_usage(usage: dict[str, Any], answer: Answer) -> None:
    if not usage:
        return
    answer.prompt_tokens = usage.get("prompt_tokens")
    answer.completion_tokens = usage.get("completion_tokens")
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
