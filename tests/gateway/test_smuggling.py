"""Requests that two parties could read two ways: refused, never forwarded, the connection ended."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from tests.fakes.engine import End, RawEngine, openai_engine
from tests.fakes.gateway import CHAT, RawClient, chat, gateway, wire
from tests.support import poll_until

BODY = json.dumps(chat()).encode()
# What would be served if the end of the request before it were misread.
SECOND = wire(BODY, "x-request-id: smuggled")
START = f"POST {CHAT} HTTP/1.1\r\nhost: gw\r\n".encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def sized(*lines: bytes, start: bytes = START) -> bytes:
    """A request whose head has ``lines`` as they are, with a length."""
    return start + b"".join(lines) + LENGTH + b"\r\n" + BODY


def framed(*lines: bytes, body: bytes = BODY) -> bytes:
    """A request whose framing headers are ``lines``."""
    return START + b"".join(lines) + b"\r\n" + body


async def answers(port: int, data: bytes) -> tuple[list[int], bytes]:
    """Send bytes and read to the end: the statuses of all answers, and everything."""
    client = await RawClient.connect(port)
    async with asyncio.timeout(10):
        await client.send(data)
        got = await client.rest()
    await client.close()
    return [int(status) for status in re.findall(rb"^HTTP/1\.[01] (\d+)", got, re.MULTILINE)], got


LINES = {
    "bare LF after a header": sized(b"x-a: b\n"),
    "bare LF hides a header": sized(b"x-a: b\ntransfer-encoding: chunked\r\n"),
    "bare CR": sized(b"x-a: b\rx-c: d\r\n"),
    "folded line": sized(b"x-a: b\r\n c\r\n"),
    "folded line with tab": sized(b"x-a: b\r\n\tc\r\n"),
    "NUL in a value": sized(b"x-a: b\0c\r\n"),
    "NUL in a name": sized(b"x\0a: b\r\n"),
    "control character": sized(b"x-a: \x01\r\n"),
    "space before the colon": sized(b"x-a : b\r\n"),
    "empty name": sized(b": b\r\n"),
    "name that is no token": sized(b"x(a): b\r\n"),
    "name not in ASCII": sized("x-é: b\r\n".encode()),
    "no colon": sized(b"x-a\r\n"),
    "space before the first header": sized(
        b"", start=START.replace(b"host: gw", b" x-a: b\r\nhost: gw")
    ),
    "two hosts": sized(b"host: other\r\n"),
    "no host": sized(start=START.replace(b"host: gw\r\n", b"")),
}
FRAMINGS = {
    "two equal lengths": framed(LENGTH, LENGTH),
    "two lengths": framed(LENGTH, b"content-length: 5\r\n"),
    "list of lengths": framed(LENGTH.replace(b"\r\n", b", %d\r\n" % len(BODY))),
    "signed length": framed(b"content-length: +%d\r\n" % len(BODY)),
    "negative length": framed(b"content-length: -1\r\n"),
    "hexadecimal length": framed(b"content-length: 0x10\r\n"),
    "length with underscore": framed(b"content-length: 1_0\r\n"),
    "length with a space": framed(b"content-length: 1 0\r\n"),
    "length beyond 64 bits": framed(b"content-length: 99999999999999999999999\r\n"),
    "length and chunked": framed(LENGTH, CHUNKED, body=CHUNKS),
    "chunked and length": framed(CHUNKED, LENGTH, body=CHUNKS),
    "chunked twice": framed(CHUNKED, CHUNKED, body=CHUNKS),
    "chunked not last": framed(b"transfer-encoding: chunked, gzip\r\n", body=CHUNKS),
    "identity coding": framed(b"transfer-encoding: identity\r\n", body=CHUNKS),
    "unknown coding": framed(b"transfer-encoding: xchunked\r\n", body=CHUNKS),
    "coding with vertical tab": framed(b"transfer-encoding: \x0bchunked\r\n", body=CHUNKS),
    "coding with space before the colon": framed(b"transfer-encoding : chunked\r\n", body=CHUNKS),
}
CHUNKINGS = {
    "chunk size is no number": b"zz\r\n",
    "empty chunk size": b"\r\n",
    "signed chunk size": b"+5\r\nhello\r\n0\r\n\r\n",
    "chunk size with prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
    "chunk size beyond 64 bits": b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "chunk longer than its size": b"5\r\nhello world\r\n0\r\n\r\n",
    "bare LF after a size": b"5\nhello\r\n0\r\n\r\n",
    "bare LF after a chunk": b"5\r\nhello\n0\r\n\r\n",
}


@pytest.mark.parametrize("data", LINES.values(), ids=LINES)
async def test_a_head_with_a_doubtful_line_is_refused(data: bytes) -> None:
    await assert_refused(data)


@pytest.mark.parametrize("data", FRAMINGS.values(), ids=FRAMINGS)
async def test_a_doubtful_length_is_refused(data: bytes) -> None:
    await assert_refused(data)


@pytest.mark.parametrize("body", CHUNKINGS.values(), ids=CHUNKINGS)
async def test_a_doubtful_chunk_is_refused(body: bytes) -> None:
    await assert_refused(framed(CHUNKED, body=body))


TRAILERS = {
    "chunk goes on": b"2\r\n{}x\r\n",
    "no colon": b"2\r\n{}\r\n0\r\nx\r\n\r\n",
    "trailer name not in ASCII": b"2\r\n{}\r\n0\r\ny\xcf: 1\r\n\r\n",
    "trailer name empty": b"2\r\n{}\r\n0\r\n: 1\r\n\r\n",
    "NUL in a trailer": b"2\r\n{}\r\n0\r\ny: \x00\r\n\r\n",
    "bare LF in a trailer": b"2\r\n{}\r\n0\r\ny: 1\n\r\n",
    "a trailer with a length": b"2\r\n{}\r\n0\r\ncontent-length: 5\r\n\r\n",
}


@pytest.mark.parametrize(
    ("body", "at"),
    [(body, 0) for body in CHUNKINGS.values()]
    + [(body, at) for body in TRAILERS.values() for at in (0, 4)],
)
async def test_what_is_broken_behind_the_head_is_refused_at_once(body: bytes, at: int) -> None:
    """The client waits: it is not left until its body is late."""
    async with openai_engine() as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(framed(CHUNKED, body=body[:at]))
        await poll_until(lambda: gw.lifecycle.num_running == 1)
        async with asyncio.timeout(20):
            await client.send(body[at:] + SECOND)
            got = await client.rest()
        await client.close()

    assert re.findall(rb"HTTP/1\.[01] (\d+)", got) == [b"400"]
    assert engine.seen == []


async def assert_refused(data: bytes) -> None:
    """One 400 in shape, the end of the connection, and nothing for any worker."""
    async with openai_engine() as engine, gateway(engine.url) as gw:
        statuses, got = await answers(gw.port, data + SECOND)
        await poll_until(lambda: gw.lifecycle.num_running == 0)

    assert statuses == [400]
    assert got.startswith(b"HTTP/1.0") or b"connection: close" in got.lower()
    assert json.loads(got.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"
    assert engine.seen == []


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([b"connection: upgrade\r\n", b"upgrade: h2c\r\n"], id="h2c"),
        pytest.param([b"connection: Upgrade\r\n", b"upgrade: websocket\r\n"], id="websocket"),
    ],
)
async def test_an_upgrade_is_ignored(lines: list[bytes]) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        for _ in range(2):
            await client.send(sized(*lines))
            async with asyncio.timeout(20):
                status, headers = await client.head()
                await client.reader.readexactly(int(headers["content-length"]))
            assert status == 200
        await client.close()

    assert len(engine.seen) == 2
    assert not engine.seen[0].headers.keys() & {"upgrade", "connection"}


@pytest.mark.parametrize("host", [[], ["host: gw"]], ids=["without host", "with host"])
@pytest.mark.parametrize("kept", [[], ["connection: keep-alive"]], ids=["plain", "keep-alive"])
async def test_http_1_0_ends_after_one_answer(host: list[str], kept: list[str]) -> None:
    lines = [f"POST {CHAT} HTTP/1.0", *host, *kept, f"content-length: {len(BODY)}", "", ""]
    async with openai_engine() as engine, gateway(engine.url) as gw:
        statuses, _ = await answers(gw.port, "\r\n".join(lines).encode() + BODY)

    assert statuses == [200]
    assert len(engine.seen) == 1


async def test_an_absolute_target_reaches_no_other_host() -> None:
    start = f"POST http://elsewhere{CHAT} HTTP/1.1\r\nhost: gw\r\n".encode()
    async with openai_engine() as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(sized(start=start))
        async with asyncio.timeout(20):
            status, _ = await client.head()
        await client.close()

    assert status in (200, 400, 404)
    assert all(seen.target == CHAT for seen in engine.seen)
    assert all(seen.headers["host"] == engine.url[7:] for seen in engine.seen)


@pytest.mark.parametrize("close", ["close", "Close", "keep-alive, close", "x-a,close"])
async def test_a_client_that_asks_to_close_is_closed(close: str) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        statuses, got = await answers(gw.port, wire(BODY, f"connection: {close}"))

    assert statuses == [200]
    assert b"connection: close" in got.lower()
    assert len(engine.seen) == 1


def answered(*lines: bytes, body: bytes = b"{}") -> bytes:
    """A worker's answer with ``lines`` as they are."""
    return b"HTTP/1.1 200 OK\r\n" + b"".join(lines) + b"\r\n" + body


TWO = b"content-length: 2\r\n"
CHUNKED_TWO = b"2\r\n{}\r\n0\r\n\r\n"
ANSWERS = {
    "bare LF after a header": answered(b"x-a: b\n", TWO),
    "bare LF hides a header": answered(b"x-a: b\nset-cookie: c\r\n", TWO),
    "bare CR": answered(b"x-a: b\rset-cookie: c\r\n", TWO),
    "folded line": answered(b"x-a: b\r\n c\r\n", TWO),
    "NUL in a value": answered(b"x-a: b\0\r\n", TWO),
    "space before the colon": answered(b"content-length : 2\r\n"),
    "no colon": answered(b"x-a\r\n", TWO),
    "name that is no token": answered(b"x(a): b\r\n", TWO),
    "two lengths": answered(TWO, b"content-length: 3\r\n"),
    "list of lengths": answered(b"content-length: 2, 2\r\n"),
    "signed length": answered(b"content-length: +2\r\n"),
    "length beyond 64 bits": answered(b"content-length: 99999999999999999999999\r\n"),
    "length and chunked": answered(TWO, CHUNKED, body=CHUNKED_TWO),
    "chunked and length": answered(CHUNKED, TWO, body=CHUNKED_TWO),
    "chunk size is no number": answered(CHUNKED, body=b"zz\r\n{}\r\n0\r\n\r\n"),
    "signed chunk size": answered(CHUNKED, body=b"+2\r\n{}\r\n0\r\n\r\n"),
    "chunk longer than its size": answered(CHUNKED, body=b"1\r\n{}\r\n0\r\n\r\n"),
    "bare LF after a size": answered(CHUNKED, body=b"2\n{}\r\n0\r\n\r\n"),
    "status that is no number": b"HTTP/1.1 2x0 OK\r\n" + TWO + b"\r\n{}",
    "another protocol": b"ICY 200 OK\r\n" + TWO + b"\r\n{}",
}


@pytest.mark.parametrize("data", ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_that_could_be_read_two_ways_reaches_no_client(data: bytes) -> None:
    late = answered(TWO, body=b"[]")
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append([data + late, End.HANG])
        client = await RawClient.connect(gw.port)
        got = []
        for _ in range(2):
            await client.send(wire(BODY))
            async with asyncio.timeout(20):
                status, headers = await client.head()
                body = await client.reader.readexactly(int(headers["content-length"]))
            got.append((status, body, "set-cookie" in headers))
        await client.close()

    assert got[0][0] == 502
    assert json.loads(got[0][1])["error"]["type"] == "api_error"
    # What stood behind the answer is nobody's, least of all the next client's.
    assert got[1] == (200, b"{}", False)


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        pytest.param([TWO], b"{}", id="sized"),
        pytest.param([CHUNKED], CHUNKED_TWO, id="chunked"),
        pytest.param([CHUNKED], b"2;a=b\r\n{}\r\n0\r\nx-t: 1\r\n\r\n", id="with a trailer"),
    ],
)
async def test_a_second_answer_behind_the_first_is_thrown_away(
    lines: list[bytes], body: bytes
) -> None:
    poison = answered(TWO, body=b"[]")
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append([answered(*lines, body=body) + poison, End.HANG])
        bodies = [(await gw.post())[1] for _ in range(2)]

    assert bodies == [b"{}", b"{}"]
    assert engine.num_connections == 2
