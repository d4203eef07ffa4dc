"""One request's life: what workers and clients get, what is retried, what is accounted."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from gateway.proxy.limits import Limits
from gateway.routing.pool import Pool
from tests.fakes.engine import (
    DONE,
    FINISH,
    LAST_CHUNK,
    ROLE,
    End,
    RawEngine,
    Script,
    answer,
    content,
    event,
    head,
    openai_engine,
    stream,
    usage,
)
from tests.fakes.gateway import CHAT, RawClient, chat, gateway, wire, worker
from tests.support import free_port, poll_until

COMPLETIONS = "/v1/completions"


async def test_the_body_reaches_the_worker_byte_for_byte() -> None:
    body = (
        b'{ "model":"m", "messages":[{"role":"user","content":"caf\\u00e9 \xc3\xa9","x_msg":1.0}],'
        b'"seed":9007199254740993, "x_future":{"k":[1,null]},"seed":18446744073709551615}'
    )
    async with openai_engine() as engine, gateway(engine.url) as gw:
        status, _, _ = await gw.post(data=body, headers={"content-type": "application/json"})

    assert status == 200
    assert engine.seen[0].body == body


async def test_an_alias_and_gateway_hints_are_spliced_and_nothing_else() -> None:
    body = b'{"messages":[],"warmlane":{"session":"s"}, "model" : "gpt-4o-mini","t":1.0}'
    async with openai_engine() as engine, gateway(engine.url, aliases={"gpt-4o-mini": "m"}) as gw:
        await gw.post(data=body)

    assert engine.seen[0].body == b'{"messages":[], "model" : "m","t":1.0}'


@pytest.mark.parametrize(
    "prompt", ["text", [151644, 872], [[1, 2, 3], [4, 5]], ["a", "b"]], ids=str
)
async def test_completions_take_text_and_token_ids_as_sent(prompt: Any) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.post(COMPLETIONS, {"model": "m", "prompt": prompt})
        record = await gw.record()

    assert (status, json.loads(body)["object"]) == (200, "text_completion")
    assert engine.seen[0].target == COMPLETIONS
    assert engine.seen[0].json()["prompt"] == prompt
    assert (record.surface, record.outcome) == ("completions", "ok")


async def test_end_to_end_headers_cross_and_hop_by_hop_ones_do_not() -> None:
    given = {
        "authorization": "Bearer sk",
        "x-session-id": "s",
        "traceparent": "00-1-2-03",
        "x-request-id": "req-7",
        "x-warmlane-explain": "1",
        "connection": "x-hop, keep-alive",
        "x-hop": "1",
        "te": "trailers",
        "proxy-authorization": "Basic x",
        "accept-encoding": "gzip, br",
    }
    answered = answer(
        b"{}", 200, "x-engine: e", "keep-alive: timeout=5", "connection: x-b", "x-b: 1"
    )
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append(answered)
        _, _, response = await gw.post(headers=given)
        record = await gw.record()
    seen = engine.seen[0].headers

    for name in ("authorization", "x-session-id", "traceparent", "x-request-id"):
        assert seen[name] == given[name]
    assert seen["host"] == engine.url.removeprefix("http://")
    assert seen["accept-encoding"] == "identity"
    assert not seen.keys() & {"x-hop", "te", "proxy-authorization", "x-warmlane-explain"}
    assert response.headers["x-engine"] == "e"
    assert response.headers["x-request-id"] == record.request_id == "req-7"
    assert not response.headers.keys() & {"keep-alive", "x-b"}


@pytest.mark.parametrize("given", ["", "x" * 200, "caf\u00e9", "a\tb"])
async def test_a_request_id_unfit_for_logs_is_replaced(given: str) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        _, _, response = await gw.post(headers={"x-request-id": given})

    assert len(response.headers["x-request-id"]) == 32
    assert engine.seen[0].headers["x-request-id"] == response.headers["x-request-id"]


async def test_every_answer_says_what_the_gateway_took_and_explains_on_request() -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        _, _, plain = await gw.post()
        _, _, explained = await gw.post(headers={"x-warmlane-explain": "1"})

    assert plain.headers["server-timing"].startswith("route;dur=")
    assert "queue;dur=" in plain.headers["server-timing"]
    assert not [name for name in plain.headers if name.lower().startswith("x-warmlane")]
    assert explained.headers["x-warmlane-worker"] == "w0"
    assert explained.headers["x-warmlane-reason"]
    assert int(explained.headers["x-warmlane-prompt-tokens"]) > 0
    assert explained.headers["x-warmlane-hit-tokens"] == "0"


async def test_what_a_worker_says_against_buffering_is_not_said_twice() -> None:
    said = b"cache-control: no-cache\r\nX-Accel-Buffering: no\r\n"
    async with RawEngine() as engine, gateway(engine.url) as gw:
        head, *rest = stream(ROLE, content("ok"), FINISH, DONE)
        assert isinstance(head, bytes)
        engine.scripts.append([head.replace(b"\r\n\r\n", b"\r\n" + said + b"\r\n"), *rest])
        _, _, response = await gw.post(body=chat(stream=True))

    assert response.headers.getall("cache-control") == ["no-cache"]
    assert response.headers.getall("x-accel-buffering") == ["no"]


async def test_a_stream_passes_unchanged_and_is_accounted() -> None:
    counts = event(id="x", choices=[], usage=usage(100, 2, 64))
    pieces = [
        ROLE,
        content("caf\u00e9"),
        content(" ok"),
        FINISH,
        counts,
        event(usage={"x": 1}),
        DONE,
    ]
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append(stream(*pieces))
        asked = chat(stream=True, stream_options={"include_usage": True})
        status, body, response = await gw.post(body=asked)
        record = await gw.record()

    assert (status, body) == (200, b"".join(pieces))
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert (record.outcome, record.stream, record.attempts) == ("ok", True, 1)
    assert (record.prompt_tokens, record.completion_tokens) == (100, 2)
    assert record.observed_hit_tokens == 64
    assert record.ttft_s is not None
    assert 0 < record.ttft_s <= record.duration_s


async def test_an_event_cut_anywhere_arrives_whole_and_unchanged() -> None:
    data = b"".join([content("caf\u00e9 \U0001f600"), FINISH, DONE])
    async with RawEngine() as engine, gateway(engine.url) as gw:
        for cut in range(1, len(data), 7):
            engine.scripts.append(stream(data[:cut], 0.001, data[cut:]))
            _, body, _ = await gw.post(body=chat(stream=True))
            assert body == data
        assert {record.outcome for record in gw.records} == {"ok"}


async def test_a_client_sees_that_it_is_answered_before_there_is_an_event() -> None:
    token = asyncio.Event()
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append(stream(token, content("a"), FINISH, DONE))
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat(stream=True)).encode(), "connection: close"))
        async with asyncio.timeout(20):
            status, headers = await client.head()
        token.set()
        rest = await client.rest()
        await client.close()

    assert (status, headers["content-type"]) == (200, "text/event-stream")
    assert b"[DONE]" in rest


async def test_the_first_token_counts_and_neither_role_nor_empty_choices() -> None:
    token = asyncio.Event()
    async with RawEngine() as engine, gateway(engine.url) as gw:
        empty = event(id="x", choices=[])
        engine.scripts.append(stream(empty, ROLE, 0.1, token, content("a"), FINISH, DONE))
        books = gw.pools[0].workers["w0"].books
        waiting = asyncio.create_task(gw.post(body=chat(stream=True)))
        await poll_until(lambda: books.in_flight == 1)
        await asyncio.sleep(0.05)
        assert books.num_decoding == 0
        token.set()
        await waiting
        record = await gw.record()

    assert record.ttft_s is not None
    assert record.ttft_s >= 0.1


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("status", "outcome"),
    [(400, "rejected"), (422, "rejected"), (429, "rejected"), (500, "upstream_error")],
)
async def test_an_engines_refusal_passes_byte_for_byte(
    status: int, outcome: str, is_stream: bool
) -> None:
    refusal = b'{"object":"error","message":"context length is 4096","code":400}'
    # A 429 with retry-after may be answered by another worker, where there is one.
    num_workers = 1 if status == 429 else 2
    async with RawEngine() as engine, gateway(*[engine.url] * num_workers) as gw:
        engine.scripts.append(answer(refusal, status, "retry-after: 7", "content-type: a/b"))
        got, body, response = await gw.post(body=chat(stream=is_stream))
        record = await gw.record()
        failures = [w.health.failures for w in gw.pools[0].workers.values()]

    assert (got, body) == (status, refusal)
    assert response.headers["retry-after"] == "7"
    assert response.headers["content-type"] == "a/b"
    assert (record.status, record.outcome, record.attempts) == (status, outcome, 1)
    assert len(engine.seen) == 1
    assert sum(failures) == (1 if outcome == "upstream_error" else 0)


async def test_a_503_is_tried_once_elsewhere_and_passes_when_there_is_nowhere_else() -> None:
    busy = answer(b'{"error":{"message":"loading"}}', 503, "retry-after: 3")
    async with RawEngine(lambda _: busy) as engine, gateway(engine.url, engine.url) as gw:
        status, body, response = await gw.post()
        record = await gw.record()
        async with gateway(engine.url) as alone:
            assert (await alone.post())[:2] == (503, b'{"error":{"message":"loading"}}')

    assert (status, body) == (503, b'{"error":{"message":"loading"}}')
    assert response.headers["retry-after"] == "3"
    assert (record.attempts, len(engine.seen)) == (2, 3)


async def test_the_other_worker_may_answer_what_one_refused_with_503() -> None:
    async with (
        RawEngine(lambda _: answer(b"{}", 503)) as busy,
        openai_engine() as free,
        gateway(busy.url, free.url) as gw,
    ):
        for _ in range(6):
            assert (await gw.post())[0] == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_dead_worker_costs_a_retry_and_no_error(is_stream: bool) -> None:
    async with (
        openai_engine() as engine,
        gateway(f"http://127.0.0.1:{free_port()}", engine.url) as gw,
    ):
        for i in range(8):
            assert (await gw.post(body=chat(str(i), stream=is_stream)))[0] == 200
        retried = [record for record in gw.records if record.attempts == 2]
        dead = gw.pools[0].workers["w0"]

    assert retried
    assert {record.worker for record in gw.records} == {"w1"}
    assert dead.health.failures


@pytest.mark.parametrize("how", [End.FIN, End.RST], ids=["fin", "rst"])
async def test_a_reset_before_the_first_byte_moves_to_another_worker(how: End) -> None:
    async with (
        RawEngine(lambda _: [0.05, how]) as broken,
        openai_engine() as engine,
        gateway(broken.url, engine.url) as gw,
    ):
        for i in range(6):
            assert (await gw.post(body=chat(str(i))))[0] == 200

    assert broken.seen


async def test_all_workers_unreachable_is_a_502_that_says_whether_to_retry() -> None:
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(3)]
    async with gateway(*urls) as gw:
        status, body, response = await gw.post(body=chat(stream=True))
        record = await gw.record()

    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (502, "worker_unreachable", "api_error")
    assert response.headers["x-should-retry"] == "false"
    assert (record.outcome, record.attempts) == ("connect_failed", 2)


async def test_a_pool_without_eligible_workers_is_a_503_with_retry_after() -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        gw.pools[0].drain("w0")
        status, body, response = await gw.post()
        record = await gw.record()

    assert (status, json.loads(body)["error"]["type"]) == (503, "overloaded_error")
    assert int(response.headers["retry-after"]) >= 1
    assert float(response.headers["retry-after-ms"]) >= 1
    assert (record.outcome, record.worker, engine.seen) == ("unavailable", "", [])


async def test_the_retry_budget_bounds_retries_when_a_worker_fails_everything() -> None:
    async with RawEngine(lambda _: [End.FIN]) as broken:
        limits = Limits(retry_ratio=0.0)
        async with gateway(broken.url, broken.url, limits=limits) as gw:
            status, _, response = await gw.post()
            record = await gw.record()

    assert (status, record.attempts, len(broken.seen)) == (502, 1, 1)
    assert response.headers["x-should-retry"] == "false"


async def test_a_first_byte_deadline_is_never_sent_again() -> None:
    async with (
        RawEngine(lambda _: [End.HANG]) as slow,
        gateway(slow.url, slow.url, slow.url, limits=Limits(first_byte_s=0.2)) as gw,
    ):
        status, body, response = await gw.post()
        record = await gw.record()
        await poll_until(lambda: slow.num_aborted == 1)
        failures = [w.health.failures for w in gw.pools[0].workers.values()]

    assert (status, json.loads(body)["error"]["type"]) == (504, "timeout_error")
    assert response.headers["x-should-retry"] == "false"
    assert (record.outcome, record.attempts, len(slow.seen)) == ("first_byte_timeout", 1, 1)
    assert failures == [0, 0, 0]


async def test_silence_below_the_deadline_is_waited_for() -> None:
    async with RawEngine() as engine, gateway(engine.url, limits=Limits(first_byte_s=5)) as gw:
        engine.scripts.append([1.0, *stream(content("a"), 0.7, FINISH, DONE)])
        status, body, _ = await gw.post(body=chat(stream=True))

    assert (status, body.endswith(DONE)) == (200, True)


@pytest.mark.parametrize("accepted", ["gzip", "identity"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_compressed_answer_is_readable_whatever_the_client_accepts(
    accepted: str, coding: str
) -> None:
    import zlib

    plain = json.dumps({"choices": [], "usage": usage(5, 1, 2)}).encode()
    packed = gzip.compress(plain) if coding == "gzip" else zlib.compress(plain)
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append(answer(packed, 200, f"content-encoding: {coding}"))
        _, body, response = await gw.post(headers={"accept-encoding": accepted})
        record = await gw.record()

    assert body == plain
    assert "content-encoding" not in response.headers
    assert int(response.headers["content-length"]) == len(plain)
    assert record.observed_hit_tokens == 2


async def test_a_compressed_stream_is_observed_and_readable() -> None:
    import zlib

    packer = zlib.compressobj(wbits=31)
    pieces = [ROLE, content("a"), FINISH, DONE]
    packed = [packer.compress(p) + packer.flush(zlib.Z_SYNC_FLUSH) for p in pieces]
    head_ = head(200, "content-type: text/event-stream", "content-encoding: gzip")
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append([head_, *packed, packer.flush(), End.FIN])
        _, body, _ = await gw.post(body=chat(stream=True))
        record = await gw.record()

    assert body == b"".join(pieces)
    assert (record.outcome, record.ttft_s is not None) == ("ok", True)


async def test_a_compressed_answer_that_grows_without_bound_is_refused() -> None:
    bomb = gzip.compress(bytes(40 << 20))
    limits = Limits(decompressed_bytes=1 << 20)
    async with RawEngine() as engine, gateway(engine.url, limits=limits) as gw:
        engine.scripts.append(answer(bomb, 200, "content-encoding: gzip"))
        status, _, _ = await gw.post()

    assert status == 502


async def test_an_unknown_coding_passes_as_it_is() -> None:
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append(answer(b"\x0b\x02\x80x\x03", 200, "content-encoding: zstd"))
        _, body, response = await gw.post()

    assert (body, response.headers["content-encoding"]) == (b"\x0b\x02\x80x\x03", "zstd")


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_an_answer_of_many_megabytes_passes_in_bounded_memory(framing: str) -> None:
    part = b"x" * (1 << 20)
    heads = {
        "length": f"content-length: {24 << 20}",
        "chunked": "transfer-encoding: chunked",
        "close": "connection: close",
    }
    async with RawEngine() as engine, gateway(engine.url) as gw:
        pieces = [b"100000\r\n" + part + b"\r\n" if framing == "chunked" else part] * 24
        end: dict[str, Script] = {"length": [], "chunked": [LAST_CHUNK], "close": [End.FIN]}
        engine.scripts.append([head(200, heads[framing]), *pieces, *end[framing]])
        _, body, response = await gw.post()

    assert len(body) == 24 << 20
    assert ("content-length" in response.headers) == (framing == "length")


async def test_workers_behind_ipv6_and_with_a_path_are_reached() -> None:
    async with RawEngine(host="::1") as engine:
        pool = Pool("chat", models=["m"], workers=[worker("w0", engine.url + "/base")])
        async with gateway(pools=[pool]) as gw:
            assert (await gw.post())[0] == 200

    assert engine.seen[0].target == "/base" + CHAT
    assert engine.seen[0].headers["host"] == f"[::1]:{engine.port}"


async def test_many_requests_at_once_leave_nothing_behind() -> None:
    async with openai_engine() as one, openai_engine() as two, gateway(one.url, two.url) as gw:
        bodies = [chat(str(i), stream=i % 2 == 0) for i in range(60)]
        answers = await asyncio.gather(*(gw.post(body=body) for body in bodies))

        assert [status for status, _, _ in answers] == [200] * 60
        assert len(gw.records) == 60
        assert one.seen
        assert two.seen


async def test_a_client_that_reads_slowly_slows_the_worker_and_not_the_gateway() -> None:
    big = content("x" * 60_000)
    async with RawEngine() as engine, gateway(engine.url) as gw:
        engine.scripts.append(stream(*[big] * 400, FINISH, DONE))
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat(stream=True)).encode()))
        await client.head()
        await asyncio.sleep(0.3)
        answer_ = next(iter(gw.pools[0].workers["w0"].upstream._open))._response  # type: ignore[union-attr]
        assert answer_ is not None
        assert answer_.buffered_bytes < 1 << 20
        assert (await gw.get("/health"))[0] == 200
        got = 0
        while data := await client.reader.read(1 << 20):
            got += len(data)
            if data.endswith(b"0\r\n\r\n"):
                break
        await client.close()

    assert got > 400 * len(big)
