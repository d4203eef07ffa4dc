"""Spans as a collector gets them, of requests through a whole gateway over real sockets."""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from gateway.tracing import names
from gateway.tracing.trace import Trace
from tests.fakes.engine import (
    DONE,
    ROLE,
    End,
    RawEngine,
    Script,
    answer,
    content,
    event,
    openai_engine,
    stream,
    usage,
)
from tests.fakes.engine import Seen as Sent
from tests.gateway.tenancy_parts import CHAT, asking, sent, serving
from tests.gateway.test_cases_security import records_of
from tests.gateway.trace_parts import SAMPLED, SPAN, TRACE, UNSAMPLED, tracing
from tests.support import free_port, poll_until

# Attributes that every answered streaming chat has.
TWELVE = {
    names.OPERATION: "chat",
    names.PROVIDER: "vllm",
    names.REQUEST_MODEL: "m",
    names.REQUEST_STREAM: True,
    names.REQUEST_MAX_TOKENS: 9,
    names.RESPONSE_ID: "resp-1",
    names.RESPONSE_MODEL: "m-served",
    names.FINISH_REASONS: ["length"],
    names.INPUT_TOKENS: 40,
    names.OUTPUT_TOKENS: 9,
    names.CACHE_READ_TOKENS: 32,
}
COUNTS = usage(40, 9, 32) | {"completion_tokens_details": {"reasoning_tokens": 4}}
COUNTS["prompt_tokens_details"]["cache_write_tokens"] = 8


def telling(seen: Sent) -> Script:
    """Answer as an engine that tells everything about itself."""
    if seen.method == "GET":
        return answer(b"{}")
    said: dict[str, Any] = {"id": "resp-1", "model": "m-served"}
    if seen.json().get("stream"):
        pieces = [content(word, **said) for word in ("a", "b", "c")]
        last = content("", "length", **said)
        return stream(*pieces, last, event(**said, choices=[], usage=COUNTS), DONE)
    choice = {"index": 0, "message": {"content": "hi"}, "finish_reason": "length"}
    return answer(json.dumps(said | {"choices": [choice], "usage": COUNTS}).encode())


def cut(seen: Sent) -> Script:
    """Begin a stream and break off."""
    return answer(b"{}") if seen.method == "GET" else stream(ROLE, content("a"), End.RST)


async def stream_of(gw: Any, headers: dict[str, str] | None = None, **fields: Any) -> bytes:
    body = asking(stream=True, **fields)
    async with gw.session.post(gw.url + CHAT, json=body, headers=headers) as response:
        return bytes(await response.read())


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_is_a_server_span_with_routing_and_client_spans(is_stream: bool) -> None:
    async with RawEngine(telling) as engine, tracing(engine) as traced:
        await stream_of(traced.gw, SAMPLED) if is_stream else await traced.gw.post(
            CHAT, asking(), SAMPLED
        )
    server, routing, (client,) = traced.server, traced.routing, traced.clients

    assert {span.trace_id for span in traced.spans} == {TRACE}
    assert server.parent_id == SPAN
    assert (routing.parent_id, client.parent_id) == (server.span_id, server.span_id)
    assert len({span.span_id for span in traced.spans}) == 3
    assert sent(engine)[0].headers["traceparent"] == f"00-{TRACE}-{client.span_id}-01"
    assert (server.name, client.name) == (f"POST {CHAT}", "chat m")
    assert server.start_ns <= routing.start_ns <= routing.end_ns <= client.start_ns
    assert client.start_ns < client.end_ns <= server.end_ns
    assert not any(span.is_error for span in traced.spans)


async def test_client_spans_have_the_attributes_of_the_genai_convention() -> None:
    async with RawEngine(telling) as engine, tracing(engine) as traced:
        await stream_of(traced.gw, SAMPLED | {"x-session-id": "s 1"}, max_tokens=9)
    (client,) = traced.clients
    found = client.attributes

    assert {name: found.get(name) for name in TWELVE} == TWELVE
    lasted_s = (client.end_ns - client.start_ns) / 1e9
    assert 0 < found[names.TIME_TO_FIRST_CHUNK] <= lasted_s
    assert found[names.CACHE_WRITE_TOKENS] == 8
    assert found[names.REASONING_TOKENS] == 4
    assert found[names.SERVER_ADDRESS] == "127.0.0.1"
    assert found[names.SERVER_PORT] == engine.port
    # A name that tells conversations apart, and not the one that the client gave.
    assert re.fullmatch(r"[0-9a-f]{32}", found[names.CONVERSATION])


async def test_the_server_and_routing_spans_say_what_was_decided() -> None:
    async with RawEngine(telling) as engine, tracing(engine, engine) as traced:
        _, _, headers = await traced.gw.post(CHAT, asking(), SAMPLED | {"x-request-id": "mine"})
    server, routing = traced.server.attributes, traced.routing.attributes

    assert headers["x-request-id"] == server[names.REQUEST_ID] == "mine"
    assert server[names.HTTP_METHOD] == "POST"
    assert server[names.HTTP_ROUTE] == server[names.URL_PATH] == CHAT
    assert (server[names.URL_SCHEME], server[names.HTTP_STATUS]) == ("http", 200)
    assert (server[names.POOL], server[names.OUTCOME]) == ("chat", "ok")
    assert routing[names.WORKER] in ("w0", "w1")
    assert routing[names.ROUTING_REASON]
    assert routing[names.ROUTING_PREDICTED_HIT_TOKENS] == 0
    assert [told.split()[0] for told in routing[names.ROUTING_CANDIDATES]] == ["w0", "w1"]


async def test_the_resource_says_which_process_of_which_service_it_was() -> None:
    async with RawEngine(telling) as engine, tracing(engine) as traced:
        await traced.gw.post(CHAT, asking())

    resource = traced.server.resource
    assert (resource["service.name"], resource["service.version"]) == ("warmlane", "0.1.0")
    assert resource["service.instance.id"]


async def test_the_environment_says_who_it_is_where_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front-door")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=search,service.version=7")
    async with RawEngine(telling) as engine, tracing(engine) as traced:
        await traced.gw.post(CHAT, asking())

    resource = traced.server.resource
    assert resource["service.name"] == "front-door"
    assert (resource["team"], resource["service.version"]) == ("search", "7")


# Who decides.


async def test_a_request_without_a_parent_begins_a_trace_of_its_own() -> None:
    async with RawEngine(telling) as engine, tracing(engine) as traced:
        records = records_of(traced.gw)
        for _ in range(2):
            await traced.gw.post(CHAT, asking(), {"tracestate": "left=over"})

    ids = [record.trace_id for record in records]
    assert len(set(ids)) == 2
    assert {span.trace_id for span in traced.spans} == set(ids)
    assert all(span.parent_id == "" for span in traced.of(2))
    # A state belongs to a parent, and there is none.
    assert all("tracestate" not in seen.headers for seen in sent(engine))


@pytest.mark.parametrize(
    ("headers", "ratio"), [(UNSAMPLED, 1.0), ({}, 0.0), ({"traceparent": "00-x"}, 0.0)], ids=str
)
async def test_unsampled_requests_leave_nothing_and_their_headers_pass(
    headers: dict[str, str], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trace, "__init__", lambda *_: pytest.fail("a trace was made"))
    context = headers | {"tracestate": "a=1", "baggage": "k=v"}
    async with (
        RawEngine(telling) as engine,
        tracing(engine, telemetry={"trace_sample": ratio}) as traced,
    ):
        records = records_of(traced.gw)
        await traced.gw.post(CHAT, asking(), context)
        await stream_of(traced.gw, context)

    assert [record.trace_id for record in records] == [None, None]
    assert traced.collector.requests == []
    for seen in sent(engine):
        passed = {"traceparent", "tracestate", "baggage"} & set(seen.headers)
        assert {name: seen.headers[name] for name in passed} == context


async def test_a_sampled_parent_counts_whatever_the_ratio_is() -> None:
    async with RawEngine(telling) as engine, tracing(engine, telemetry={"trace_sample": 0}) as gw:
        for _ in range(3):
            await gw.gw.post(CHAT, asking(), SAMPLED)

    assert len(gw.spans) == 9


async def test_the_ratio_is_the_share_that_is_traced() -> None:
    async with (
        RawEngine(telling) as engine,
        tracing(engine, telemetry={"trace_sample": 0.3}) as traced,
    ):
        records = records_of(traced.gw)
        for _ in range(200):
            await traced.gw.post(CHAT, asking())

    # Six standard deviations around 60.
    assert 20 < sum(record.trace_id is not None for record in records) < 100


async def test_state_and_baggage_go_on_to_the_worker_with_a_sampled_request() -> None:
    context = CIMultiDict(SAMPLED)
    context["baggage"] = "user=alice;ttl=3, k=%20v"
    context.add("tracestate", "congo=t61rcWkgMzE , rojo=1")
    context.add("tracestate", "third=x")
    async with RawEngine(telling) as engine, tracing(engine) as traced:
        await traced.gw.post(CHAT, asking(), context)
    (seen,) = sent(engine)

    assert seen.headers["tracestate"] == "congo=t61rcWkgMzE,rojo=1,third=x"
    assert seen.headers["baggage"] == "user=alice;ttl=3, k=%20v"
    assert seen.head.lower().count(b"traceparent") == 1
    assert {span.state for span in traced.spans} == {"congo=t61rcWkgMzE,rojo=1,third=x"}
    # Who calls for whom is between the two of them.
    assert b"alice" not in b"".join(traced.collector.requests)


async def test_of_two_parents_none_is_believed() -> None:
    twice = CIMultiDict([*SAMPLED.items(), ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01")])
    async with RawEngine(telling) as engine, tracing(engine) as traced:
        await traced.gw.post(CHAT, asking(), twice)

    assert traced.server.parent_id == ""
    assert traced.server.trace_id not in (TRACE, "1" * 32)
    assert sent(engine)[0].head.lower().count(b"traceparent") == 1


async def test_a_connections_next_request_does_not_get_the_context_of_the_last() -> None:
    async with (
        RawEngine(telling) as engine,
        tracing(engine, telemetry={"trace_sample": 0}) as traced,
    ):
        for headers in (SAMPLED, {}, UNSAMPLED, {}):
            await traced.gw.post(CHAT, asking(), headers)
    told = [seen.headers.get("traceparent", "") for seen in sent(engine)]

    assert told[0].startswith(f"00-{TRACE}-")
    assert told[0] != SAMPLED["traceparent"]
    assert told[1:] == ["", UNSAMPLED["traceparent"], ""]


# Failures.


async def test_each_attempt_has_a_span_of_its_own_that_its_worker_was_told() -> None:
    async with (
        RawEngine(lambda _: answer(b"{}", 503)) as ill,
        RawEngine(lambda _: answer(b"{}", 503)) as other,
        tracing(ill, other) as traced,
    ):
        status, _, _ = await traced.gw.post(CHAT, asking(), SAMPLED)
    first, second = traced.clients
    told = {
        seen.headers["traceparent"].split("-")[2]: engine.port
        for engine in (ill, other)
        for seen in sent(engine)
    }

    assert status == 503
    assert told == {span.span_id: span.attributes[names.SERVER_PORT] for span in (first, second)}
    assert names.HTTP_RESEND_COUNT not in first.attributes
    assert second.attributes[names.HTTP_RESEND_COUNT] == 1
    assert first.end_ns <= second.start_ns
    for span in (first, second):
        assert span.parent_id == traced.server.span_id
        assert (span.attributes[names.ERROR_TYPE], span.is_error) == ("503", True)
    assert traced.server.is_error


async def test_a_retry_that_succeeds_leaves_the_request_without_an_error() -> None:
    async with RawEngine(telling) as engine:
        workers = [
            {"id": "gone", "url": f"http://127.0.0.1:{free_port()}"},
            {"id": "good", "url": engine.url},
        ]
        async with tracing(engine, pool={"workers": workers}) as traced:
            for _ in range(6):
                status, _, _ = await traced.gw.post(CHAT, asking())
                assert status == 200
    failed = [span for span in traced.clients if span.is_error]
    by_id = {span.span_id: span for span in traced.of(2)}

    assert failed
    assert {span.attributes[names.ERROR_TYPE] for span in failed} == {"connect_failed"}
    assert not any(by_id[span.parent_id].is_error for span in failed)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b'{"model":"none","messages":[]}', 404), (b"{}", 400)],
    ids=str,
)
async def test_a_refused_request_is_a_server_span_alone_and_no_error(
    body: bytes, status: int
) -> None:
    async with RawEngine(telling) as engine, tracing(engine) as traced:
        found, _, _ = await traced.gw.post(CHAT, None, data=body)
    (span,) = traced.spans

    assert found == status == span.attributes[names.HTTP_STATUS]
    assert (span.is_error, span.attributes.get(names.ERROR_TYPE)) == (False, None)


async def test_a_path_that_a_client_made_up_is_not_told() -> None:
    async with RawEngine(telling) as engine, tracing(engine) as traced:
        for path in ("/v1/chat/completions/sk-secret", "/v1/audio/sk-secret?key=sk-secret"):
            await traced.gw.post(path, {"model": "m"})
    routes = [span.attributes.get(names.HTTP_ROUTE) for span in traced.of(2)]

    assert routes[-1] == "/v1/audio/{rest}"
    assert not any(b"sk-secret" in body for body in traced.collector.requests)


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        (answer(b'{"error":{}}', 500), "upstream_error", "500"),
        (answer(b'{"error":{}}', 400), "rejected", "400"),
        ([End.RST], "upstream_reset", "upstream_reset"),
    ],
    ids=["500", "400", "reset"],
)
async def test_what_a_worker_did_wrong_stands_on_its_span(
    script: Script, outcome: str, error: str
) -> None:
    async with (
        RawEngine(lambda seen: answer(b"{}") if seen.method == "GET" else script) as engine,
        tracing(engine) as traced,
    ):
        await traced.gw.post(CHAT, asking())
    last = traced.clients[-1]

    assert (last.attributes[names.OUTCOME], last.attributes[names.ERROR_TYPE]) == (outcome, error)
    assert last.is_error
    assert traced.server.is_error == (error != "400")


async def test_a_stream_that_breaks_off_is_an_error_although_its_status_was_200() -> None:
    async with RawEngine(cut) as engine, tracing(engine) as traced:
        said = await stream_of(traced.gw)
    (client,) = traced.clients

    assert b"stream_cut_off" in said
    for span in (client, traced.server):
        assert (span.attributes[names.ERROR_TYPE], span.is_error) == ("truncated", True)
        assert span.attributes[names.HTTP_STATUS] == 200
    assert client.attributes[names.TIME_TO_FIRST_CHUNK] > 0
    assert names.INPUT_TOKENS not in client.attributes


async def test_a_client_that_leaves_is_told_of_and_is_nobodys_error() -> None:
    hanging = RawEngine(lambda seen: answer(b"{}") if seen.method == "GET" else [End.HANG])
    async with hanging as engine, tracing(engine) as traced:
        records = records_of(traced.gw)
        with pytest.raises(TimeoutError):
            await traced.gw.post(CHAT, asking(), SAMPLED, timeout=aiohttp.ClientTimeout(total=0.3))
        await poll_until(lambda: bool(records), what="the client was missed")
    (client,) = traced.clients

    for span in (client, traced.server):
        assert (span.attributes[names.ERROR_TYPE], span.is_error) == ("client_closed", False)
        assert names.HTTP_STATUS not in span.attributes


# Other APIs, and prompts.


@pytest.mark.parametrize(
    ("path", "name", "said"),
    [
        ("/v1/completions", "text_completion m", {}),
        ("/v1/embeddings", "embeddings m", {"usage": {"prompt_tokens": 3}}),
        ("/v1/rerank", "rerank m", {}),
    ],
)
async def test_every_surface_is_traced_under_the_name_of_its_operation(
    path: str, name: str, said: dict[str, Any]
) -> None:
    engine = RawEngine(lambda _: answer(json.dumps({"id": "x"} | said).encode()))
    async with engine, tracing(engine) as traced:
        await traced.gw.post(path, {"model": "m", "prompt": "q", "input": "q"})

    assert [client.name for client in traced.clients] == [name]
    assert traced.server.attributes[names.HTTP_ROUTE] == path


@pytest.mark.parametrize("allowed", [False, True])
async def test_prompts_are_in_spans_only_where_they_may_be(allowed: bool) -> None:
    async with (
        openai_engine() as engine,
        tracing(engine, telemetry={"log_prompts": allowed}) as traced,
    ):
        await traced.gw.post(CHAT, asking("CANARY-USER"))
        await stream_of(traced.gw, None, temperature=0)

    assert any(b"CANARY-USER" in body for body in traced.collector.requests) is allowed
    assert len(traced.spans) == 6


async def test_without_a_collector_no_header_is_looked_at_and_none_is_changed() -> None:
    async with RawEngine(telling) as engine, serving(engine) as gw:
        records = records_of(gw)
        await gw.post(CHAT, asking(), SAMPLED | {"tracestate": "a=1"})

    assert [record.trace_id for record in records] == [None]
    assert sent(engine)[0].headers["traceparent"] == SAMPLED["traceparent"]
