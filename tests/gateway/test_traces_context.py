"""The W3C's headers, read strictly, and what answers tell of themselves."""

from __future__ import annotations

import random
import string
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocols.surfaces import Surfaces
from gateway.telemetry.record import RequestRecord
from gateway.tracing.answers import MAX_TEXT_CHARS, told_by
from gateway.tracing.context import (
    parse_traceparent,
    traceparent,
    tracestate,
)
from gateway.tracing.sampling import Tracing

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"

VALID = {
    "sampled": (GOOD, 0x01),
    "not sampled": (f"00-{TRACE}-{SPAN}-00", 0x00),
    "all flags": (f"00-{TRACE}-{SPAN}-ff", 0xFF),
    "a later version": (f"01-{TRACE}-{SPAN}-01", 0x01),
    "a later version with more": (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be", 0x01),
    "a later version with an empty part": (f"cc-{TRACE}-{SPAN}-01-", 0x01),
}
INVALID = {
    "empty": "",
    "no parts": "x",
    "version ff": f"ff-{TRACE}-{SPAN}-01",
    "version 00 with more": f"{GOOD}-more",
    "version 00 with an end": f"{GOOD}-",
    "a later version without a dash": f"cc-{TRACE}-{SPAN}-01.what",
    "upper case": GOOD.upper(),
    "a trace of zeros": f"00-{'0' * 32}-{SPAN}-01",
    "a span of zeros": f"00-{TRACE}-{'0' * 16}-01",
    "a short trace": f"00-{TRACE[1:]}-{SPAN}-01",
    "a long span": f"00-{TRACE}-{SPAN}0-01",
    "one flag digit": f"00-{TRACE}-{SPAN}-1",
    "three flag digits": f"00-{TRACE}-{SPAN}-011",
    "no flags": f"00-{TRACE}-{SPAN}",
    "not hex": f"00-{TRACE[:-1]}g-{SPAN}-01",
    "other dashes": GOOD.replace("-", "_"),
    "a space before": f" {GOOD}",
    "a line end": f"{GOOD}\n",
    "digits of another script": GOOD.replace("0", "\u0660"),
    "two in one": f"{GOOD},{GOOD}",
}


@pytest.mark.parametrize(("value", "flags"), VALID.values(), ids=VALID)
def test_a_valid_parent_is_taken(value: str, flags: int) -> None:
    parent = parse_traceparent(value)

    assert parent == (int(TRACE, 16), int(SPAN, 16), flags)


@pytest.mark.parametrize("value", INVALID.values(), ids=INVALID)
def test_any_other_parent_is_none(value: str) -> None:
    assert parse_traceparent(value) is None


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_what_is_written_is_read_again(trace_id: int, span_id: int, flags: int) -> None:
    assert parse_traceparent(traceparent(trace_id, span_id, flags)) == (trace_id, span_id, flags)


LONG_KEY = "k" * 256
STATES = {
    "one": (["a=1"], "a=1"),
    "spaces and empty members": (["a=1 ,\t b=2", "", ",,"], "a=1,b=2"),
    "several headers": (["a=1,b=2", "c=3"], "a=1,b=2,c=3"),
    "a tenant's key": (["fw529a3039@dt=FfAAAA"], "fw529a3039@dt=FfAAAA"),
    "a value with spaces inside": (["a= b c"], "a= b c"),
    "the longest key": ([f"{LONG_KEY}=1"], f"{LONG_KEY}=1"),
    "as many as may be": (
        [",".join(f"k{n}=1" for n in range(32))],
        ",".join(f"k{n}=1" for n in range(32)),
    ),
    "too many": ([",".join(f"k{n}=1" for n in range(33))], ""),
    "a key twice": (["a=1,a=2"], ""),
    "no value": (["a="], ""),
    "no key": (["=1"], ""),
    "an upper-case key": (["A=1"], ""),
    "a key too long": ([f"{LONG_KEY}k=1"], ""),
    "a value too long": ([f"a={'v' * 257}"], ""),
    "no pair": (["a=1,b"], ""),
    "an equals sign in a value": (["a=1=2"], ""),
    "not ASCII": (["a=\u00e9"], ""),
    "a control character": (["a=\x01"], ""),
    "far too long": ([",".join(f"{n}{'k' * 240}@v={'v' * 250}" for n in range(20))], ""),
}


@pytest.mark.parametrize(("values", "expected"), STATES.values(), ids=STATES)
def test_a_state_is_passed_on_as_a_whole_or_not_at_all(values: list[str], expected: str) -> None:
    raw = [(b"TraceState", value.encode("latin-1")) for value in values]

    assert ",".join("=".join(pair) for pair in tracestate([(b"x", b"a=1"), *raw])) == expected


def begin(ratio: float, **headers: str) -> tuple[Any, RequestRecord]:
    record = RequestRecord("r", "chat")
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    tracing = Tracing(ratio, None, rng=random.Random(7))  # type: ignore[arg-type]  # never sent
    return tracing.begin(headers, raw, record, 0.0), record


@pytest.mark.parametrize("value", INVALID.values(), ids=INVALID)
def test_an_invalid_parent_leaves_the_decision_to_the_lot(value: str) -> None:
    trace, record = begin(1.0, traceparent=value, tracestate="a=1")

    assert trace is not None
    assert (trace.parent, trace.state) == (None, ())
    assert record.trace_id is not None
    assert record.trace_id != TRACE
    assert begin(0.0, traceparent=value) == (None, RequestRecord("r", "chat"))


@pytest.mark.parametrize(
    ("flags", "sent"), [("01", 0x01), ("03", 0x03), ("ff", 0x03), ("02", None), ("00", None)]
)
def test_only_known_flags_are_passed_on(flags: str, sent: int | None) -> None:
    trace, _ = begin(1.0, traceparent=f"00-{TRACE}-{SPAN}-{flags}")

    assert (None if trace is None else trace.flags) == sent


# Answers.

MESSAGE = {"id": "msg-1", "model": "c", "role": "assistant"}
RESPONSE = {"id": "resp-1", "model": "g", "status": "completed"}
ANSWERS: dict[str, tuple[list[Any], tuple[Any, ...]]] = {
    "a message": (
        [{**MESSAGE, "stop_reason": "end_turn", "usage": {"cache_creation_input_tokens": 3}}],
        ("msg-1", "c", ["end_turn"], 3, None),
    ),
    "a stream of a message": (
        [
            {"type": "message_start", "message": MESSAGE},
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {}},
            {"type": "message_stop"},
        ],
        ("msg-1", "c", ["max_tokens"], None, None),
    ),
    "a stream of a response": (
        [
            {"type": "response.created", "response": RESPONSE},
            {
                "type": "response.completed",
                "response": {
                    **RESPONSE,
                    "usage": {"output_tokens_details": {"reasoning_tokens": 5}},
                },
            },
        ],
        ("resp-1", "g", [], None, 5),
    ),
    "two choices": (
        [{"id": "x", "choices": [{"finish_reason": "stop"}, {"finish_reason": "length"}]}],
        ("x", None, ["stop", "length"], None, None),
    ),
    "nothing": ([], (None, None, [], None, None)),
    "odd kinds": (
        [
            {"id": 1, "model": ["m"], "choices": 3, "usage": 4, "delta": 5, "message": 6},
            {"choices": [1, {"finish_reason": {}}], "usage": {"prompt_tokens_details": 1}},
            {"usage": {"prompt_tokens_details": {"cache_write_tokens": "1"}}},
            ["x"],
        ],
        (None, None, [], None, None),
    ),
}


@pytest.mark.parametrize(("documents", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_answers_of_every_api_are_read(documents: list[Any], expected: tuple[Any, ...]) -> None:
    told = told_by([orjson.dumps(document) for document in documents])

    assert (
        told.response_id,
        told.model,
        told.finish_reasons,
        told.cache_write_tokens,
        told.reasoning_tokens,
    ) == expected


def test_a_first_event_that_is_among_the_last_counts_once() -> None:
    first = {"id": "x", "choices": [{"finish_reason": "stop"}]}

    told = told_by([first, b'{"id":"x","choices":[{"finish_reason":"stop"}]}', b"[DONE]"])

    assert (told.response_id, told.finish_reasons) == ("x", ["stop"])


def test_what_workers_say_of_themselves_is_bounded() -> None:
    long = string.ascii_letters * 1000
    choices = [{"finish_reason": long}] * 1000

    told = told_by([{"id": long}, b'{"choices":%b}' % str(choices).replace("'", '"').encode()])

    assert len(told.response_id or "") == MAX_TEXT_CHARS
    assert sum(map(len, told.finish_reasons)) <= 16 * MAX_TEXT_CHARS


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/audio/speech", "/v1/audio/{rest}"),
        ("/v2/mine", "/v2/mine"),
        ("/v2/all/of/it", "/v2/all/{rest}"),
        ("/v1/nothing", None),
        ("/v1/audio/../load_lora_adapter", None),
    ],
)
def test_a_route_is_the_pattern_that_found_the_path(path: str, route: str | None) -> None:
    assert Surfaces(["/v2/mine", "/v2/all/*"]).route(path) == route
