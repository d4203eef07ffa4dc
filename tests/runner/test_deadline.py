"""The time that whoever asks gives a request, ``x-request-timeout``, from its head to its end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.routing.pool import Pool
from runner.server import HttpServer, bind
from runner.service import Service
from runner.types import EngineRequest
from tests.fakes.gateway import gateway, worker
from tests.live_runner import LiveRunner
from tests.runner.fake_engine import ScriptedEngine
from tests.runner.serving import make_service, serving
from tests.support import poll_until

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
DEADLINE_S = 90.0


class TalkingEngine(ScriptedEngine):
    """Says tokens as soon as it is asked, and then nothing more unless it is the end."""

    def __init__(self, tokens: list[int], *, is_end: bool = False) -> None:
        super().__init__()
        self.tokens = tokens
        self.is_end = is_end

    def submit(self, request: EngineRequest) -> None:
        super().submit(request)
        if self.tokens:
            self.say(self.tokens, "length" if self.is_end else None)


async def asked(
    engine: ScriptedEngine, smollm2_dir: Path, given: str, **fields: Any
) -> tuple[httpx.Response, Service]:
    service = make_service(engine, smollm2_dir)
    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(
            CHAT, json=HI | fields, headers={"x-request-timeout": given}, timeout=DEADLINE_S
        )
        await poll_until(service.is_idle.is_set, what="the request is over")
        return answer, service


def is_late(error: dict[str, Any]) -> bool:
    return (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")


@pytest.mark.parametrize("given", ["", "0", "0.0", "-1", "nan", "inf", "1_0", "1e3", "soon", "0x1"])
async def test_what_is_no_positive_number_of_seconds_is_refused(
    smollm2_dir: Path, given: str
) -> None:
    engine = ScriptedEngine()
    answer, _ = await asked(engine, smollm2_dir, given)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_timeout")
    assert error["param"] == "x-request-timeout"
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_too_long_is_taken_back(smollm2_dir: Path, stream: bool) -> None:
    engine = ScriptedEngine()
    answer, service = await asked(engine, smollm2_dir, "0.25", stream=stream)
    assert answer.status_code == 504
    assert is_late(answer.json()["error"])
    assert answer.headers["x-should-retry"] == "false"
    assert all(aborted == (engine.requests[0].id, None) for aborted in engine.aborted)
    assert engine.aborted or not engine.requests
    if engine.requests:
        line = 'finished_reason="abort",model_name="smollm2"} 1.0'
        assert line in service.metrics.render().decode()


async def test_what_was_said_in_time_stays_and_the_stream_ends_with_the_reason(
    smollm2_dir: Path,
) -> None:
    engine = TalkingEngine([9690, 2260])
    answer, _ = await asked(engine, smollm2_dir, "3", stream=True)
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert "[DONE]" not in events
    assert is_late(json.loads(events[-1])["error"])
    assert any(json.loads(event)["choices"][0]["delta"].get("content") for event in events[:-1])
    assert (engine.requests[0].id, None) in engine.aborted


async def test_no_part_of_a_late_answer_is_given_as_if_it_were_whole(smollm2_dir: Path) -> None:
    engine = TalkingEngine([9690, 2260])
    answer, _ = await asked(engine, smollm2_dir, "1")
    assert answer.status_code == 504
    assert is_late(answer.json()["error"])


@pytest.mark.parametrize("stream", [False, True])
async def test_with_time_enough_nothing_is_different(smollm2_dir: Path, stream: bool) -> None:
    engine = TalkingEngine([9690, 2260], is_end=True)
    answer, _ = await asked(engine, smollm2_dir, "600.5", stream=stream)
    assert answer.status_code == 200
    assert engine.aborted == []
    # A timer that stays would hold the request's memory for those minutes.
    timers = [str(timer) for timer in asyncio.get_running_loop()._scheduled]  # type: ignore[attr-defined]
    assert not any("_expire" in timer and "cancelled" not in timer for timer in timers)


async def test_a_body_that_comes_too_late_starts_nothing(smollm2_dir: Path) -> None:
    engine = TalkingEngine([9690], is_end=True)
    service = make_service(engine, smollm2_dir)
    is_answered = asyncio.Event()

    async def upload() -> AsyncIterator[bytes]:
        yield json.dumps(HI).encode()[:10]
        await is_answered.wait()

    async with serving(service) as url, httpx.AsyncClient(base_url=url) as http:
        request = http.build_request(
            "POST", CHAT, content=upload(), headers={"x-request-timeout": "0.2"}
        )
        sending = asyncio.create_task(http.send(request))
        # The server has ended the request though its body never does.
        await poll_until(lambda: has_begun(service), what="the request has begun")
        await poll_until(service.is_idle.is_set, deadline_s=DEADLINE_S, what="it is over")
        is_answered.set()
        await asyncio.gather(sending, return_exceptions=True)
    assert engine.requests == []


def has_begun(service: Service) -> bool:
    return not service.is_idle.is_set() or service._num_in_flight > 0


async def test_a_client_that_does_not_read_keeps_no_engine_busy_beyond_its_time(
    smollm2_dir: Path,
) -> None:
    engine = TalkingEngine([9690] * 2_000)
    service = make_service(engine, smollm2_dir)
    body = json.dumps(HI | {"stream": True, "logprobs": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-request-timeout: 3\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    bound = bind("127.0.0.1", 0)
    # Buffers that take far less than is said.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = HttpServer(service, bound)
    await server.start()
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, bound.getsockname())
            await loop.sock_sendall(client, head.encode() + body)
            await poll_until(lambda: bool(engine.aborted), deadline_s=DEADLINE_S, what="the abort")
            assert engine.aborted[0] == (engine.requests[0].id, None)
            assert not service.is_idle.is_set()
        await poll_until(service.is_idle.is_set, deadline_s=DEADLINE_S, what="it is over")
    finally:
        await server.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_computes_no_further_and_its_blocks_are_free(
    live_runner: LiveRunner, stream: bool
) -> None:
    body = HI | {"max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": stream}
    # A stream that ended in an error closes its connection: each request has one of its own.
    limits = httpx.Limits(max_keepalive_connections=0)
    url = live_runner.url
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S, limits=limits) as http:

        async def is_idle() -> bool:
            blocks = (await http.get("/cache")).json()["tiers"]["gpu"]["blocks"]
            return bool(blocks["free"] + blocks["cached"] == blocks["total"])

        answer = await http.post(CHAT, json=body, headers={"x-request-timeout": "1"})
        assert "deadline_exceeded" in answer.text
        assert "[DONE]" not in answer.text
        await poll_until(is_idle, deadline_s=DEADLINE_S, what="its blocks are free")
        after = await http.post(CHAT, json=HI | {"max_tokens": 2})
        assert after.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_gateway_in_front_has_the_first_word_and_blames_nobody(
    smollm2_dir: Path, stream: bool
) -> None:
    engine = TalkingEngine([9690, 2260])
    body = HI | {"model": "smollm2", "stream": stream}
    async with serving(make_service(engine, smollm2_dir)) as url:
        pool = Pool("chat", models=["smollm2"], workers=[worker("w0", url)])
        async with gateway(pools=[pool]) as gw:
            _, answered, _ = await gw.post(body=body, headers={"x-request-timeout": "1"})
            assert b"deadline_exceeded" in answered
            await poll_until(lambda: bool(engine.aborted), what="the worker computes no more")
            assert (await gw.record()).outcome == "deadline"
            assert pool.workers["w0"].health.failures == 0
