"""The gateway's own front: what it serves itself, what it hands over, and what it never keeps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.proxy.limits import Limits
from tests.fakes.engine import (
    DONE,
    FINISH,
    End,
    RawEngine,
    answer,
    content,
    openai_engine,
    stream,
)
from tests.fakes.gateway import Gateway, RawClient, chat, gateway, wire
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from gateway.proxy.server import Front

BODY = json.dumps(chat()).encode()
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: gw\r\n\r\n"


@asynccontextmanager
async def raw(*urls: str, limits: Limits | None = None) -> AsyncIterator[Gateway]:
    """A gateway whose front is its own."""
    async with gateway(*urls, limits=limits, front="raw") as gw:
        yield gw


async def answer_of(client: RawClient) -> tuple[int, dict[str, str], bytes]:
    """Read one answer with a content length."""
    async with asyncio.timeout(20):
        status, headers = await client.head()
        return status, headers, await client.reader.readexactly(int(headers["content-length"]))


async def test_inference_requests_stay_and_any_other_hands_the_connection_over_once() -> None:
    async with openai_engine() as engine, raw(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        kept = []
        for data in (wire(BODY), wire(BODY), MODELS, wire(BODY), MODELS):
            await client.send(data)
            assert (await answer_of(client))[0] == 200
            kept.append(gw.listener.num_raw_connections)
        await client.close()

    assert kept == [1, 1, 0, 0, 0]
    assert len(engine.seen) == 3


async def test_the_openai_client_lists_models_and_chats_on_one_connection() -> None:
    async with openai_engine() as engine, raw(engine.url) as gw:
        limits = httpx.Limits(max_connections=1)
        http = httpx.AsyncClient(limits=limits)
        client = openai.AsyncOpenAI(base_url=gw.url + "/v1", api_key="k", http_client=http)
        async with client, asyncio.timeout(10):
            messages: Any = [{"role": "user", "content": "q"}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=messages)
                assert answer.choices[0].message.content
                assert [model.id async for model in await client.models.list()] == ["m"]
                pieces = await client.chat.completions.create(
                    model="m", messages=messages, stream=True
                )
                assert [piece async for piece in pieces]


@pytest.mark.parametrize(
    ("begin", "status"),
    [
        pytest.param(b"POST", 408, id="in the method"),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1\r\nhost: g", 408, id="hot"),
        pytest.param(b"GET /v1/models HTTP/1.1\r\n", 408, id="not hot"),
    ],
)
async def test_a_head_that_does_not_end_times_out(begin: bytes, status: int) -> None:
    async with raw("http://127.0.0.1:9", limits=Limits(head_s=0.1)) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(begin)
        got, headers, body = await answer_of(client)
        assert (got, headers["connection"]) == (status, "close")
        assert json.loads(body)["error"]["type"] == "timeout_error"
        assert await client.rest() == b""
        await client.close()


async def test_a_head_that_trickles_in_gets_no_more_time() -> None:
    async with raw("http://127.0.0.1:9", limits=Limits(head_s=0.2)) as gw:
        client = await RawClient.connect(gw.port)
        reading = asyncio.create_task(answer_of(client))
        for byte in wire(BODY) * 10:
            if reading.done():
                break
            await client.send(bytes([byte]))
            await asyncio.sleep(0.01)
        status, _, _ = await reading
        await client.close()

    assert status == 408


@pytest.mark.parametrize("head", [b"POST /v1/chat/completions HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n"])
async def test_a_head_that_never_ends_is_refused_at_its_limit(head: bytes) -> None:
    limits = Limits(head_bytes=8 << 10)
    async with raw("http://127.0.0.1:9", limits=limits) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(head + b"a: b\r\n" * 2000)
        status, _, _ = await answer_of(client)
        await client.close()

    assert status in (400, 431)


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="tls hello"),
        pytest.param(b"\x00" * 20, id="zeros"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="http/2 preface"),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1\nhost: gw\n\n", id="LF only"),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1\r\nhost: gw\n", id="LF in a part"),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1", id="cut off", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
async def test_garbage_is_answered_in_shape_and_ends_the_connection(
    garbage: bytes, is_first: bool
) -> None:
    async with openai_engine() as engine, raw(engine.url, limits=Limits(head_s=0.1)) as gw:
        client = await RawClient.connect(gw.port)
        if not is_first:
            await client.send(wire(BODY))
            assert (await answer_of(client))[0] == 200
        await client.send(garbage)
        status, _, body = await answer_of(client)
        async with asyncio.timeout(20):
            assert await client.rest() == b""
        await client.close()

    assert status in (400, 408)
    assert json.loads(body)["error"]["message"]


async def test_requests_behind_one_that_ends_the_connection_are_not_served() -> None:
    async with openai_engine() as engine, raw(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(wire(BODY, "connection: close") + wire(BODY))
        assert (await answer_of(client))[0] == 200
        async with asyncio.timeout(20):
            assert await client.rest() == b""
        await client.close()

    assert len(engine.seen) == 1


async def test_a_refusal_can_be_read_by_a_client_that_goes_on_sending() -> None:
    length = 8 << 20
    async with raw("http://127.0.0.1:9", limits=Limits(body_bytes=1000)) as gw:
        client = await RawClient.connect(gw.port)
        client.writer.write(wire(b"", f"content-length: {length}") + b" " * length)
        status, headers, _ = await answer_of(client)
        await client.close()

    assert (status, headers["connection"]) == (413, "close")


async def test_a_client_that_pipelines_without_end_is_read_no_further() -> None:
    go_on = asyncio.Event()
    large = json.dumps(chat("x" * 100_000)).encode()
    async with RawEngine(lambda _: [go_on, *answer(b"{}")]) as engine, raw(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        client.writer.write(wire(large) * 300)
        await poll_until(lambda: len(engine.seen) == 1)
        sizes: list[int] = []

        def is_stuck() -> bool:
            sizes.append(client.writer.transport.get_write_buffer_size())
            return len(sizes) > 20 and len(set(sizes[-20:])) == 1

        await poll_until(is_stuck)
        go_on.set()
        # What waited is served all the same.
        for _ in range(300):
            assert (await answer_of(client))[0] == 200
        await client.close()

    assert sizes[-1] > len(large) * 100
    assert {seen.body for seen in engine.seen} == {large}


async def test_a_pipelining_client_that_leaves_frees_its_worker() -> None:
    async with RawEngine(lambda _: [End.HANG]) as engine, raw(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(wire(BODY) * 3)
        await poll_until(lambda: len(engine.seen) == 1)
        await client.close()
        await poll_until(lambda: engine.num_aborted == 1)
        await poll_until(lambda: gw.lifecycle.num_running == 0)

    assert len(engine.seen) == 1


async def test_a_client_that_reads_nothing_gets_no_second_answer_prepared() -> None:
    large = answer(b"x" * (16 << 20))
    async with RawEngine(lambda _: large) as engine, raw(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(wire(BODY) * 2)
        await poll_until(lambda: len(engine.seen) == 1)
        await asyncio.sleep(0.3)
        assert len(engine.seen) == 1
        for _ in range(2):
            assert len((await answer_of(client))[2]) == 16 << 20
        await client.close()

    assert len(engine.seen) == 2


async def test_a_known_head_is_not_taken_for_another() -> None:
    longer = json.dumps(chat("longer")).encode()
    requests = [
        wire(BODY, "x-a: 1"),
        wire(longer, "x-a: 1"),
        wire(longer, "x-a: 2"),
        wire(longer, "x-a: 2", path="/v1/completions"),
        wire(BODY, "x-a: 2", "x-request-id: mine"),
        wire(BODY, "x-a: 2"),
    ]
    async with openai_engine() as engine, raw(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        statuses = []
        for data in requests:
            await client.send(data)
            statuses.append((await answer_of(client))[0])
        await client.close()
    seen = engine.seen

    assert statuses == [200, 200, 200, 400, 200, 200]
    assert [each.headers["x-a"] for each in seen] == ["1", "1", "2", "2", "2"]
    assert [each.body for each in seen] == [BODY, longer, longer, BODY, BODY]
    ids = [each.headers["x-request-id"] for each in seen]
    assert ids[3] == "mine"
    assert len(set(ids)) == len(ids)


async def test_a_stream_goes_to_many_clients_at_once_and_leaves_nothing_behind() -> None:
    pieces = [content("a"), content("b"), FINISH, DONE]
    script = stream(pieces[0], 0.01, *pieces[1:])
    async with RawEngine(lambda _: script) as engine, raw(engine.url) as gw:
        posts = (gw.post(body=chat(str(i), stream=True)) for i in range(100))
        bodies = [body for _, body, _ in await asyncio.gather(*posts)]

    assert set(bodies) == {b"".join(pieces)}


def _chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    chunks = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return wire(chunks + b"0\r\nx-trailer: 1\r\n\r\n", "transfer-encoding: chunked")


SESSION = [
    (wire(BODY), 200),
    (_chunked(BODY, 7), 200),
    (wire(b"{"), 400),
    (wire(BODY, "x-request-id: a", "connection: keep-alive"), 200),
    (wire(json.dumps({"model": "m", "prompt": "p"}).encode(), path="/v1/completions"), 200),
    (_chunked(BODY, 1000), 200),
]


@contextmanager
def running(front: Front, limits: Limits | None = None) -> Iterator[tuple[asyncio.Runner, Gateway]]:
    """A gateway and its loop, for many examples."""
    with asyncio.Runner() as runner:
        engine = openai_engine()
        runner.run(engine.__aenter__())
        gw = gateway(engine.url, front=front, limits=limits)
        try:
            yield runner, runner.run(gw.__aenter__())
            runner.run(gw.__aexit__(None, None, None))
        finally:
            runner.run(engine.stop())


@pytest.mark.parametrize("front", ["aiohttp", "raw"], indirect=True)
def test_requests_cut_anywhere_are_answered_alike(front: Front) -> None:
    async def play(gw: Gateway, requests: list[tuple[bytes, int]], sizes: list[int]) -> list[int]:
        client = await RawClient.connect(gw.port)
        data = b"".join(request for request, _ in requests)
        reading = asyncio.create_task(statuses(client, len(requests)))
        at = 0
        for size in [*sizes, len(data)]:
            await client.send(data[at : at + size])
            at += size
            # Now and then the server gets to see just this much.
            await asyncio.sleep(0.001 if size % 3 else 0)
        async with asyncio.timeout(10):
            got = await reading
        await client.close()
        return got

    async def statuses(client: RawClient, count: int) -> list[int]:
        return [(await answer_of(client))[0] for _ in range(count)]

    with running(front) as (runner, gw):

        @settings(max_examples=60, deadline=None)
        @given(
            st.lists(st.sampled_from([*SESSION, (MODELS, 200)]), min_size=1, max_size=5),
            st.lists(st.integers(1, 300), max_size=12),
        )
        def cut(requests: list[tuple[bytes, int]], sizes: list[int]) -> None:
            expected = [status for _, status in requests]
            assert runner.run(play(gw, requests, sizes)) == expected

        cut()


def test_bytes_changed_anywhere_end_in_answers_in_shape_and_nothing_open() -> None:
    """Sixteen connections at a time: what they wait for is mostly a deadline."""
    session = wire(BODY, "x-a: b") + _chunked(BODY, 9)
    change = st.tuples(st.integers(0, len(session) - 1), st.integers(0, 2), st.binary(max_size=3))

    async def play(port: int, changes: list[tuple[int, int, bytes]]) -> list[int]:
        sent = bytearray(session)
        for at, removed, added in changes:
            sent[at : at + removed] = added
        client = await RawClient.connect(port)
        got = b""
        with contextlib.suppress(ConnectionError):
            await client.send(bytes(sent))
            async with asyncio.timeout(10):
                while data := await client.reader.read(1 << 16):
                    got += data
        await client.close()
        return [int(s) for s in re.findall(rb"^HTTP/1\.[01] (\d+)", got, re.MULTILINE)]

    async def play_all(gw: Gateway, all_changes: list[list[tuple[int, int, bytes]]]) -> None:
        plays = (play(gw.port, changes) for changes in all_changes)
        for statuses in await asyncio.gather(*plays):
            assert set(statuses) <= {200, 400, 404, 405, 408, 413, 415, 417}
        await poll_until(lambda: gw.listener.num_raw_connections == gw.lifecycle.num_running == 0)

    limits = Limits(head_s=0.1, body_s=0.1, idle_s=0.1, body_bytes=1000)
    with running("raw", limits) as (runner, gw):

        @settings(max_examples=20, deadline=None)
        @given(st.lists(st.lists(change, min_size=1, max_size=4), min_size=16, max_size=16))
        def changed(all_changes: list[list[tuple[int, int, bytes]]]) -> None:
            runner.run(play_all(gw, all_changes))

        changed()
