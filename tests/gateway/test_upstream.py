"""Connections to a worker: framing, reuse, failure in every phase, bounded memory."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from gateway.upstream.client import (
    ConnectFailed,
    FirstByteTimeout,
    MalformedAnswer,
    ResetBeforeFirstByte,
    ResetMidStream,
    TotalTimeout,
    Upstream,
)
from tests.fakes.engine import LAST_CHUNK, End, RawEngine, Script, answer, chunk, head
from tests.fakes.faults import FaultProxy, Faults
from tests.support import free_port, poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HEADERS = [(b"content-type", b"application/json")]


@pytest.fixture
async def engine() -> AsyncIterator[RawEngine]:
    async with RawEngine() as running:
        yield running


@pytest.fixture
async def upstream(engine: RawEngine) -> AsyncIterator[Upstream]:
    pool = Upstream(engine.url)
    yield pool
    pool.close()
    await poll_until(lambda: pool.num_connections == 0)


async def post(upstream: Upstream, body: bytes = b"{}") -> tuple[int, bytes]:
    response = await upstream.request("POST", "/v1/chat/completions", HEADERS, body)
    try:
        return response.status, await response.read()
    finally:
        response.close()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param(answer(b"hello"), b"hello", id="content-length"),
        pytest.param(answer(b""), b"", id="empty"),
        pytest.param(
            [head(200, "transfer-encoding: chunked") + chunk(b"he"), chunk(b"llo") + LAST_CHUNK],
            b"hello",
            id="chunked",
        ),
        pytest.param(
            [head(200, "Transfer-Encoding: Chunked"), chunk(b"x"), b"0\r\ntrailer: t\r\n\r\n"],
            b"x",
            id="chunked with a trailer",
        ),
        pytest.param([head(200), b"hel", 0.02, b"lo", End.FIN], b"hello", id="until close"),
        pytest.param([head(204)], b"", id="204"),
        pytest.param([head(304, "content-length: 9")], b"", id="304"),
        pytest.param([head(100), head(103, "link: x"), *answer(b"ok")], b"ok", id="interim heads"),
        pytest.param([bytes([b]) for b in answer(b"hello")[0]], b"hello", id="byte by byte"),  # type: ignore[union-attr]
    ],
)
async def test_each_framing_yields_the_body(
    engine: RawEngine, upstream: Upstream, script: Script, expected: bytes
) -> None:
    engine.scripts.append(script)

    _, body = await post(upstream)

    assert body == expected
    assert await post(upstream) == (200, b"{}")


async def test_the_request_arrives_well_framed(engine: RawEngine, upstream: Upstream) -> None:
    body = b'{"a":' + b" " * 200_000 + b"1}"
    await post(upstream, body)

    (seen,) = engine.seen
    assert (seen.method, seen.target, seen.body) == ("POST", "/v1/chat/completions", body)
    assert seen.headers == {
        "host": engine.url.removeprefix("http://"),
        "content-type": "application/json",
        "content-length": str(len(body)),
    }


async def test_a_head_request_has_no_body_whatever_its_headers_say(
    engine: RawEngine, upstream: Upstream
) -> None:
    engine.scripts.append([head(200, "content-length: 5")])
    response = await upstream.request("HEAD", "/health", [])

    assert (response.status, await response.read()) == (200, b"")
    assert await post(upstream) == (200, b"{}")


async def test_sequential_requests_share_a_connection_and_concurrent_ones_do_not(
    engine: RawEngine, upstream: Upstream
) -> None:
    for _ in range(5):
        await post(upstream)
    assert engine.num_connections == 1

    gate = asyncio.Event()
    engine.scripts.extend([[gate, *answer(b"a")], [gate, *answer(b"b")]])
    both = [asyncio.create_task(post(upstream)) for _ in range(2)]
    await poll_until(lambda: len(engine.seen) == 7)
    gate.set()

    assert {body for _, body in await asyncio.gather(*both)} == {b"a", b"b"}
    assert engine.num_connections == upstream.num_idle == 2


async def test_a_connection_may_be_taken_before_its_last_answer_was_read(
    engine: RawEngine, upstream: Upstream
) -> None:
    async def several(name: bytes) -> None:
        for _ in range(20):
            assert await post(upstream, name) == (200, b"{}")

    async with asyncio.timeout(10):
        await asyncio.gather(*(several(b"%d" % i) for i in range(16)))

    assert len(engine.seen) == 320
    assert engine.num_connections <= 16


async def test_connection_close_is_obeyed(engine: RawEngine, upstream: Upstream) -> None:
    engine.scripts.append(answer(b"a", 200, "connection: close"))
    await post(upstream)
    await post(upstream)

    assert engine.num_connections == 2


async def test_an_idle_connection_closes_before_the_engine_would() -> None:
    async with RawEngine() as engine:
        upstream = Upstream(engine.url, idle_s=0.1)
        await post(upstream)
        await poll_until(lambda: upstream.num_connections == 0)
        await post(upstream)
        upstream.close()

    assert engine.num_connections == 2


async def test_bytes_nobody_asked_for_close_the_connection(
    engine: RawEngine, upstream: Upstream
) -> None:
    late = head(408, "content-length: 0")
    engine.scripts.append([*answer(b"a"), 0.05, late])
    await post(upstream)
    await poll_until(lambda: upstream.num_connections == 0)
    together = b"".join([head(200, "content-length: 1"), b"b", late])
    engine.scripts.append([together])
    assert await post(upstream) == (200, b"b")

    assert await post(upstream) == (200, b"{}")


@pytest.mark.parametrize("how", [End.FIN, End.RST], ids=["fin", "rst"])
async def test_a_reused_connection_that_dies_before_the_first_byte_is_replaced_once(
    engine: RawEngine, upstream: Upstream, how: End
) -> None:
    await post(upstream)
    engine.scripts.append([how])

    assert await post(upstream, b"again") == (200, b"{}")
    assert [seen.connection for seen in engine.seen] == [1, 1, 2]

    engine.scripts.extend([[how], [how]])
    with pytest.raises(ResetBeforeFirstByte):
        await post(upstream)


async def test_an_engine_that_closes_idle_connections_never_costs_a_request() -> None:
    async with RawEngine(idle_close_s=0.03) as engine:
        upstream = Upstream(engine.url)
        for pause_ms in range(20, 40):
            assert await post(upstream) == (200, b"{}")
            await asyncio.sleep(pause_ms / 1000)
        upstream.close()

    assert len(engine.seen) == 20


@pytest.mark.parametrize("how", [End.FIN, End.RST], ids=["fin", "rst"])
async def test_a_connection_that_dies_mid_head_is_not_asked_again(
    engine: RawEngine, upstream: Upstream, how: End
) -> None:
    await post(upstream)
    engine.scripts.append([b"HTTP/1.1 200 OK\r\ncontent-le", 0.02, how])
    with pytest.raises(ResetBeforeFirstByte):
        await post(upstream)

    assert len(engine.seen) == 2


@pytest.mark.parametrize("how", [End.FIN, End.RST, End.HALF_CLOSE], ids=lambda how: how.name)
@pytest.mark.parametrize("framing", ["content-length: 10", "transfer-encoding: chunked"])
async def test_an_early_end_of_the_body_is_an_error(
    engine: RawEngine, upstream: Upstream, how: End, framing: str
) -> None:
    piece = chunk(b"half") if "chunked" in framing else b"half"
    engine.scripts.append([head(200, framing) + piece, 0.02, how])
    response = await upstream.request("POST", "/", HEADERS, b"{}")
    got = bytearray()

    async def collect() -> None:
        async for data in response:
            got.extend(data)

    with pytest.raises(ResetMidStream):
        await collect()

    assert got == b"half"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([b"\x16\x03\x01 this is not http\r\n\r\n"], id="not http"),
        pytest.param([b"HTTP/1.1 2OO OK\r\n\r\n"], id="status"),
        pytest.param([head(101, "upgrade: websocket", "connection: upgrade")], id="upgrade"),
        pytest.param([head(200, "content-length: -1")], id="negative length"),
        pytest.param([head(200, "content-length: 1", "content-length: 2")], id="two lengths"),
        pytest.param(
            [head(200, "content-length: 3", "transfer-encoding: chunked") + LAST_CHUNK],
            id="length and chunked",
        ),
        pytest.param([b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 40_000], id="endless head"),
        pytest.param([*[head(100)] * 4000, End.HANG], id="endless interim heads"),
        pytest.param([head(200, "transfer-encoding: chunked") + b"zz\r\n"], id="chunk size"),
    ],
)
async def test_a_malformed_answer_is_an_error_and_never_a_hang(
    engine: RawEngine, upstream: Upstream, script: Script
) -> None:
    engine.scripts.append([*script, End.HANG])
    async with asyncio.timeout(20):
        with pytest.raises(MalformedAnswer):
            await post(upstream)

    assert await post(upstream) == (200, b"{}")


async def test_a_refused_connection_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectFailed, match=url):
        await post(Upstream(url))


async def test_a_silent_network_ends_at_the_connect_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        # The backlog of a listener that never accepts is full after a few connections.
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        with pytest.raises(ConnectFailed, match=r"no connection within 0\.2 s"):
            await post(Upstream(f"http://127.0.0.1:{port}", connect_timeout_s=0.2))
        for filler in fillers:
            filler.close()


async def test_the_first_byte_deadline_aborts_the_exchange(
    engine: RawEngine, upstream: Upstream
) -> None:
    engine.scripts.append([End.HANG])
    with pytest.raises(FirstByteTimeout):
        await upstream.request("POST", "/", HEADERS, b"{}", first_byte_s=0.1)
    await poll_until(lambda: engine.num_aborted == 1)

    assert len(engine.seen) == 1


async def test_an_answer_that_never_ends_is_cut_at_its_total_time(
    engine: RawEngine, upstream: Upstream
) -> None:
    engine.scripts.append([head(200, "content-length: 9") + b"x", End.HANG])
    response = await upstream.request("POST", "/", HEADERS, b"{}", total_s=0.1)
    with pytest.raises(TotalTimeout):
        await response.read()


async def test_close_and_cancellation_abort_at_the_engine(
    engine: RawEngine, upstream: Upstream
) -> None:
    engine.scripts.append([head(200, "content-length: 9"), End.HANG])
    response = await upstream.request("POST", "/", HEADERS, b"{}")
    response.close()
    await poll_until(lambda: engine.num_aborted == 1)
    engine.scripts.append([End.HANG])
    waiting = asyncio.create_task(post(upstream))
    await poll_until(lambda: len(engine.seen) == 2)
    waiting.cancel()
    await poll_until(lambda: engine.num_aborted == 2)

    assert upstream.num_connections == 0


async def test_a_slow_reader_pauses_the_engine(engine: RawEngine, upstream: Upstream) -> None:
    size = 64 << 20
    engine.scripts.append([head(200, f"content-length: {size}"), *[b"x" * (1 << 20)] * 64])
    response = await upstream.request("POST", "/", HEADERS, b"{}")
    await asyncio.sleep(0.3)
    held = response.buffered_bytes
    got = 0
    async for piece in response:
        got += len(piece)

    assert held < 2 << 20
    assert got == size


async def test_a_pumped_body_stops_while_the_receiver_is_full(
    engine: RawEngine, upstream: Upstream
) -> None:
    size = 8 << 20
    engine.scripts.append([head(200, f"content-length: {size}"), *[b"x" * (1 << 20)] * 8])
    response = await upstream.request("POST", "/", HEADERS, b"{}")
    got, since_drain, most = 0, 0, 0

    def write(piece: bytes) -> bool:
        nonlocal got, since_drain, most
        got += len(piece)
        since_drain += len(piece)
        most = max(most, since_drain)
        return since_drain < 100_000

    async def drain() -> None:
        nonlocal since_drain
        await asyncio.sleep(0.001)
        since_drain = 0

    await response.pump(write, drain)

    assert got == size
    assert most < 2 << 20


async def test_a_body_larger_than_the_reader_allows_is_refused(
    engine: RawEngine, upstream: Upstream
) -> None:
    engine.scripts.append(answer(b"x" * 3_000_000))
    response = await upstream.request("GET", "/metrics", [])
    with pytest.raises(MalformedAnswer, match="larger than 100000 bytes"):
        await response.read(100_000)


async def test_an_answer_before_the_whole_request_was_read_does_not_poison_the_pool() -> None:
    answered = asyncio.Event()

    async def answer_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head(413, "content-length: 2") + b"no")
        await answered.wait()
        writer.transport.abort()

    server = await asyncio.start_server(answer_early, "127.0.0.1", 0)
    upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")

    assert await post(upstream, b"x" * (64 << 20)) == (413, b"no")
    assert upstream.num_idle == 0
    answered.set()
    server.close()
    await server.wait_closed()
    await poll_until(lambda: upstream.num_connections == 0)


@pytest.mark.parametrize("host", ["::1", "::ffff:127.0.0.1"])
async def test_ipv6_workers_are_reached_and_named_in_brackets(host: str) -> None:
    async with RawEngine(host="::1" if host == "::1" else "127.0.0.1") as engine:
        upstream = Upstream(f"http://[{host}]:{engine.port}/base/")
        await post(upstream)
        upstream.close()

    assert engine.seen[0].headers["host"] == f"[{host}]:{engine.port}"
    assert engine.seen[0].target == "/base/v1/chat/completions"


@pytest.mark.parametrize(
    "url", ["::1:18001", "localhost:80", "ftp://h", "http://", "http://u:p@h", "http://h:99999"]
)
def test_addresses_that_are_not_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"http|port"):
        Upstream(url)


async def test_sockets_send_without_delay(engine: RawEngine, upstream: Upstream) -> None:
    response = await upstream.request("GET", "/", [])
    await response.read()

    (connection,) = upstream._idle
    assert connection._transport is not None
    sock = connection._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_a_lossy_network_mid_body_is_a_reset_mid_stream(engine: RawEngine) -> None:
    engine.scripts.append(answer(b"x" * 1000))
    async with FaultProxy(engine.port, Faults(latency_s=0.01, reset_after_bytes=400)) as proxy:
        response = await Upstream(proxy.url).request("POST", "/", HEADERS, b"{}")
        with pytest.raises(ResetMidStream):
            await response.read()
