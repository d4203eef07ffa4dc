"""A tool set goes out as it was first seen; what a model reads differently is another set."""

from __future__ import annotations

import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_index.canonical import (
    Peek,
    canonicalise,
)
from tests.prefix_index.canonical_parts import (
    TOOLS,
    Clock,
    apply,
    memory,
    with_keys_shuffled,
    written,
)


@settings(max_examples=100, deadline=None)
@given(st.permutations(TOOLS), st.permutations(TOOLS), st.integers(0, 2**32))
def test_a_tool_set_goes_out_as_it_was_first_seen_whatever_its_order_and_handwriting(
    first: list[Any], second: list[Any], seed: int
) -> None:
    rng = random.Random(seed)
    seen = memory()
    sent = written([with_keys_shuffled(t, rng) for t in first], rng).encode()
    again = written([with_keys_shuffled(t, rng) for t in second], rng).encode()

    apply(b'{"messages":[],"tools":' + sent + b"}", seen=seen)
    form = apply(b'{"tools": ' + again + b' ,"messages":[]}', seen=seen)

    assert form.raw == b'{"tools": ' + sent + b' ,"messages":[]}'


def function(**schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


DIFFERENT = {
    "order of properties": (
        function(properties={"a": {"type": "string"}, "b": {}}),
        function(properties={"b": {}, "a": {"type": "string"}}),
    ),
    "order of nested properties": (
        function(items={"anyOf": [{"properties": {"a": {}, "b": {}}}]}),
        function(items={"anyOf": [{"properties": {"b": {}, "a": {}}}]}),
    ),
    "order of enum": (function(enum=["a", "b"]), function(enum=["b", "a"])),
    "order of required": (function(required=["a", "b"]), function(required=["b", "a"])),
    "order of a union": (
        function(oneOf=[{}, {"type": "null"}]),
        function(oneOf=[{"type": "null"}, {}]),
    ),
    "keys of a default": (function(default={"a": 1, "b": 2}), function(default={"b": 2, "a": 1})),
    "keys of an unknown member": (
        function(**{"x-y": {"a": 1, "b": 2}}),
        function(**{"x-y": {"b": 2, "a": 1}}),
    ),
    "1.0 and 1": (function(minimum=1.0), function(minimum=1)),
    "-0.0 and 0.0": (function(default=-0.0), function(default=0.0)),
    "numbers beyond 64 bits": (function(default=2**64 + 1), function(default=2**64 + 2)),
    "null and absent": (function(default=None), function()),
    "{} and absent": (function(items={}), function()),
    "true and 1": (function(default=True), function(default=1)),
    "text and its like": (function(default="1"), function(default=1)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_a_model_reads_differently_is_another_set(name: str) -> None:
    seen = memory()
    first, second = (json.dumps({"messages": [], "tools": [t]}).encode() for t in DIFFERENT[name])

    assert apply(first, seen=seen).raw == first
    assert apply(second, seen=seen).raw == second
    assert apply(first, seen=seen).raw == first


@pytest.mark.parametrize(
    "tools",
    [
        b'[{"type":"function","function":{"name":"f","name":"g"}}]',
        b'[{"type":"function","type":"function"}]',
        b"[7]",
        b"[null]",
        b'[{"function":{"parameters":{"default":1e999}}}]',
        b'[{"function":{"parameters":' + b'{"items":' * 300 + b"1" + b"}" * 300 + b"}}]",
        b'[{"function":{"parameters":' + b"[" * 9999 + b"]" * 9999 + b"}}]",
        b"[]",
        b"null",
        b'{"a":1}',
    ],
    ids=lambda tools: tools[:40].decode(),
)
def test_tools_that_cannot_be_told_apart_safely_are_left_alone(tools: bytes) -> None:
    raw = b'{"messages":[],"tools":' + tools + b"}"
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:  # the gateway refuses these before
        body = {"messages": [], "tools": [{}]}
    seen = memory()

    form = canonicalise(body, raw, rules=["stable-tools"], tenant="", memory=seen)

    assert form.raw is raw
    assert len(seen) == 0


def two_orders() -> tuple[bytes, bytes]:
    first, second = TOOLS[:2], TOOLS[1::-1]
    return (
        orjson.dumps({"messages": [], "tools": first}),
        orjson.dumps({"messages": [], "tools": second}),
    )


def test_tenants_never_share_a_first_seen_order() -> None:
    first, second = two_orders()
    seen = memory()
    apply(first, seen=seen, tenant="acme")

    assert apply(second, seen=seen, tenant="globex").raw == second
    assert apply(first, seen=seen, tenant="globex").raw == second
    assert apply(second, seen=seen, tenant="acme").raw == first


def test_a_form_is_forgotten_once_nobody_used_it_for_its_time() -> None:
    first, second = two_orders()
    clock = Clock()
    seen = memory(clock=clock, ttl_s=10)
    apply(first, seen=seen)
    for _ in range(3):
        clock.now_s += 9
        assert apply(second, seen=seen).raw == first

    clock.now_s += 11

    assert apply(second, seen=seen).raw == second
    assert (len(seen), seen.num_bytes) == (1, len(orjson.dumps(orjson.loads(second)["tools"])))


def test_the_memory_is_bounded_in_sets_and_bytes_and_forgets_the_least_used() -> None:
    seen = memory(max_sets=3, max_bytes=100)
    for i in range(5):
        seen.keep("t", bytes([i]), b"x" * 10)
        seen.keep("t", bytes([2]), b"y" * 10)
    assert (len(seen), seen.num_bytes) == (3, 30)
    assert [seen.get("t", bytes([i])) is not None for i in range(5)] == [0, 0, 1, 1, 1]

    seen.keep("t", b"large", b"z" * 95)

    assert (len(seen), seen.num_bytes) == (1, 95)
    assert seen.keep("t", b"larger", b"z" * 101) == b"z" * 101
    assert (len(seen), seen.num_bytes) == (0, 0)


def test_peeking_reads_the_memory_and_keeps_nothing() -> None:
    first, second = two_orders()
    seen = memory()

    assert apply(first, seen=Peek(seen)).raw == first
    assert len(seen) == 0
    apply(first, seen=seen)
    assert apply(second, seen=Peek(seen)).raw == first
