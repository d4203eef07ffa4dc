"""The assembled gateway: what is configured is what the client port does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from tests.fakes.engine import RawEngine, openai_engine

BILLING = "x-anthropic-billing-header: cc_version=2.1.99.a1b; cc_entrypoint=cli; cch=%s;"
RULES = ["stable-tools", "attribution-header", "volatile-tail"]


def coding_agent(nonce: str) -> dict[str, Any]:
    """A request of a coding agent: a billing line of its own before a long shared text."""
    system = [
        {"type": "text", "text": BILLING % nonce},
        {"type": "text", "text": "You are a coding agent. " + "Rule: read before you write. " * 60},
    ]
    return {
        "model": "m",
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "list files"},
        ],
        "seed": 9007199254740993,
    }


class Serving:
    """A gateway on a port of its own in front of one mock engine."""

    def __init__(self, url: str, engine: RawEngine) -> None:
        self.url = url
        self.engine = engine

    @property
    def bodies(self) -> list[bytes]:
        """Bodies of the inference requests that reached the engine."""
        return [seen.body for seen in self.engine.seen if seen.method == "POST"]

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(timeout=10) as client:
            return await client.post(self.url + path, json=body)


@pytest.fixture(params=["aiohttp", "raw"])
async def serving(
    request: pytest.FixtureRequest, smollm2_dir: Path, mode: str
) -> AsyncIterator[Serving]:
    async with openai_engine() as engine:
        pool = {
            "name": "chat",
            "models": ["m"],
            "engine": "openai",
            "tokenizer": str(smollm2_dir),
            "workers": [{"id": "w0", "url": engine.url}],
            "canonicalize": {"mode": mode, "rules": RULES},
        }
        settings, _ = load(None, flags={("pools",): [pool]}, environ={})
        gateway = Gateway(settings)
        await gateway.fleet.start()
        listener = await Listener.start(gateway.app, "127.0.0.1", 0, front=request.param)
        yield Serving(f"http://127.0.0.1:{listener.port}", engine)
        await listener.stop(1.0)
        await gateway.close()


@pytest.mark.parametrize("mode", ["rewrite"])
async def test_a_billing_line_is_lifted_and_the_answer_says_so(serving: Serving) -> None:
    first = await serving.post("/v1/chat/completions", coding_agent("1a2b3"))
    second = await serving.post("/v1/chat/completions", coding_agent("9f8e7"))

    assert [first.status_code, second.status_code] == [200, 200]
    assert second.headers["x-warmlane-canonicalized"] == "attribution-header"
    sent = serving.bodies
    assert sent[0] == sent[1]
    assert b"x-anthropic-billing-header" not in sent[0]
    assert b"9007199254740993" in sent[0]


@pytest.mark.parametrize("mode", ["off", "observe"])
async def test_without_rewrite_the_bytes_stay_and_no_header_is_sent(serving: Serving) -> None:
    answer = await serving.post("/v1/chat/completions", coding_agent("1a2b3"))

    assert "x-warmlane-canonicalized" not in answer.headers
    assert b"cch=1a2b3" in serving.bodies[-1]


@pytest.mark.parametrize("mode", ["observe"])
async def test_explain_reports_every_rule_without_sending(serving: Serving) -> None:
    before = len(serving.bodies)

    explained = (await serving.post("/admin/v1/explain", coding_agent("1a2b3"))).json()

    report = {entry["rule"]: entry for entry in explained["canonicalization"]}
    assert set(report) == set(RULES)
    assert report["attribution-header"]["applied"] is False
    assert len(serving.bodies) == before
    assert {"system", "current"} <= {segment["kind"] for segment in explained["segments"]}


@pytest.mark.parametrize("mode", ["observe"])
async def test_misses_and_tokenize_are_there(serving: Serving) -> None:
    await serving.post("/v1/chat/completions", coding_agent("1a2b3"))
    async with httpx.AsyncClient(timeout=10) as client:
        misses = await client.get(serving.url + "/admin/v1/misses")
        metrics = await client.get(serving.url + "/metrics")
    tokens = await serving.post("/tokenize", {"model": "m", "prompt": "hello there"})

    assert misses.status_code == 200
    assert "causes" in misses.json()
    assert metrics.status_code == 200
    assert tokens.json()["count"] == len(tokens.json()["tokens"]) > 0
