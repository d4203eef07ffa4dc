"""The translation alone: whatever comes in, it is said in order, or refused by name."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import InvalidRequest, MalformedAnswer
from gateway.protocols.anthropic import MessageStream, to_chat, to_message
from gateway.protocols.anthropic.answer import input_of
from gateway.protocols.anthropic.stream import MAX_KEPT_CHARS
from gateway.protocols.multipart import parts_of
from gateway.protocols.responses import ResponseHomes, readable, routing_text
from tests.fakes.engine import content, event

# Words of the APIs, so that odd values stand where they hurt.
_names = st.sampled_from(
    [
        *("role", "content", "type", "text", "source", "tool_use_id", "input", "name", "system"),
        *("messages", "tools", "tool_choice", "input_schema", "output_config", "format", "delta"),
        *("choices", "message", "tool_calls", "function", "arguments", "index", "finish_reason"),
        *("usage", "prompt_tokens", "prompt_tokens_details", "error", "instructions", "output"),
    ]
)
_words = st.sampled_from(
    [
        *("user", "assistant", "system", "text", "image", "tool_use", "tool_result", "thinking"),
        *("document", "base64", "tool", "any", "json_schema", "message", "function_call", "stop"),
    ]
)
_odd = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4),
    max_leaves=16,
)


@given(st.dictionaries(_names, _odd, max_size=6))
@settings(max_examples=150, deadline=None)
def test_no_request_does_more_than_be_refused(body: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        orjson.dumps(to_chat(body))
    readable(body)
    routing_text(body)


@given(_odd)
@settings(max_examples=100, deadline=None)
def test_no_answer_does_more_than_be_malformed(document: Any) -> None:
    with suppress(MalformedAnswer):
        orjson.loads(to_message(document, model="m", stop_sequences=()))
    choice = {"index": 0, "delta": document, "finish_reason": None}
    stream = MessageStream(model="m")
    for told in (document, {"choices": [choice]}, {"choices": document}):
        with suppress(MalformedAnswer):
            stream.feed(event(**told) if isinstance(told, dict) else b"data: 1\n\n")
    stream.end()


@given(st.binary(max_size=300), st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_form_does_more_than_be_refused(body: bytes, boundary: str) -> None:
    for kind in (boundary, f"multipart/form-data; boundary={boundary}"):
        with suppress(InvalidRequest):
            asyncio.run(parts_of(body, kind))
        mark = b"--" + boundary.encode("latin-1", "replace")
        with suppress(InvalidRequest):
            asyncio.run(parts_of(mark + b"\r\n" + body + b"\r\n" + mark + b"--", kind))


def call(index: int, arguments: str, **named: Any) -> bytes:
    function: dict[str, Any] = {"arguments": arguments}
    if "name" in named:
        function["name"] = named.pop("name")
    delta = {"tool_calls": [{"index": index, **named, "function": function}]}
    return event(id="x", choices=[{"index": 0, "delta": delta}])


_calls = st.lists(
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), min_size=1),
    min_size=1,
    max_size=4,
)


@given(_calls, st.randoms(use_true_random=False), st.text(max_size=5))
@settings(max_examples=100, deadline=None)
def test_any_mixture_of_calls_becomes_whole_blocks_in_order(
    inputs: list[dict[str, Any]], random: Any, said: str
) -> None:
    stream = MessageStream(model="m")
    pieces = [list(json.dumps(arguments)) for arguments in inputs]
    out = stream.feed(content(said)) if said else b""
    begun: set[int] = set()
    while left := [k for k, rest in enumerate(pieces) if rest]:
        # Engines begin calls in order, whatever they mix later.
        fresh = [k for k in left if k not in begun][:1]
        k = random.choice([k for k in left if k in begun] + fresh)
        named = {} if k in begun else {"id": f"c{k}", "name": f"f{k}"}
        begun.add(k)
        out += stream.feed(call(k, "".join(pieces[k].pop(0) for _ in range(1)), **named))
    out += stream.end()

    open_index: int | None = None
    arguments: dict[int, str] = {}
    names: dict[int, str] = {}
    for block in out.decode().strip().split("\n\n"):
        told = json.loads(block.split("\ndata: ")[1])
        if told["type"] == "content_block_start":
            assert open_index is None
            open_index = told["index"]
            if told["content_block"]["type"] == "tool_use":
                names[open_index], arguments[open_index] = told["content_block"]["name"], ""
        elif told["type"] == "content_block_delta":
            assert told["index"] == open_index
            if open_index in arguments:
                arguments[open_index] += told["delta"]["partial_json"]
        elif told["type"] == "content_block_stop":
            assert told["index"] == open_index
            open_index = None
    assert open_index is None
    assert sorted(names) == list(names)
    assert {name: json.loads(arguments[index]) for index, name in names.items()} == {
        f"f{k}": given for k, given in enumerate(inputs)
    }


@pytest.mark.parametrize("step", [1, 2, 100])
@pytest.mark.parametrize(
    "arguments",
    [
        '"look_up"',
        "null",
        "[1]",
        "5",
        '\u00a0{"a":1}',
        'of "x"\n\u00e9\\',
        ' \n{"a": "\u00e9"}',
        "",
    ],
)
def test_arguments_that_are_no_object_are_streamed_as_a_whole_answer_has_them(
    arguments: str, step: int
) -> None:
    """Clients read whatever is streamed as an object, and fail on anything else."""
    pieces = [arguments[i : i + step] for i in range(0, len(arguments), step)]
    stream = MessageStream(model="m")
    out = stream.feed(call(0, "", id="a", name="f"))
    out += b"".join(stream.feed(call(0, piece)) for piece in pieces)
    out += stream.feed(call(1, "{}", id="b", name="g")) + stream.end()
    told = [orjson.loads(line[6:]) for line in out.splitlines() if line.startswith(b"data: ")]
    inputs = ["", ""]
    for document in told:
        if document["type"] == "content_block_delta":
            inputs[document["index"]] += document["delta"]["partial_json"]

    assert json.loads(inputs[0] or "{}") == input_of(arguments)
    assert inputs[1] == "{}"


def test_calls_that_wait_are_bounded() -> None:
    stream = MessageStream(model="m")
    stream.feed(call(0, '{"a":"', id="A", name="f"))
    part, refused = "x" * (MAX_KEPT_CHARS // 4), 0
    for _ in range(6):
        try:
            stream.feed(call(1, part, id="B", name="g"))
        except MalformedAnswer:
            refused += 1

    assert refused


def test_ids_of_responses_are_bounded_and_their_tenants_own() -> None:
    homes = ResponseHomes(max_responses=2)
    for number in range(3):
        homes.keep("t", f"r{number}", f"w{number}")
        homes.find("t", "r0")
    for odd in (None, 3, "", "x" * 300):
        homes.keep("t", odd, "w")

    assert len(homes) == 2
    assert (homes.find("t", "r0"), homes.find("t", "r1"), homes.find("t", "r2")) == ("w0", "", "w2")
    assert homes.find("other", "r2") == ""
    assert homes.find("t", ["r2"]) == ""


def test_a_request_to_the_responses_api_reads_as_the_chat_that_engines_make_of_it() -> None:
    function = {"type": "function", "name": "f", "parameters": {}}
    body = {
        "model": "m",
        "instructions": "Be kind.",
        "input": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        "tools": [function],
    }
    read = readable(body)

    assert read is not None
    assert [m["role"] for m in read["messages"]] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert read["tools"][0]["function"]["name"] == "f"
    for unreadable in (
        {**body, "previous_response_id": "r"},
        {**body, "tools": [{"type": "web_search"}]},
        {**body, "input": [{"type": "item_reference", "id": "i"}]},
        {**body, "input": [{"role": "user", "content": [{"type": "input_file"}]}]},
    ):
        assert readable(unreadable) is None
    assert routing_text(body).rstrip() == "Be kind.\nd\nq"
