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
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]

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


def settings_for(engine: RawEngine, **sections: Any) -> Any:
    pool = {"name": "chat", "models": ["m"], "workers": [{"id": "w0", "url": engine.url}]}
    flags: dict[Any, Any] = {("pools",): [pool]}
    for section, values in sections.items():
        flags |= {(section, name): value for name, value in values.items()}
    return load(None, flags=flags, environ={})[0]


async def test_with_an_admin_port_operators_have_no_way_in_on_the_client_port() -> None:
    admin_port = free_port()
    async with openai_engine() as engine, httpx.AsyncClient(timeout=10) as client:
        settings = settings_for(engine, server={"admin_port": admin_port, "host": "127.0.0.1"})
        gateway = Gateway(settings)
        await gateway.start()
        listener = await Listener.start(gateway.app, "127.0.0.1", 0)
        inside, outside = f"http://127.0.0.1:{admin_port}", f"http://127.0.0.1:{listener.port}"
        asked = await client.post(
            outside + "/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "hello"}]},
        )
        found = {
            path: [(await client.get(base + path)).status_code for base in (inside, outside)]
            for path in ("/metrics", "/admin/v1/workers", "/admin/v1/index", "/health/ready")
        }
        refused = [
            await client.request(method, inside + path)
            for method, path in (("GET", "/nowhere"), ("PUT", "/metrics"), ("GET", "/v1/models"))
        ]
        await listener.stop(1.0)
        await gateway.close()

    assert asked.status_code == 200
    assert found == {
        "/metrics": [200, 404],
        "/admin/v1/workers": [200, 404],
        "/admin/v1/index": [200, 404],
        "/health/ready": [200, 200],
    }
    assert [answer.status_code for answer in refused] == [404, 405, 404]
    assert [answer.json()["error"]["message"] for answer in refused] == [
        "No such path: GET /nowhere.",
        "Method not allowed: PUT /metrics.",
        "No such path: GET /v1/models; clients' paths are on server.port.",
    ]
    assert all(answer.headers["x-request-id"] for answer in refused)


async def test_gateways_that_share_redis_see_each_others_load(valkey: Valkey) -> None:
    async with openai_engine() as engine:
        index = {"backend": "redis", "url": valkey.url}
        gateways = [Gateway(settings_for(engine, index=index)) for _ in range(2)]
        for gateway in gateways:
            await gateway.start()
        books = gateways[0].fleet.pools[0].workers["w0"].books
        charge = books.charge(0.0, prompt_tokens=100, uncached_tokens=100)
        others = gateways[1].fleet.pools[0].others
        assert others is not None

        await poll_until(lambda: (found := others.of("w0")) is not None and found.in_flight == 1)
        books.finish(charge)
        await poll_until(lambda: (found := others.of("w0")) is None or not found.in_flight)
        for gateway in gateways:
            await gateway.close()


async def test_without_its_redis_a_gateway_starts_and_serves(valkey: Valkey) -> None:
    valkey.stop()
    async with openai_engine() as engine, httpx.AsyncClient(timeout=10) as client:
        gateway = Gateway(settings_for(engine, index={"backend": "redis", "url": valkey.url}))
        await gateway.start()
        listener = await Listener.start(gateway.app, "127.0.0.1", 0)
        answer = await client.post(
            f"http://127.0.0.1:{listener.port}/v1/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "hello"}]},
        )
        await listener.stop(1.0)
        await gateway.close()

    assert answer.status_code == 200
