"""Every bound on what a client may send, and on how long either side may take, on both fronts."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from gateway.proxy.limits import Limits
from tests.fakes.engine import End, RawEngine, content, head, openai_engine, stream
from tests.fakes.engine import answer as served
from tests.fakes.gateway import CHAT, Gateway, RawClient, chat, gateway, wire
from tests.support import poll_until

BODY = json.dumps(chat()).encode()
NOBODY = "http://127.0.0.1:9"


async def answer(client: RawClient) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(20):
        status, headers = await client.head()
        return status, headers, await client.reader.readexactly(int(headers["content-length"]))


async def refusal(
    gw: Gateway, *pieces: bytes, pause_s: float = 0.0, ends: bool = True
) -> tuple[int, str]:
    """Send pieces until an answer comes: its status and kind; the connection ends behind it."""
    client = await RawClient.connect(gw.port)
    reading = asyncio.create_task(answer(client))
    for piece in pieces:
        if reading.done():
            break
        await client.send(piece)
        await asyncio.sleep(pause_s)
    status, headers, body = await reading
    if ends:
        async with asyncio.timeout(20):
            assert await client.rest() == b""
    await client.close()
    assert headers["x-request-id"]
    return status, json.loads(body)["error"]["type"]


STARTS = {
    "in the method": b"POS",
    "in the target": b"POST /v1/chat",
    "in a header": b"POST /v1/chat/completions HTTP/1.1\r\nhost: g",
    "before the empty line": b"POST /v1/chat/completions HTTP/1.1\r\nhost: gw\r\n",
    "another path": b"GET /v1/models HTTP/1.1\r\nhost: gw\r\n",
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
async def test_a_head_that_does_not_end_is_refused_in_time(start: bytes, is_first: bool) -> None:
    async with openai_engine() as engine, gateway(engine.url, limits=Limits(head_s=0.2)) as gw:
        client = await RawClient.connect(gw.port)
        if not is_first:
            await client.send(wire(BODY))
            assert (await answer(client))[0] == 200
        await client.send(start)
        status, _, body = await answer(client)
        async with asyncio.timeout(20):
            assert await client.rest() == b""
        await client.close()

    assert (status, json.loads(body)["error"]["type"]) == (408, "timeout_error")


async def test_a_head_that_trickles_in_gets_no_more_time() -> None:
    async with gateway(NOBODY, limits=Limits(head_s=0.2)) as gw:
        pieces = [bytes([byte]) for byte in wire(BODY)[:150]]
        assert await refusal(gw, *pieces, pause_s=0.01) == (408, "timeout_error")


@pytest.mark.parametrize("framing", ["content-length: 100", "transfer-encoding: chunked"])
async def test_a_body_that_trickles_in_gets_no_more_time(framing: str) -> None:
    is_sized = framing.startswith("content")
    pieces = [b" " if is_sized else b"1\r\n \r\n"] * 99
    async with openai_engine() as engine, gateway(engine.url, limits=Limits(body_s=0.2)) as gw:
        got = await refusal(gw, wire(b"", framing), *pieces, pause_s=0.01)

    assert got == (408, "timeout_error")
    assert engine.num_connections == 0


@pytest.mark.parametrize("is_used", [False, True], ids=["never used", "used"])
async def test_an_idle_connection_is_closed_without_a_word(is_used: bool) -> None:
    async with openai_engine() as engine, gateway(engine.url, limits=Limits(idle_s=1.0)) as gw:
        client = await RawClient.connect(gw.port)
        if is_used:
            await client.send(wire(BODY))
            assert (await answer(client))[0] == 200
        async with asyncio.timeout(20):
            assert await client.rest() == b""
        await client.close()


@pytest.mark.parametrize(
    ("lines", "statuses"),
    [
        pytest.param([f"x-{i}: 1" for i in range(30)], {400, 431}, id="too many"),
        pytest.param([f"x-{i}: {'v' * 900}" for i in range(9)], {431}, id="too much together"),
        pytest.param(["x-a: " + "v" * 9000], {400, 431}, id="one too long"),
    ],
)
async def test_heads_beyond_their_limits_are_refused(lines: list[str], statuses: set[int]) -> None:
    limits = Limits(head_bytes=8 << 10, headers=20)
    async with openai_engine() as engine, gateway(engine.url, limits=limits) as gw:
        status, kind = await refusal(gw, wire(BODY, *lines), ends=False)

    assert status in statuses
    assert kind == "invalid_request_error"
    assert engine.num_connections == 0


async def test_a_head_within_its_limits_passes_whole() -> None:
    limits = Limits(head_bytes=8 << 10, headers=20)
    lines = [f"x-{i}: {'v' * 400}" for i in range(15)]
    async with openai_engine() as engine, gateway(engine.url, limits=limits) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(wire(BODY, *lines))
        assert (await answer(client))[0] == 200
        await client.close()

    assert engine.seen[0].headers["x-14"] == "v" * 400


@pytest.mark.parametrize("length", [999, 1000, 1001])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["sized", "chunked"])
async def test_a_body_may_be_as_long_as_its_limit_and_no_longer(
    length: int, is_chunked: bool
) -> None:
    body = BODY + b" " * (length - len(BODY))
    data = wire(body)
    if is_chunked:
        data = wire(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), "transfer-encoding: chunked")
    async with openai_engine() as engine, gateway(engine.url, limits=Limits(body_bytes=1000)) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(data)
        status, _, _ = await answer(client)
        await client.close()
        record = await gw.record()

    assert status == record.status == (413 if length > 1000 else 200)
    assert len(engine.seen) == (length <= 1000)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_worker_that_does_not_begin_is_cut_at_the_first_byte_limit(
    is_stream: bool,
) -> None:
    async with (
        RawEngine(lambda _: [End.HANG]) as engine,
        gateway(engine.url, engine.url, limits=Limits(first_byte_s=0.2)) as gw,
    ):
        status, body, _ = await gw.post(body=chat(stream=is_stream))
        await poll_until(lambda: engine.num_aborted == 1)

    # A long prefill is not a dead worker: nobody else is asked.
    assert (status, json.loads(body)["error"]["type"]) == (504, "timeout_error")
    assert len(engine.seen) == 1


async def test_an_answer_that_never_ends_is_cut_at_the_request_limit() -> None:
    async with (
        RawEngine(lambda _: [head(200, "content-length: 9"), b"{", End.HANG]) as engine,
        gateway(engine.url, limits=Limits(request_s=0.3)) as gw,
    ):
        status, _, _ = await gw.post()
        await poll_until(lambda: engine.num_aborted == 1)

    assert status in (502, 504)


async def test_a_client_that_stops_reading_is_given_up_at_the_request_limit() -> None:
    big = content("x" * 60_000)
    script = stream(*[big] * 300, End.HANG)
    async with (
        RawEngine(lambda _: script) as engine,
        gateway(engine.url, limits=Limits(request_s=2.0)) as gw,
    ):
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat(stream=True)).encode()))
        await poll_until(lambda: gw.lifecycle.num_running == 1)
        # Nothing is read: what the kernel and the gateway hold fills up, then the time runs out.
        await poll_until(lambda: gw.lifecycle.num_running == 0)
        upstream = gw.pools[0].workers["w0"].upstream
        assert upstream is not None
        await poll_until(lambda: upstream.num_connections == 0)
        await client.close()


async def test_minutes_of_silence_are_waited_for_and_peers_are_probed() -> None:
    """Scaled down: two seconds of silence, with every other limit far below it."""
    limits = Limits(head_s=0.5, body_s=0.5, idle_s=0.5, first_byte_s=60, request_s=60)
    silent = stream(2.0, content("a", "stop"))
    async with RawEngine(lambda _: silent) as engine, gateway(engine.url, limits=limits) as gw:
        started_s = time.monotonic()
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat(stream=True)).encode()))
        async with asyncio.timeout(20):
            assert (await client.head())[0] == 200
            await client.reader.readuntil(b'"a"')
        await client.close()
        # Half-open peers are found by the kernel, on both sides.
        upstream = gw.pools[0].workers["w0"].upstream
        assert upstream is not None
        options = [
            connection._transport.get_extra_info("socket").getsockopt(  # type: ignore[union-attr]
                socket.SOL_SOCKET, socket.SO_KEEPALIVE
            )
            for connection in upstream._open
        ]

    assert time.monotonic() - started_s > 1.9
    assert all(options)


async def test_ipv6_clients_are_served() -> None:
    async with openai_engine() as engine, gateway(engine.url, host="::1") as gw:
        client = await RawClient.connect(gw.port, "::1")
        for data in (wire(BODY), f"GET {CHAT} HTTP/1.1\r\nhost: gw\r\n\r\n".encode()):
            await client.send(data)
            status, _, _ = await answer(client)
            assert status == (200 if data.startswith(b"POST") else 405)
        await client.close()


async def test_a_slow_reader_never_grows_what_is_held_for_it() -> None:
    """A flood from the worker, half a megabyte at a time to the client: what lies in between."""
    big = content("x" * 60_000)
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append(stream(*[big] * 400, content("", "stop")))
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat(stream=True)).encode()))
        upstream = gw.pools[0].workers["w0"].upstream
        assert upstream is not None
        got, most = 0, 0
        while got < 400 * len(big):
            data = await client.reader.read(1 << 19)
            assert data
            got += len(data)
            await asyncio.sleep(0.005)
            for connection in upstream._open:
                response = connection._response
                most = max(most, 0 if response is None else response.buffered_bytes)
        await client.close()

    assert most <= 1 << 20


async def test_a_client_that_floods_a_busy_connection_is_read_no_further() -> None:
    go_on = asyncio.Event()
    async with RawEngine(lambda _: [go_on, *served(b"{}")]) as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        client.writer.write(wire(BODY))
        await poll_until(lambda: len(engine.seen) == 1)
        client.writer.write(wire(b"x" * (24 << 20)))
        sizes: list[int] = []

        def is_stuck() -> bool:
            sizes.append(client.writer.transport.get_write_buffer_size())
            return len(sizes) > 30 and len(set(sizes[-30:])) == 1

        await poll_until(is_stuck)
        go_on.set()
        assert (await answer(client))[0] == 200
        # The flood is a request like another once it is its turn, though not a good one.
        assert (await answer(client))[0] == 400
        await client.close()

    # What the kernel holds on both sides is some megabytes; the rest was not taken.
    assert sizes[-1] > 8 << 20


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings"])
async def test_every_inference_path_is_served_where_its_connection_came_in(
    path: str, front: str
) -> None:
    body = {"model": "m", "max_tokens": 1, "input": "q", "messages": chat()["messages"]}
    async with openai_engine() as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        for _ in range(2):
            await client.send(wire(json.dumps(body).encode(), path=path))
            await answer(client)
            assert gw.listener.num_raw_connections == (front == "raw")
        await client.close()
