"""What a body may hold: anything that is JSON, each policy member once, and no more levels than."""

from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest

from gateway.errors import InvalidRequest
from gateway.proxy.body import MAX_DEPTH, SINGLE_KEYS, parse_body
from tests.support import cpu_s

CHAT = b'{"model":"m","messages":[{"role":"user","content":"q"}]%s}'
# One value in every kind of place.
PLACES = [
    b',"temperature":%s',
    b',"x":[1,%s]',
    b',"tools":[{"function":{"parameters":{"default":%s}}}]',
    b',"response_format":{"a":{"b":[{"c":%s}]}}',
    b',"logit_bias":{"1":%s},"z":1',
]
VALUES: dict[str, bytes] = {
    "model": b'"m"',
    "stream": b"true",
    "cache_salt": b'"s"',
    "kv_transfer_params": b'{"max_offload_tokens":0}',
    "vllm_xargs": b'{"a":1}',
    "warmlane": b'{"session":"s"}',
}


def refusal(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        parse_body(body, "chat")
    return raised.value


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[:12].decode())
@pytest.mark.parametrize(
    "literal",
    [
        b"NaN",
        b"-NaN",
        b"nan",
        b"NAN",
        b"Infinity",
        b"-Infinity",
        b"+Infinity",
        b"inf",
        b"-inf",
        b"Inf",
        b"1.#INF",
        b"+1",
        b"01",
        b".5",
        b"1.",
        b"0x1",
        b"undefined",
        b"None",
        b"True",
    ],
    ids=bytes.decode,
)
def test_what_is_no_number_in_json_is_refused_everywhere(literal: bytes, place: bytes) -> None:
    error = refusal(CHAT % (place % literal))

    assert (error.status, error.code) == (400, "invalid_json")


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[:12].decode())
@pytest.mark.parametrize(
    "number",
    [
        b"18446744073709551616",
        b"-9223372036854775809",
        b"1" + b"0" * 400,
        b"-1" + b"0" * 400,
        b"9" * 5000,
        b"1e999",
        b"-1E+400",
        b"1." + b"0" * 500,
        b"1e-999",
        b"-0",
        b"-0.0",
    ],
    ids=lambda number: number[:24].decode(),
)
def test_numbers_of_any_size_are_json(number: bytes, place: bytes) -> None:
    document = parse_body(CHAT % (place % number), "chat")

    assert document["model"] == "m"


def test_a_huge_number_is_read_as_the_largest_and_text_that_looks_like_one_stays() -> None:
    document = parse_body(CHAT % (b',"a":1e999,"b":-1e999,"c":"1e999 \\" 1e999","d":7'), "chat")

    assert (document["a"], document["b"]) == (1.7976931348623157e308, -1.7976931348623157e308)
    assert (document["c"], document["d"]) == ('1e999 " 1e999', 7)


@pytest.mark.parametrize("bad", [b"NaN", b'"\\ud800"', b"[" * 2000 + b"]" * 2000])
def test_a_huge_number_hides_nothing_else(bad: bytes) -> None:
    assert refusal(CHAT % (b',"a":1e999,"b":' + bad)).status == 400


def spellings(name: str) -> list[str]:
    escaped = "".join(f"\\u{ord(char):04x}" for char in name)
    upper = "".join(f"\\u{ord(char):04X}" for char in name)
    return [f'"{name}"', f'"\\u{ord(name[0]):04x}{name[1:]}"', f'"{escaped}"', f'"{upper}"']


@pytest.mark.parametrize("second", range(4), ids=["plain", "one escape", "escaped", "upper case"])
@pytest.mark.parametrize("first", range(4), ids=["plain", "one escape", "escaped", "upper case"])
@pytest.mark.parametrize("name", SINGLE_KEYS)
def test_a_policy_member_that_stands_twice_is_refused_in_every_spelling(
    name: str, first: int, second: int
) -> None:
    value = VALUES[name].decode()
    spelled = spellings(name)
    rest = "" if name == "model" else '"model":"m",'
    body = f'{{{spelled[first]}:{value},{rest}"messages":[], {spelled[second]} : {value}}}'

    error = refusal(body.encode())

    assert (error.status, error.param, error.code) == (400, name, "duplicate_key")
    assert name in error.message


@pytest.mark.parametrize("name", SINGLE_KEYS)
def test_a_policy_members_name_may_stand_anywhere_else(name: str) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": name, "x": {name: 1}}, {name: name}],
        "tools": [{"function": {"name": name, "parameters": {"properties": {name: {}}}}}],
        "metadata": {name: {name: [name]}},
        f"{name}s": name,
        name: orjson.loads(VALUES[name]),
    }

    assert parse_body(json.dumps(body).encode(), "chat") == body


def test_duplicates_inside_nested_objects_and_of_other_members_are_the_engines_business() -> None:
    body = (
        b'{"model":"m","seed":1,"seed":2,"messages":[{"model":1,"model":2,"stream":1,"stream":2}]}'
    )

    assert parse_body(body, "chat")["seed"] == 2


@pytest.mark.parametrize(
    "text",
    [
        b"\\ud800",
        b"\\udc97",
        b"\\ud800\\ud800",
        b"\\udc00\\ud800",
        b"\\uD800x",
        b"\xed\xa0\x80",
        b"\xff",
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
        b"\x00",
        b"\n",
        b"\\x41",
        b"\\u12",
    ],
    ids=repr,
)
def test_text_that_no_engine_could_decode_is_refused(text: bytes) -> None:
    for body in (CHAT % (b',"a":"' + text + b'"'), CHAT % (b',"' + text + b'":1')):
        error = refusal(body)
        assert (error.status, error.code) == (400, "invalid_json")
        orjson.loads(error.openai_body())


@pytest.mark.parametrize("num_levels", [10_000, 1_000_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")], ids=["[", "{"])
@pytest.mark.parametrize("is_closed", [True, False])
def test_nesting_beyond_the_limit_is_refused_at_once_and_the_limit_named(
    opening: bytes, closing: bytes, num_levels: int, is_closed: bool
) -> None:
    end = b"1" + closing * num_levels if is_closed else b""
    started_s = time.thread_time()

    error = refusal(CHAT % (b',"a":' + opening * num_levels + end))

    assert (error.status, error.code) == (400, "json_too_deep")
    assert str(MAX_DEPTH) in error.message
    assert time.thread_time() - started_s < 1


def test_nesting_up_to_the_limit_is_read() -> None:
    inner = MAX_DEPTH - 1

    document: Any = parse_body(CHAT % (b',"a":' + b"[" * inner + b"]" * inner), "chat")

    assert document["a"] != []
    assert (
        refusal(CHAT % (b',"a":' + b"[" * (inner + 1) + b"]" * (inner + 1))).code == "json_too_deep"
    )


@pytest.mark.parametrize(
    "text",
    ["<|im_start|>system", "<|endoftext|>", "[INST]", "</s>", "<start_of_turn>", "\u2028\x7f"],
)
def test_text_that_looks_like_control_tokens_is_text(text: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}

    assert parse_body(json.dumps(body, ensure_ascii=False).encode(), "chat") == body


@pytest.mark.parametrize(
    "make",
    [
        lambda n: b',"a":1e999,"b":[' + b"1e999," * n + b"1]",
        lambda n: b',"a":' + b"9" * n,
        lambda n: b',"a":1e999,"b":"' + b'\\"' * n + b'"',
        lambda n: b',"a":"' + b'\\"model\\"' * n + b'"',
        lambda n: b',"a":[' + b'{"model":1},' * n + b"1]",
        lambda n: b"".join(b',"k%d":1' % i for i in range(n)) + b',"a":"\\u0061"',
    ],
    ids=["huge numbers", "a huge number", "quotes", "quoted names", "nested names", "members"],
)
def test_a_hostile_body_costs_time_in_proportion_to_its_bytes(make: Any) -> None:
    def parse_s(n: int) -> float:
        body = CHAT.replace(b"%s", make(n))
        return cpu_s(lambda: parse_body(body, "chat"), repeats=3)

    # Sixteen times as long; a quadratic check takes 256 times as much.
    assert parse_s(160_000) < 64 * max(parse_s(10_000), 0.001)
