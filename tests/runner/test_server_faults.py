"""What happens when engine or client misbehave, over real sockets with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from aiohttp import ClientConnectionResetError, web
from openai import APIError, AsyncOpenAI

from runner.service import Service
from tests.runner.fake_engine import ScriptedEngine
from tests.runner.serving import make_service, serving
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def service(engine: ScriptedEngine, smollm2_dir: Path) -> Service:
    return make_service(engine, smollm2_dir)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        yield http


def words(service: Service, text: str) -> list[int]:
    return service.prompts.tokenizer.encode(text)


async def submitted(engine: ScriptedEngine, count: int = 1) -> None:
    await poll_until(lambda: len(engine.requests) == count, what="requests in the engine")


def finished(service: Service, reason: str) -> bool:
    line = f'finished_reason="{reason}",model_name="smollm2"}} 1.0'
    return line in service.metrics.render().decode()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_error_before_the_first_token_is_a_json_error(
    http: httpx.AsyncClient, engine: ScriptedEngine, service: Service, stream: bool
) -> None:
    answer = asyncio.create_task(http.post("/v1/chat/completions", json=HI | {"stream": stream}))
    await submitted(engine)

    engine.say([], "error", error="out of memory")

    response = await answer
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["message"] == "generation failed: out of memory"
    assert finished(service, "error")


async def test_an_engine_error_in_mid_stream_is_an_event_and_no_done_follows(
    http: httpx.AsyncClient, engine: ScriptedEngine, service: Service
) -> None:
    async def speak() -> None:
        await submitted(engine)
        engine.say(words(service, "Hello there"))

    speaking = asyncio.create_task(speak())
    async with http.stream("POST", "/v1/chat/completions", json=HI | {"stream": True}) as answer:
        lines = answer.aiter_lines()
        events = [await anext(lines)]

        engine.say([], "error", error="out of memory")

        events += [line async for line in lines if line]
    await speaking
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_error"
    assert not any("[DONE]" in event for event in events)


async def test_the_openai_client_raises_on_an_error_in_mid_stream(
    http: httpx.AsyncClient, engine: ScriptedEngine, service: Service
) -> None:
    async with AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="-", max_retries=0) as client:
        opening = asyncio.create_task(
            client.chat.completions.create(model="smollm2", messages=HI["messages"], stream=True)
        )
        await submitted(engine)
        engine.say(words(service, "Hello"))
        stream = await opening
        engine.say([], "error", error="out of memory")

        with pytest.raises(APIError, match="out of memory"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_client_that_leaves_aborts_its_request(
    http: httpx.AsyncClient,
    engine: ScriptedEngine,
    service: Service,
    stream: bool,
    num_tokens: int,
) -> None:
    answer = asyncio.create_task(http.post("/v1/chat/completions", json=HI | {"stream": stream}))
    await submitted(engine)
    if num_tokens:
        engine.say(words(service, "a b c")[:num_tokens])

    answer.cancel()

    await poll_until(lambda: bool(engine.aborted), what="abort")
    assert engine.aborted == [(engine.requests[0].id, None)]
    await poll_until(lambda: finished(service, "abort"), what="abort counted")
    assert service.is_idle.is_set()


@pytest.mark.parametrize("at", ["prepare", "write", "write_eof"])
async def test_a_client_that_leaves_at_any_moment_of_a_stream_is_no_error(
    http: httpx.AsyncClient,
    engine: ScriptedEngine,
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    at: str,
) -> None:
    async def is_gone(*args: object) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    answer = asyncio.create_task(http.post("/v1/chat/completions", json=HI | {"stream": True}))
    await submitted(engine)
    monkeypatch.setattr(web.StreamResponse, at, is_gone)
    engine.say(words(service, "a b"), "length")

    await poll_until(service.is_idle.is_set, what="the request is over")
    answer.cancel()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_stop_string_aborts_only_its_own_sample(
    http: httpx.AsyncClient, engine: ScriptedEngine, service: Service
) -> None:
    body = HI | {"n": 2, "stop": ["STOP"]}
    answer = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    await submitted(engine)

    engine.say(words(service, "one STOP two"), index=0)
    engine.say(words(service, "three four"), "length", index=1)

    choices = (await answer).json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["one ", "three four"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
    assert [choice["stop_reason"] for choice in choices] == ["STOP", None]
    assert engine.aborted == [(engine.requests[0].id, 0)]


async def test_an_end_token_with_a_name_is_the_stop_reason(
    http: httpx.AsyncClient, engine: ScriptedEngine, service: Service
) -> None:
    ids = words(service, "well done")
    body = HI | {"stop_token_ids": [ids[-1]], "return_token_ids": True}
    answer = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    await submitted(engine)

    engine.say(ids, "stop")

    choice = (await answer).json()["choices"][0]
    assert choice["message"]["content"] == "well"
    assert (choice["stop_reason"], choice["token_ids"]) == (ids[-1], ids)


async def test_a_stream_shows_no_half_character(
    http: httpx.AsyncClient, engine: ScriptedEngine, service: Service
) -> None:
    answer = asyncio.create_task(http.post("/v1/chat/completions", json=HI | {"stream": True}))
    await submitted(engine)
    for token_id in words(service, "日本👩‍👩‍👧‍👦"):
        engine.say([token_id])
        await asyncio.sleep(0)
    engine.say([2], "stop")

    chunks = [
        json.loads(line[6:])
        for line in (await answer).text.splitlines()
        if line.startswith("data: {")
    ]

    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "日本👩‍👩‍👧‍👦"
    assert not any("\ufffd" in text for text in texts)


async def test_an_engine_that_cannot_take_a_request_is_a_500_without_inner_details(
    http: httpx.AsyncClient, engine: ScriptedEngine, service: Service
) -> None:
    engine.refusal = RuntimeError("secret detail")

    response = await http.post("/v1/chat/completions", json=HI)

    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"]
    assert service.is_idle.is_set()


async def test_with_an_engine_past_help_the_runner_is_not_healthy_and_refuses_requests(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.failure = "the engine has ended"
    for answer in (await http.get("/health"), await http.post("/v1/chat/completions", json=HI)):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert "has ended" in answer.json()["error"]["message"]
    assert not engine.requests

    engine.failure = None
    assert (await http.get("/health")).status_code == 200


async def test_while_draining_new_requests_are_refused_and_running_ones_finish(
    engine: ScriptedEngine, service: Service, http: httpx.AsyncClient
) -> None:
    answer = asyncio.create_task(http.post("/v1/chat/completions", json=HI))
    await submitted(engine)
    service.is_draining = True

    health, refused = await http.get("/health"), await http.post("/v1/chat/completions", json=HI)
    assert (health.status_code, refused.status_code) == (503, 503)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert not service.is_idle.is_set()

    engine.say(words(service, "done"), "length")

    assert (await answer).json()["choices"][0]["message"]["content"] == "done"
    await asyncio.wait_for(service.is_idle.wait(), 5)
