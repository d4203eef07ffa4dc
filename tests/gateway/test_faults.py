"""Each way an engine or a client can fail, in each phase, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from gateway.proxy.limits import Limits
from tests.fakes.engine import (
    DONE,
    FINISH,
    LAST_CHUNK,
    ROLE,
    End,
    RawEngine,
    Script,
    Step,
    answer,
    chunk,
    content,
    event,
    head,
    openai_engine,
    stream,
)
from tests.fakes.faults import FaultProxy, Faults
from tests.fakes.gateway import RawClient, chat, gateway, wire
from tests.support import free_port, poll_until

TEXT = content("some text")
# How an engine stops, and whether that ends the connection.
STOPS = [
    pytest.param([0.03, End.FIN], id="fin"),
    pytest.param([0.03, End.RST], id="rst"),
    pytest.param([0.03, End.HALF_CLOSE, End.HANG], id="half close"),
]


def events_of(body: bytes) -> list[bytes]:
    """The events of a stream; every one must be whole."""
    assert body.endswith(b"\n\n")
    return [block + b"\n\n" for block in body.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("phase", ["before connect", "before first byte", "in the head"])
async def test_a_failure_before_the_first_byte_is_a_clean_error(
    phase: str, is_stream: bool
) -> None:
    script: Script = [b"HTTP/1.1 200 O", 0.03, End.RST] if phase == "in the head" else [End.RST]
    async with RawEngine(lambda _: script) as engine:
        url = f"http://127.0.0.1:{free_port()}" if phase == "before connect" else engine.url
        async with gateway(url) as gw:
            status, body, response = await gw.post(body=chat(stream=is_stream))
            record = await gw.record()

    assert (status, response.headers["content-type"]) == (502, "application/json")
    error = json.loads(body)["error"]
    assert error["code"] == "worker_unreachable"
    # Where workers are is no client's business.
    assert "127.0.0.1" not in error["message"]
    assert "connection refused" in error["message"] or phase != "before connect"
    assert response.headers["x-request-id"] == record.request_id
    expected = "connect_failed" if phase == "before connect" else "upstream_reset"
    assert (record.outcome, record.status) == (expected, 502)


@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize(
    "begin",
    [
        pytest.param([ROLE], id="after role"),
        pytest.param([ROLE, TEXT], id="after content"),
        pytest.param([ROLE, TEXT, TEXT[:30]], id="inside an event"),
        pytest.param([ROLE, TEXT, b"data: caf\xc3"], id="inside a character"),
        pytest.param([], id="after the head"),
    ],
)
async def test_a_stream_that_breaks_off_ends_in_an_error_event_and_no_marker(
    begin: list[bytes], how: list[Step]
) -> None:
    async with (
        RawEngine(lambda _: stream(*begin, *how, end=None)) as engine,
        gateway(engine.url, engine.url) as gw,
    ):
        status, body, _ = await gw.post(body=chat(stream=True))
        record = await gw.record()
        failures = sum(w.health.failures for w in gw.pools[0].workers.values())

    *passed, last = events_of(body)
    error = json.loads(last.removeprefix(b"data: "))["error"]
    whole = [piece for piece in begin if piece.endswith(b"\n\n")]
    assert (status, passed) == (200, whole)
    assert error["code"] == "stream_cut_off"
    assert error.keys() == {"message", "type", "param", "code"}
    assert b"[DONE]" not in body
    # Bytes had been sent: nothing was tried again.
    assert (record.outcome, record.attempts, len(engine.seen)) == ("truncated", 1, 1)
    assert failures == 1


@pytest.mark.parametrize(
    ("pieces", "outcome"),
    [
        pytest.param([ROLE, TEXT, FINISH, DONE], "ok", id="marker"),
        pytest.param([ROLE, TEXT, FINISH], "ok", id="finish reason without marker"),
        pytest.param([ROLE, TEXT], "truncated", id="neither"),
        pytest.param([ROLE, event(error={"message": "oom"}), DONE], "upstream_error", id="error"),
        pytest.param([event(error={"message": "oom"})], "upstream_error", id="error at once"),
    ],
)
@pytest.mark.parametrize("end", [LAST_CHUNK, End.FIN], ids=["last chunk", "fin"])
async def test_how_a_stream_that_ends_cleanly_counts(
    pieces: list[bytes], outcome: str, end: Step
) -> None:
    kind = "transfer-encoding: chunked" if end == LAST_CHUNK else "connection: close"
    body_ = [chunk(piece) if end == LAST_CHUNK else piece for piece in pieces]
    script: Script = [head(200, "content-type: text/event-stream", kind), *body_, end]
    async with (
        RawEngine(lambda _: script) as engine,
        gateway(engine.url) as gw,
        asyncio.timeout(20),
    ):
        _, body, _ = await gw.post(body=chat(stream=True))
        record = await gw.record()

    assert record.outcome == outcome
    if outcome == "truncated":
        assert events_of(body)[:-1] == pieces
        assert b"stream_cut_off" in events_of(body)[-1]
    else:
        assert body == b"".join(pieces)


async def test_a_reset_after_the_end_marker_is_no_failure() -> None:
    script = stream(ROLE, TEXT, FINISH, DONE, 0.03, End.RST, end=None)
    async with RawEngine(lambda _: script) as engine, gateway(engine.url) as gw:
        _, body, _ = await gw.post(body=chat(stream=True))
        record = await gw.record()

    assert body == ROLE + TEXT + FINISH + DONE
    assert record.outcome == "ok"


@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("framing", ["content-length: 100", "transfer-encoding: chunked"])
async def test_a_short_answer_that_breaks_off_is_a_clean_error(
    framing: str, how: list[Step]
) -> None:
    part = chunk(b'{"id":') if "chunked" in framing else b'{"id":'
    async with (
        RawEngine(lambda _: [head(200, framing) + part, *how]) as engine,
        gateway(engine.url, engine.url) as gw,
    ):
        status, body, _ = await gw.post()
        record = await gw.record()

    assert (status, json.loads(body)["error"]["code"]) == (502, "answer_cut_off")
    assert (record.outcome, record.attempts, len(engine.seen)) == ("truncated", 1, 1)


async def test_a_long_answer_that_breaks_off_breaks_off_at_the_client() -> None:
    script: Script = [head(200, f"content-length: {4 << 20}"), b"x" * (3 << 20), 0.05, End.RST]
    async with RawEngine(lambda _: script) as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat()).encode()))
        _, headers = await client.head()
        got = b""
        with contextlib.suppress(ConnectionError):
            got = await client.rest()
        await client.close()
        record = await gw.record()

    assert len(got) < int(headers["content-length"])
    assert record.outcome == "truncated"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        pytest.param([b"garbage\r\n\r\n"], id="not http"),
        pytest.param([b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 40_000], id="endless head"),
        pytest.param([head(200, "content-length: 1", "content-length: 2")], id="two lengths"),
    ],
)
async def test_an_answer_that_is_not_http_is_a_502(script: Script, is_stream: bool) -> None:
    async with (
        RawEngine(lambda _: [*script, End.HANG]) as engine,
        gateway(engine.url) as gw,
        asyncio.timeout(20),
    ):
        status, body, _ = await gw.post(body=chat(stream=is_stream))
        record = await gw.record()

    assert (status, json.loads(body)["error"]["code"]) == (502, "bad_answer")
    assert record.outcome == "upstream_error"


async def test_a_stream_whose_framing_breaks_ends_in_an_error_event() -> None:
    script: Script = [*stream(ROLE, TEXT, end=None), 0.03, b"zz\r\n", End.HANG]
    async with RawEngine(lambda _: script) as engine, gateway(engine.url) as gw:
        _, body, _ = await gw.post(body=chat(stream=True))

    assert events_of(body)[:-1] == [ROLE, TEXT]
    assert b"stream_cut_off" in events_of(body)[-1]


async def test_a_stream_that_never_ends_is_cut_at_the_request_limit() -> None:
    async with (
        RawEngine(lambda _: stream(TEXT, End.HANG)) as engine,
        gateway(engine.url, limits=Limits(request_s=1.5)) as gw,
    ):
        _, body, _ = await gw.post(body=chat(stream=True))
        await poll_until(lambda: engine.num_aborted == 1)

    assert b"took too long" in events_of(body)[-1]


@pytest.mark.parametrize("how", ["fin", "rst", "half close"])
@pytest.mark.parametrize(
    ("script", "is_stream"),
    [
        pytest.param([End.HANG], False, id="waiting for an answer"),
        pytest.param([head(200, "content-length: 9") + b"x", End.HANG], False, id="in the body"),
        pytest.param(stream(End.HANG), True, id="before the first token"),
        pytest.param(stream(ROLE, TEXT, End.HANG), True, id="mid stream"),
    ],
)
async def test_a_client_that_leaves_frees_its_worker_at_once(
    script: Script, is_stream: bool, how: str
) -> None:
    async with RawEngine(lambda _: script) as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat(stream=is_stream)).encode()))
        await poll_until(lambda: len(engine.seen) == 1)
        if TEXT in b"".join(step for step in script if isinstance(step, bytes)):
            await client.reader.readuntil(TEXT)
        assert gw.num_in_flight == 1
        match how:
            case "fin":
                client.writer.close()
            case "rst":
                await client.close()
            case _:
                client.writer.write_eof()
        await poll_until(lambda: engine.num_aborted == 1)
        await poll_until(lambda: gw.num_in_flight == 0)
        record = await gw.record()
        failures = gw.pools[0].workers["w0"].health.failures
        await client.close()

    assert (record.outcome, failures) == ("client_closed", 0)
    if not is_stream and script == [End.HANG]:
        assert record.status == 499


async def test_a_client_that_leaves_while_its_worker_is_being_connected() -> None:
    async with (
        openai_engine() as engine,
        FaultProxy(engine.port, Faults(blackhole=True)) as hole,
        gateway(hole.url) as gw,
    ):
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat()).encode()))
        await poll_until(lambda: gw.num_in_flight == 1)
        await client.close()
        await poll_until(lambda: gw.num_in_flight == 0)
        record = await gw.record()

    assert record.outcome == "client_closed"


async def test_a_client_that_leaves_in_the_middle_of_its_body_reaches_no_worker() -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(wire(b'{"model":', "content-length: 100"))
        await poll_until(lambda: gw.lifecycle.num_running == 1)
        await client.close()
        record = await gw.record()

    assert (record.outcome, record.status, engine.seen) == ("client_closed", 499, [])


async def test_a_client_that_leaves_after_its_answer_is_nothing() -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat()).encode()))
        _, headers = await client.head()
        await client.reader.readexactly(int(headers["content-length"]))
        await client.close()

        assert (await gw.post())[0] == 200
        assert [record.outcome for record in gw.records] == ["ok", "ok"]
        assert engine.num_connections == 1


async def test_an_idle_connection_that_the_engine_closes_costs_no_request() -> None:
    async with openai_engine(idle_close_s=0.03) as engine, gateway(engine.url) as gw:
        for pause_ms in range(20, 45, 2):
            assert (await gw.post())[0] == 200
            await asyncio.sleep(pause_ms / 1000)
        # None was lost and none ran twice.
        ids = [seen.headers["x-request-id"] for seen in engine.seen]
        assert sorted(ids) == sorted(record.request_id for record in gw.records)


async def test_a_slow_network_loses_nothing() -> None:
    async with (
        openai_engine(words=20) as engine,
        FaultProxy(engine.port, Faults(latency_s=0.02)) as slow,
        gateway(slow.url) as gw,
    ):
        answers = await asyncio.gather(*(gw.post(body=chat(stream=True)) for _ in range(10)))

    assert all(body.endswith(DONE) for _, body, _ in answers)


@pytest.mark.parametrize("after_bytes", [1, 50, 200, 400, 700])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_network_that_resets_anywhere_never_looks_like_success(
    after_bytes: int, is_stream: bool
) -> None:
    async with openai_engine(words=3) as engine:
        faults = Faults(latency_s=0.01, reset_after_bytes=after_bytes)
        async with FaultProxy(engine.port, faults) as proxy, gateway(proxy.url) as gw:
            status, body, _ = await gw.post(body=chat(stream=is_stream))
            record = await gw.record()

    if status == 200 and record.outcome == "ok":
        assert not is_stream or body.endswith(DONE)
        assert is_stream or json.loads(body)["choices"]
    elif status == 200:
        assert b'"error"' in events_of(body)[-1]
    else:
        assert (status, json.loads(body)["error"]["type"]) == (502, "api_error")


async def test_an_engine_error_never_reaches_the_next_request_on_the_same_connection() -> None:
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append(answer(b'{"error":{}}', 400))
        client = await RawClient.connect(gw.port)
        bodies = []
        for _ in range(2):
            await client.send(wire(json.dumps(chat()).encode()))
            status, headers = await client.head()
            bodies.append((status, await client.reader.readexactly(int(headers["content-length"]))))
        await client.close()

    assert bodies == [(400, b'{"error":{}}'), (200, b"{}")]
