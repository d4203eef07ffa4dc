"""The messages API over sockets: translated for engines without it, passed to those with it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.fakes.engine import (
    DONE,
    End,
    RawEngine,
    Script,
    Seen,
    answer,
    content,
    event,
    stream,
    usage,
)
from tests.fakes.gateway import Gateway, gateway

MESSAGES = "/v1/messages"
TOOL = {
    "name": "read_file",
    "description": "Read a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}


def message(text: Any = "q", **fields: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": text}]
    return {"model": "m", "max_tokens": 64, "messages": asked, **fields}


def completion(finish_reason: str = "stop", **said: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": finish_reason}
    document = {"id": "x", "object": "chat.completion", "choices": [choice]}
    return json.dumps({**document, "usage": usage(100, 5, 64)}).encode()


def chat_engine(said: Script) -> RawEngine:
    """An engine that has no path but chat's."""

    def respond(seen: Seen) -> Script:
        if seen.target != "/v1/chat/completions":
            return answer(b'{"detail":"Not Found"}', 404)
        return said

    return RawEngine(respond)


def asked_of(engine: RawEngine) -> Any:
    """The one chat request that an engine got."""
    [seen] = [seen for seen in engine.seen if seen.target == "/v1/chat/completions"]
    return seen.json()


def events_of(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    events = []
    for block in body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        events.append((document["type"], document))
    return events


def client_of(gw: Gateway) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gw.url, api_key="k", max_retries=0)


async def test_a_message_is_asked_as_a_chat_and_its_answer_told_as_a_message() -> None:
    said = completion("tool_calls", content="Let me see.", reasoning_content="hm", tool_calls=[
        {"id": "c1", "type": "function",
         "function": {"name": "read_file", "arguments": '{"path":"a"}'}}])  # fmt: skip
    body = message(
        [{"type": "text", "text": "look"}],
        system=[{"type": "text", "text": "You are "}, {"type": "text", "text": "kind."}],
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        metadata={"user_id": "u1"},
        temperature=0.5,
        top_k=3,
        thinking={"type": "enabled", "budget_tokens": 1024},
        min_p=0.1,
    )
    async with chat_engine(answer(said)) as engine, gateway(engine.url) as gw:
        status, data, response = await gw.post(MESSAGES, body)
        record = await gw.record()

    assert asked_of(engine) == {
        "messages": [
            {"role": "system", "content": "You are kind."},
            {"role": "user", "content": "look"},
        ],
        "model": "m",
        "max_tokens": 64,
        "temperature": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "stop": ["END"],
        "user": "u1",
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "read_file",
                    "parameters": TOOL["input_schema"],
                    "description": "Read a file",
                },
            }
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    assert (status, response.headers["content-type"]) == (200, "application/json")
    assert json.loads(data) == {
        "id": "msg_x",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "c1", "name": "read_file", "input": {"path": "a"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 36,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 64,
            "output_tokens": 5,
        },
    }
    assert (record.surface, record.outcome) == ("messages", "ok")
    assert (record.observed_hit_tokens, record.completion_tokens) == (64, 5)


async def test_a_conversation_with_tools_and_images_keeps_its_order_and_hints() -> None:
    hint = {"type": "ephemeral"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ"}}
    messages = [
        {"role": "user", "content": [
            {"type": "text", "text": "document", "cache_control": hint}, image,
            {"type": "text", "text": "question"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "read_file", "input": {"path": "a"}},
            {"type": "tool_use", "id": "c2", "name": "read_file", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [
                {"type": "text", "text": "two"}, image]},
            {"type": "text", "text": "go on"}]},
    ]  # fmt: skip
    async with chat_engine(answer(completion(content="a"))) as engine, gateway(engine.url) as gw:
        status, _, _ = await gw.post(MESSAGES, message(messages=messages))
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ"}}

    assert status == 200
    assert asked_of(engine)["messages"] == [
        {"role": "user", "content": [
            {"type": "text", "text": "document", "cache_control": hint}, url,
            {"type": "text", "text": "question"}]},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "read_file", "arguments": '{"path":"a"}'}},
            {"id": "c2", "type": "function",
             "function": {"name": "read_file", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "user", "content": [url, {"type": "text", "text": "go on"}]},
    ]  # fmt: skip


async def test_words_put_into_the_models_mouth_are_gone_on_with() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "{"}]
    async with chat_engine(answer(completion(content="}"))) as engine, gateway(engine.url) as gw:
        await gw.post(MESSAGES, message(messages=messages))
    asked = asked_of(engine)

    assert asked["continue_final_message"] is True
    assert asked["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"finish_reason": "stop"}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop", "stop_reason": 151643}, ("end_turn", None)),
        ({"finish_reason": "stop", "matched_stop": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "content_filter"}, ("refusal", None)),
    ],
    ids=str,
)
async def test_why_it_stopped_is_told_in_the_apis_words(
    choice: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    said = {"index": 0, "message": {"role": "assistant", "content": "a"}, **choice}
    whole = answer(json.dumps({"id": "x", "choices": [said]}).encode())
    last = event(id="x", choices=[{"index": 0, "delta": {}, **choice}])
    streamed = stream(content("a"), last, DONE)
    body = message(stop_sequences=["END"])
    async with chat_engine(whole) as engine, gateway(engine.url) as gw:
        _, data, _ = await gw.post(MESSAGES, body)
    async with chat_engine(streamed) as engine, gateway(engine.url) as gw:
        _, events, _ = await gw.post(MESSAGES, {**body, "stream": True})
    document = json.loads(data)
    [delta] = [e["delta"] for kind, e in events_of(events) if kind == "message_delta"]

    assert (document["stop_reason"], document["stop_sequence"]) == expected
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected


def call(index: int, arguments: str = "", **named: Any) -> bytes:
    function = {"arguments": arguments, **({"name": named.pop("name")} if "name" in named else {})}
    delta = {"tool_calls": [{"index": index, **named, "function": function}]}
    return event(id="x", choices=[{"index": 0, "delta": delta, "finish_reason": None}])


async def test_a_stream_is_told_block_by_block_as_it_comes() -> None:
    counts = event(id="x", choices=[], usage=usage(100, 9, 64))
    thought = {"index": 0, "delta": {"reasoning_content": "hm"}}
    finish = event(id="x", choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])
    pieces = [
        event(id="x", choices=[thought]),
        content("Let "),
        content("me."),
        call(0, id="A", name="search"),
        call(0, '{"q":'),
        call(0, '"x"}'),
        finish,
        counts,
        DONE,
    ]
    async with chat_engine(stream(*pieces)) as engine, gateway(engine.url) as gw:
        status, body, response = await gw.post(MESSAGES, message(stream=True))
        record = await gw.record()
    events = events_of(body)

    assert (status, response.headers["content-type"]) == (200, "text/event-stream")
    assert asked_of(engine)["stream_options"] == {"include_usage": True}
    assert [kind for kind, _ in events] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert [e["delta"] for kind, e in events if kind == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "text_delta", "text": "Let "},
        {"type": "text_delta", "text": "me."},
        {"type": "input_json_delta", "partial_json": '{"q":'},
        {"type": "input_json_delta", "partial_json": '"x"}'},
    ]
    assert events[-2][1]["usage"]["cache_read_input_tokens"] == 64
    assert events[-2][1]["usage"]["output_tokens"] == 9
    assert (record.outcome, record.completion_tokens) == ("ok", 9)
    assert record.ttft_s is not None


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "in order"])
async def test_parallel_tool_calls_come_one_after_the_other_and_whole(mixed: bool) -> None:
    first = [call(0, '{"query":'), call(0, '"x"}')]
    second = [call(1, '{"path":'), call(1, '"y"}')]
    begin = [call(0, id="A", name="search_docs"), call(1, id="B", name="read_file")]
    pieces = (
        [*begin, first[0], second[0], first[1], second[1]]
        if mixed
        else [begin[0], *first, begin[1], *second]
    )
    async with chat_engine(stream(*pieces, DONE)) as engine, gateway(engine.url) as gw:
        _, body, _ = await gw.post(MESSAGES, message(stream=True))
        async with client_of(gw) as client, client.messages.stream(**message()) as messages:
            final = await messages.get_final_message()
    open_blocks, order = set(), []
    for kind, told in events_of(body):
        if kind == "content_block_start":
            assert not open_blocks
            open_blocks.add(told["index"])
        elif kind == "content_block_delta":
            assert open_blocks == {told["index"]}
            order.append(told["delta"]["partial_json"])
        elif kind == "content_block_stop":
            open_blocks.remove(told["index"])

    assert "".join(order) == '{"query":"x"}{"path":"y"}'
    assert [(b.name, b.input) for b in final.content if b.type == "tool_use"] == [
        ("search_docs", {"query": "x"}),
        ("read_file", {"path": "y"}),
    ]
    assert final.stop_reason == "tool_use"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_an_engines_refusal_has_its_status_and_the_apis_shape(is_streamed: bool) -> None:
    refusal = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'
    async with chat_engine(answer(refusal, 400)) as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.post(MESSAGES, message(stream=is_streamed))

    error = {"type": "invalid_request_error", "message": "too long"}
    assert (status, json.loads(body)) == (400, {"type": "error", "error": error})


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(stream(content("a"), 0.02, End.RST, end=None), id="reset"),
        pytest.param(stream(content("a")), id="no end"),
        pytest.param(stream(content("a"), event(error={"message": "boom"}), DONE), id="error"),
    ],
)
async def test_a_stream_that_breaks_off_ends_with_the_apis_error_event(broken: Script) -> None:
    async with chat_engine(broken) as engine, gateway(engine.url) as gw:
        _, body, _ = await gw.post(MESSAGES, message(stream=True))
        record = await gw.record()
    kinds = [kind for kind, _ in events_of(body)]

    assert kinds[-1] == "error"
    assert "message_stop" not in kinds
    assert record.outcome in ("truncated", "upstream_error")


async def test_an_answer_that_is_no_completion_is_the_workers_failure() -> None:
    async with chat_engine(answer(b'{"choices":[]}')) as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.post(MESSAGES, message())

    assert (status, json.loads(body)["type"]) == (502, "error")


@pytest.mark.parametrize(
    "wrong",
    [
        {"mcp_servers": [{"type": "url", "url": "http://x", "name": "n"}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{}]},
        {"tools": [TOOL], "tool_choice": {"type": "odd"}},
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"messages": ["q"]},
        {"messages": [{"role": "tool", "content": "q"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        {"messages": [{"role": "user", "content": [None]}]},
        {"system": [{"type": "image"}]},
        {"output_config": {"format": {"type": "odd"}}},
    ],
    ids=str,
)
async def test_what_no_chat_can_say_is_refused_by_name(wrong: dict[str, Any]) -> None:
    async with chat_engine(answer(completion(content="a"))) as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.post(MESSAGES, message(**wrong))
        sent = [seen.target for seen in engine.seen if "chat" in seen.target]

    assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
    assert sent == []


def native_engine(said: Script) -> RawEngine:
    """An engine that speaks the API itself, and says what an empty request lacks."""

    def respond(seen: Seen) -> Script:
        return answer(b'{"type":"error"}', 400) if seen.body == b"{}" else said

    return RawEngine(respond)


async def test_an_engine_that_speaks_the_api_gets_the_bytes_as_they_came() -> None:
    body = b'{ "model":"big","max_tokens":1.0, "messages":[{"role":"user","content":"caf\\u00e9"}]}'
    said = b'{"id":"msg_1","type":"message","usage":{"input_tokens":4,"output_tokens":2,"x":1}}'
    async with (
        native_engine(answer(said)) as engine,
        gateway(engine.url, aliases={"big": "m"}) as gw,
    ):
        for _ in range(2):
            status, data, _ = await gw.post(MESSAGES + "?beta=true", data=body)
        record = await gw.record()
    asked, first, second = engine.seen

    assert (asked.target, asked.body) == (MESSAGES, b"{}")
    assert first.target == second.target == MESSAGES + "?beta=true"
    assert first.body == body.replace(b'"big"', b'"m"')
    assert (status, data) == (200, said)
    assert (record.prompt_tokens, record.completion_tokens) == (4, 2)


async def test_a_stream_of_such_an_engine_passes_unchanged_and_is_accounted() -> None:
    counts = {"input_tokens": 10, "cache_read_input_tokens": 32, "output_tokens": 1}
    start = {"id": "msg_1", "type": "message", "usage": counts}
    delta = {"type": "text_delta", "text": "a"}
    documents = [
        {"type": "message_start", "message": start},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ]
    pieces = [f"event: {d['type']}\ndata: {json.dumps(d)}\n\n".encode() for d in documents]
    async with native_engine(stream(*pieces)) as engine, gateway(engine.url) as gw:
        _, body, _ = await gw.post(MESSAGES, message(stream=True))
        record = await gw.record()
        engine.scripts.append(stream(*pieces[:-1]))
        _, cut, _ = await gw.post(MESSAGES, message(stream=True))
        cut_record = await gw.record()

    assert body == b"".join(pieces)
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("ok", 42, 7)
    assert record.observed_hit_tokens == 32
    assert record.ttft_s is not None
    assert cut.startswith(b"".join(pieces[:-1]))
    assert cut.split(b"\n")[-4].startswith(b"event: error")
    assert cut_record.outcome == "truncated"


@pytest.mark.parametrize(
    ("path", "options", "status", "kind"),
    [
        (MESSAGES, {"data": b"{"}, 400, "invalid_request_error"),
        (MESSAGES, {"data": b'{"model":"nope","messages":[]}'}, 404, "not_found_error"),
        (MESSAGES, {"data": b'{"messages":[]}'}, 400, "invalid_request_error"),
        (MESSAGES + "/batches", {"data": b"{}"}, 404, "not_found_error"),
        (MESSAGES + "/count_tokens", {"data": b"["}, 400, "invalid_request_error"),
        (MESSAGES, {"data": b"{}", "headers": {"expect": "x"}}, 417, "invalid_request_error"),
        (MESSAGES, {"data": b"{}", "headers": {"content-encoding": "odd"}}, 415, None),
    ],
)
async def test_every_error_of_the_gateway_has_the_apis_shape(
    path: str, options: dict[str, Any], status: int, kind: str | None
) -> None:
    async with RawEngine() as engine, gateway(engine.url) as gw:
        got, body, response = await gw.post(path, **options)
    document = json.loads(body)

    assert (got, document["type"]) == (status, "error")
    assert document["error"]["type"] == (kind or "invalid_request_error")
    assert document["error"]["message"]
    assert response.headers["x-request-id"]


async def test_a_get_of_it_is_not_allowed_in_its_own_shape() -> None:
    async with RawEngine() as engine, gateway(engine.url) as gw:
        status, body, _ = await gw.get(MESSAGES)

    assert (status, json.loads(body)["type"]) == (405, "error")


async def test_a_pool_without_workers_is_overloaded_in_its_own_shape() -> None:
    async with gateway() as gw:
        status, body, response = await gw.post(MESSAGES, message())

    assert (status, json.loads(body)["error"]["type"]) == (503, "overloaded_error")
    assert response.headers["retry-after"]


async def test_the_official_client_raises_its_own_errors() -> None:
    refusal = b'{"error":{"message":"queue full"}}'
    async with (
        chat_engine(answer(refusal, 429, "retry-after: 7")) as engine,
        gateway(engine.url) as gw,
        client_of(gw) as client,
    ):
        with pytest.raises(anthropic.RateLimitError, match="queue full") as caught:
            await client.messages.create(**message())
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(**{**message(), "model": "nope"})

    assert caught.value.response.headers["retry-after"] == "7"


async def test_tokens_are_counted_by_a_worker_where_the_gateway_cannot() -> None:
    def respond(seen: Seen) -> Script:
        if seen.target == "/tokenize":
            return answer(b'{"count":12,"tokens":[]}')
        return answer(b"{}", 404)

    async with RawEngine(respond) as engine, gateway(engine.url) as gw, client_of(gw) as client:
        asked = message(system="s")
        del asked["max_tokens"]
        counted = await client.messages.count_tokens(**asked)
        record = await gw.record()

    assert counted.input_tokens == 12
    assert engine.seen[-1].json()["messages"][0] == {"role": "system", "content": "s"}
    assert (record.surface, record.outcome, record.status) == ("count_tokens", "ok", 200)


async def test_nobody_who_can_count_is_told_with_what_to_configure() -> None:
    async with RawEngine(lambda _: answer(b"{}", 404)) as engine, gateway(engine.url) as gw:
        status, body, response = await gw.post(MESSAGES + "/count_tokens", message())

    assert (status, json.loads(body)["type"]) == (501, "error")
    assert b"tokenizer" in body
    assert response.headers["x-should-retry"] == "false"
