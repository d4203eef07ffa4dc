"""What clients may send: framing, limits, refusals in OpenAI's shape, and the other paths."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import random
import re
import zlib
from collections.abc import Callable
from typing import Any

import brotli
import pytest

from gateway.proxy.limits import Limits
from gateway.routing.pool import Pool
from tests.fakes.engine import DONE, FINISH, RawEngine, content, openai_engine, stream
from tests.fakes.gateway import CHAT, RawClient, chat, gateway, wire, worker
from tests.support import poll_until

BODY = json.dumps(chat()).encode()


def error_in(body: bytes) -> dict[str, Any]:
    """The error object; it must have exactly OpenAI's members."""
    document = json.loads(body)
    assert document.keys() == {"error"}
    error: dict[str, Any] = document["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def exchange(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read one answer with a content length, which names its request and its times."""
    client = await RawClient.connect(port)
    try:
        await client.send(data)
        async with asyncio.timeout(20):
            status, headers = await client.head()
            assert headers["x-request-id"]
            assert re.fullmatch(r"route;dur=[0-9.]+, queue;dur=[0-9.]+", headers["server-timing"])
            return status, headers, await client.reader.readexactly(int(headers["content-length"]))
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        pytest.param(CHAT, b"", 400, None, "invalid_json", id="empty"),
        pytest.param(CHAT, b"{", 400, None, "invalid_json", id="cut off"),
        pytest.param(CHAT, b'{"model":"m",}', 400, None, "invalid_json", id="trailing comma"),
        pytest.param(CHAT, b'{"model":"\xff"}', 400, None, "invalid_json", id="not utf-8"),
        pytest.param(CHAT, b'\xef\xbb\xbf{"model":"m"}', 400, None, "invalid_json", id="bom"),
        pytest.param(CHAT, b'{"model":NaN}', 400, None, "invalid_json", id="nan"),
        pytest.param(CHAT, b"[" * 100_000, 400, None, "json_too_deep", id="deep"),
        pytest.param(CHAT, b"[]", 400, None, "invalid_json", id="a list"),
        pytest.param(CHAT, b'"m"', 400, None, "invalid_json", id="a string"),
        pytest.param(CHAT, b"null", 400, None, "invalid_json", id="null"),
        pytest.param(CHAT, b'{"messages":[]}', 400, "model", None, id="no model"),
        pytest.param(CHAT, b'{"model":"","messages":[]}', 400, "model", None, id="empty model"),
        pytest.param(CHAT, b'{"model":1,"messages":[]}', 400, "model", None, id="model number"),
        pytest.param(CHAT, b'{"model":"m"}', 400, "messages", None, id="no messages"),
        pytest.param(
            CHAT, b'{"model":"m","messages":{}}', 400, "messages", None, id="messages map"
        ),
        pytest.param("/v1/completions", b'{"model":"m"}', 400, "prompt", None, id="no prompt"),
        pytest.param("/v1/completions", b'{"model":"m","prompt":3}', 400, "prompt", None, id="3"),
        pytest.param(
            CHAT, b'{"model":"nope","messages":[]}', 404, "model", "model_not_found", id="unknown"
        ),
    ],
)
async def test_bad_input_is_refused_without_asking_a_worker(
    path: str, body: bytes, status: int, param: str | None, code: str | None
) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        got, answer, response = await gw.post(path, data=body)
        record = await gw.record()

    error = error_in(answer)
    assert (got, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert response.headers["x-request-id"] == record.request_id
    assert (record.outcome, record.status, record.worker) == ("refused", status, "")
    assert engine.num_connections == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1//chat/completions", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("POST", "/sleep", 404),
        ("POST", "/v1/chat/../../reset_prefix_cache", 404),
        ("POST", "/v1/%2e%2e/sleep", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_other_paths_and_methods_are_errors_in_shape_and_never_proxied(
    method: str, path: str, status: int
) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        data = f"{method} {path} HTTP/1.1\r\nhost: gw\r\nx-request-id: r1\r\n\r\n".encode()
        got, headers, body = await exchange(gw.port, data)

    assert (got, headers["x-request-id"]) == (status, "r1")
    assert error_in(body)["type"] in ("not_found_error", "invalid_request_error")
    assert ("allow" in headers) == (status == 405)
    assert engine.num_connections == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models/m", 200),
        ("GET", "/v1/models/nope", 404),
        ("GET", "/v1/realtime", 501),
        ("GET", "/health", 200),
        ("GET", "/health/ready", 200),
        ("POST", "/v1/embeddings", 400),
        ("POST", "/v1/audio/speech", 400),
        ("POST", "/v1/messages/count_tokens", 400),
        ("POST", CHAT, 400),
    ],
)
async def test_whatever_is_answered_names_its_request_and_its_times(
    method: str, path: str, status: int
) -> None:
    data = f"{method} {path} HTTP/1.1\r\nhost: gw\r\ncontent-length: 0\r\n\r\n".encode()
    async with openai_engine() as engine, gateway(engine.url) as gw:
        assert (await exchange(gw.port, data))[0] == status


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
    ],
)
async def test_a_base_url_with_v1_too_little_or_too_much_is_told(path: str, meant: str) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        status, _, body = await exchange(gw.port, wire(BODY, path=path))

    assert (status, f"did you mean {meant}?" in json.loads(body)["error"]["message"]) == (404, True)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(b"not http at all\r\n\r\n", 400, id="not http"),
        pytest.param(b"GET / HTTP/9.9\r\n\r\n", 400, id="version"),
        pytest.param(b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400, id="header without colon"),
        pytest.param(b"GET / HTTP/1.1\r\na: " + b"x" * 70_000 + b"\r\n\r\n", 400, id="long header"),
        pytest.param(b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 400, id="long target"),
        pytest.param(wire(BODY, "content-length: 5", "content-length: 6"), 400, id="two lengths"),
        pytest.param(wire(BODY, "content-length: -5"), 400, id="negative length"),
        pytest.param(
            wire(b"0\r\n\r\n", "content-length: 5", "transfer-encoding: chunked"),
            400,
            id="length and chunked",
        ),
        pytest.param(wire(BODY, "transfer-encoding: chunked, gzip"), 400, id="odd coding"),
        pytest.param(wire(b"zz\r\n", "transfer-encoding: chunked"), 400, id="chunk size"),
        pytest.param(wire(BODY, "expect: something"), 417, id="unknown expectation"),
        pytest.param(
            b"POST /x HTTP/1.1\r\nhost: gw\r\nexpect: \xa3\r\n\r\n", 417, id="odd expectation"
        ),
    ],
)
async def test_broken_requests_are_refused_in_shape(data: bytes, status: int) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        got, headers, body = await exchange(gw.port, data)

    assert got == status
    assert error_in(body)["type"] == "invalid_request_error"
    assert headers["x-request-id"]
    assert engine.num_connections == 0


async def test_too_many_or_too_large_headers_are_refused() -> None:
    limits = Limits(head_bytes=8 << 10)
    many = [f"x-{i}: 1" for i in range(200)]
    large = [f"x-{i}: {'v' * 900}" for i in range(20)]
    async with openai_engine() as engine, gateway(engine.url, limits=limits) as gw:
        assert (await exchange(gw.port, wire(BODY, *many)))[0] == 400
        status, _, body = await exchange(gw.port, wire(BODY, *large))

    assert (status, error_in(body)["type"]) == (431, "invalid_request_error")
    assert engine.num_connections == 0


async def test_a_body_announced_as_too_long_is_refused_before_it_is_read() -> None:
    async with openai_engine() as engine, gateway(engine.url, limits=Limits(body_bytes=1000)) as gw:
        head = wire(b"", "content-length: 1001")
        status, headers, body = await exchange(gw.port, head)
        expecting = wire(b"", "content-length: 1001", "expect: 100-continue")
        refused, _, _ = await exchange(gw.port, expecting)

    assert (status, headers["connection"]) == (413, "close")
    assert "1000" in error_in(body)["message"]
    assert refused == 413
    assert engine.num_connections == 0


async def test_a_chunked_body_is_counted() -> None:
    chunks = b"".join(b"64\r\n" + b" " * 100 + b"\r\n" for _ in range(11))
    data = wire(chunks, "transfer-encoding: chunked")  # never ended
    async with openai_engine() as engine, gateway(engine.url, limits=Limits(body_bytes=1000)) as gw:
        status, _, body = await exchange(gw.port, data)

    assert status == 413
    error_in(body)
    assert engine.num_connections == 0


async def test_a_body_of_several_megabytes_passes() -> None:
    body = chat("x" * (6 << 20))
    async with openai_engine() as engine, gateway(engine.url) as gw:
        data = io.BytesIO(json.dumps(body).encode())
        assert (await gw.post(data=data))[0] == 200

    assert engine.seen[0].json() == body


async def test_a_body_that_does_not_arrive_times_out() -> None:
    async with openai_engine() as engine, gateway(engine.url, limits=Limits(body_s=0.1)) as gw:
        status, _, body = await exchange(gw.port, wire(b"{", "content-length: 100"))

    assert (status, error_in(body)["type"]) == (408, "timeout_error")


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
}


@pytest.mark.parametrize("is_chunked", [False, True], ids=["sized", "chunked"])
@pytest.mark.parametrize("size", [10, 200_000])
@pytest.mark.parametrize("coding", PACKERS)
async def test_a_compressed_body_is_forwarded_uncompressed(
    coding: str, size: int, is_chunked: bool
) -> None:
    # Text that hardly shrinks, so that the large one is decompressed in a thread.
    body = json.dumps(chat(random.Random(1).randbytes(size).hex())).encode()
    packed = PACKERS[coding](body)
    data = wire(packed, f"content-encoding: {coding}")
    if is_chunked:
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
        data = wire(chunks, f"content-encoding: {coding.upper()}", "transfer-encoding: chunked")
    async with openai_engine() as engine, gateway(engine.url) as gw:
        assert (await exchange(gw.port, data))[0] == 200
    seen = engine.seen[0]

    assert seen.body == body
    assert seen.headers["content-length"] == str(len(body))
    assert "content-encoding" not in seen.headers


@pytest.mark.parametrize("coding", PACKERS)
@pytest.mark.parametrize("size", [3000, 20 << 20], ids=["just over", "bomb"])
async def test_a_body_that_grows_beyond_its_limit_is_refused(coding: str, size: int) -> None:
    packed = PACKERS[coding](json.dumps(chat("a" * size)).encode())
    limits = Limits(decompressed_bytes=3000)
    async with openai_engine() as engine, gateway(engine.url, limits=limits) as gw:
        data = wire(packed, f"content-encoding: {coding}")
        status, _, body = await exchange(gw.port, data)

    assert (status, error_in(body)["type"]) == (413, "invalid_request_error")
    assert "3000" in error_in(body)["message"]
    assert engine.num_connections == 0


@pytest.mark.parametrize("how", ["plain", "cut off", "bytes behind", "empty"])
@pytest.mark.parametrize("coding", PACKERS)
async def test_a_body_that_is_not_in_its_coding_is_refused(coding: str, how: str) -> None:
    packed = PACKERS[coding](BODY)
    sent = {"plain": BODY, "cut off": packed[:-2], "bytes behind": packed + BODY, "empty": b""}[how]
    async with openai_engine() as engine, gateway(engine.url) as gw:
        status, _, body = await exchange(gw.port, wire(sent, f"content-encoding: {coding}"))

    assert (status, error_in(body)["code"]) == (400, "bad_encoding")
    assert engine.num_connections == 0


@pytest.mark.parametrize("coding", ["zstd", "gzip, gzip", "compress"])
async def test_an_unknown_coding_is_refused_with_a_clear_message(coding: str) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        status, _, body = await exchange(gw.port, wire(BODY, f"content-encoding: {coding}"))

    assert status == 415
    assert "gzip, deflate, br" in error_in(body)["message"]
    assert engine.num_connections == 0


async def test_expect_100_continue_gets_its_interim_answer_before_the_body() -> None:
    body = json.dumps(chat("a" * 20_000)).encode()
    async with openai_engine() as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        head = wire(b"", f"content-length: {len(body)}", "expect: 100-continue")
        await client.send(head)
        async with asyncio.timeout(20):
            assert await client.head() == (100, {})
        await client.send(body)
        status, _ = await client.head()
        await client.close()

    assert status == 200
    assert engine.seen[0].body == body
    assert "expect" not in engine.seen[0].headers


async def test_a_chunked_body_arrives_as_one_well_framed_body() -> None:
    pieces = [BODY[:10], BODY[10:30], BODY[30:]]
    async with openai_engine() as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        await client.send(wire(b"", "transfer-encoding: chunked"))
        for piece in pieces:
            await client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0.01)
        await client.send(b"0\r\n\r\n")
        status, _ = await client.head()
        await client.close()
    seen = engine.seen[0]

    assert (status, seen.body) == (200, BODY)
    assert seen.headers["content-length"] == str(len(BODY))
    assert "transfer-encoding" not in seen.headers


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        client = await RawClient.connect(gw.port)
        first = wire(BODY, "x-request-id: one")
        await client.send(first + wire(BODY, "x-request-id: two"))
        ids = []
        for _ in range(2):
            _, headers = await client.head()
            ids.append(headers["x-request-id"])
            await client.reader.readexactly(int(headers["content-length"]))
        await client.close()

    assert ids == ["one", "two"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_http_1_0_client_gets_an_unchunked_answer_that_ends_by_closing(
    is_stream: bool,
) -> None:
    body = json.dumps(chat(stream=is_stream)).encode()
    lines = ["POST /v1/chat/completions HTTP/1.0", f"content-length: {len(body)}", "", ""]
    async with RawEngine() as engine, gateway(engine.url) as gw:
        if is_stream:
            engine.scripts.append(stream(content("a"), 0.02, FINISH, DONE))
        client = await RawClient.connect(gw.port)
        await client.send("\r\n".join(lines).encode() + body)
        async with asyncio.timeout(20):
            status, headers = await client.head()
            rest = await client.rest()
        await client.close()

    assert status == 200
    assert "transfer-encoding" not in headers
    assert rest == (content("a") + FINISH + DONE if is_stream else b"{}")


async def test_models_are_the_union_of_pools_and_aliases_without_duplicates() -> None:
    async with openai_engine() as one, openai_engine() as two:
        pools = [
            Pool("a", models=["a"], workers=[worker("w1", one.url)]),
            Pool("b", models=["b"], aliases={"b-alias": "b"}, workers=[worker("w2", two.url)]),
        ]
        async with gateway(pools=pools) as gw:
            _, body, _ = await gw.get("/v1/models")
            await gw.post(body={**chat(), "model": "b-alias"})
    listed = json.loads(body)

    assert listed["object"] == "list"
    assert [entry["id"] for entry in listed["data"]] == ["a", "b", "b-alias"]
    assert {entry["object"] for entry in listed["data"]} == {"model"}
    assert one.seen == []
    assert two.seen[0].json()["model"] == "b"


async def test_health_is_answered_without_workers_and_readiness_says_why_not() -> None:
    async with gateway("http://127.0.0.1:9") as gw:
        for path in ("/health", "/health/live"):
            assert (await gw.get(path))[:2] == (200, b'{"status":"ok"}')
        assert (await gw.get("/health/ready"))[0] == 200
        gw.lifecycle.not_ready = "no worker has answered yet"
        status, body, response = await gw.get("/health/ready")

    assert (status, json.loads(body)["reason"]) == (503, "no worker has answered yet")
    assert response.headers["x-request-id"]


async def test_a_defect_in_the_gateway_is_an_error_in_shape(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        gw.pools[0].workers["w0"].upstream, kept = None, gw.pools[0].workers["w0"].upstream
        status, body, _ = await gw.post()
        gw.pools[0].workers["w0"].upstream = kept
        record = await gw.record()

    assert (status, error_in(body)["code"]) == (500, "internal_error")
    assert record.status == 500
    assert "Traceback" not in body.decode()


async def test_an_idle_client_connection_is_closed() -> None:
    async with openai_engine() as engine, gateway(engine.url, limits=Limits(idle_s=0.1)) as gw:
        client = await RawClient.connect(gw.port)
        async with asyncio.timeout(20):
            assert await client.rest() == b""
        await client.close()
        await poll_until(lambda: gw.lifecycle.num_running == 0)
