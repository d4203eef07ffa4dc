"""A splice changes the members it names and no other byte."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.proxy.splice import splice
from prefix_index.canonical.spans import members

NAMES = st.sampled_from(["model", "warmlane", "cache_salt", "messages", "seed", "mödel", 'q"uote'])
SCALARS = st.sampled_from(
    [
        *("18446744073709551615", "-9223372036854775808", "1.0", "1e3", "0", "true", "null", '""'),
        *('"a\\"b\\\\"', '"\\u00e9\\ud83d\\ude00"', '"]},{["', '"\\\\"', '"\u00e9\U0001f600"'),
    ]
)
SPACE = st.sampled_from(["", " ", "\n", "\t \r\n"])


@st.composite
def keys(draw: st.DrawFn) -> tuple[str, str]:
    """A name and one of its spellings, plain or with escapes."""
    name = draw(NAMES)
    if draw(st.booleans()):
        return name, json.dumps(name, ensure_ascii=draw(st.booleans()))
    return name, '"' + "".join(f"\\u{ord(char):04x}" for char in name) + '"'


@st.composite
def values(draw: st.DrawFn, depth: int = 2) -> str:
    kind = draw(st.sampled_from(["scalar", "list", "object"] if depth else ["scalar"]))
    if kind == "scalar":
        return draw(SCALARS)
    space = draw(SPACE)
    items = [draw(values(depth=depth - 1)) for _ in range(draw(st.integers(0, 3)))]
    if kind == "list":
        return f"[{space}" + f",{space}".join(items) + f"{space}]"
    named = [f"{draw(keys())[1]}{space}:{item}" for item in items]
    return f"{{{space}" + f",{space}".join(named) + f"{space}}}"


@st.composite
def objects(draw: st.DrawFn) -> tuple[str, list[tuple[str, str, str]]]:
    """The text of an object, and for each member its name, its key's text and its value's text."""
    parts = [(*draw(keys()), draw(values())) for _ in range(draw(st.integers(0, 5)))]
    text = draw(SPACE) + "{" + draw(SPACE)
    for i, (_, key, value) in enumerate(parts):
        text += ("," + draw(SPACE) if i else "") + key + draw(SPACE) + ":" + draw(SPACE) + value
        text += draw(SPACE)
    return text + "}" + draw(SPACE), parts


@given(objects())
def test_members_are_found_with_their_bytes_whatever_the_nesting(
    case: tuple[str, list[tuple[str, str, str]]],
) -> None:
    body, parts = case[0].encode(), case[1]

    found = [(m.name, body[m.value_start : m.end].decode()) for m in members(body)]

    assert found == [(name, value) for name, _, value in parts]


@given(objects(), NAMES)
def test_a_replaced_value_changes_nothing_else(
    case: tuple[str, list[tuple[str, str, str]]], name: str
) -> None:
    body, parts = case[0].encode(), case[1]
    spliced = splice(body, put={name: b'"new"'})

    if any(part[0] == name for part in parts):
        expected = body
        for member in reversed(members(body)):
            if member.name == name:
                expected = expected[: member.value_start] + b'"new"' + expected[member.end :]
        assert spliced == expected
    else:
        assert len(spliced) == len(body) + len(orjson.dumps(name)) + len(b':"new"') + bool(parts)
    assert orjson.loads(spliced) == {**orjson.loads(body), name: "new"}


@given(objects(), NAMES)
def test_a_removed_member_takes_one_comma_and_leaves_the_others_byte_for_byte(
    case: tuple[str, list[tuple[str, str, str]]], name: str
) -> None:
    body, parts = case[0].encode(), case[1]
    spliced = splice(body, drop={name})

    kept = [(n, value) for n, _, value in parts if n != name]
    assert [(m.name, spliced[m.value_start : m.end].decode()) for m in members(spliced)] == kept
    rest = {n: value for n, value in orjson.loads(body).items() if n != name}
    assert orjson.loads(spliced) == rest
    if len(kept) == len(parts):
        assert spliced == body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1, "warmlane":{"x":[1]}, "b":2}', b'{"a":1, "b":2}'),
        (b'{"warmlane":{}, "b":2}', b'{"b":2}'),
        (b'{"b":2 , "warmlane":null }', b'{"b":2 }'),
        (b'{ "warmlane":1 }', b"{  }"),
        (b'{"m":{"warmlane":1}}', b'{"m":{"warmlane":1}}'),
    ],
)
def test_removal_in_every_position(body: bytes, expected: bytes) -> None:
    assert splice(body, drop={"warmlane"}) == expected


def test_replacing_removing_and_inserting_happen_in_one_pass() -> None:
    body = b'{"model":"gpt-4o-mini","warmlane":{"session":"s"},"seed":9007199254740993,"t":1.0}'

    spliced = splice(body, put={"model": b'"m"', "cache_salt": b'"x"'}, drop={"warmlane"})

    assert spliced == b'{"model":"m","seed":9007199254740993,"t":1.0,"cache_salt":"x"}'


def test_a_large_body_keeps_every_byte_around_the_alias() -> None:
    message = {"role": "user", "content": "word " * 20_000}
    body = orjson.dumps({"messages": [message] * 20, "model": "alias"})

    spliced = splice(body, put={"model": b'"m"'})

    assert spliced == body.replace(b'"model":"alias"', b'"model":"m"')
