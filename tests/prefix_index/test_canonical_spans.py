"""Values are found in bytes where the parser reads them from, at any depth."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_index.canonical.spans import Edit, elements, locate, members, replace
from prefix_index.canonical.system import literal_lines
from tests.support import cpu_s

NAMES = st.sampled_from(
    ["messages", "content", "text", "tools", "role", "model", "a_b", "mödel", 'q"u', "A", "", "x\\"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(['"tools"', '{"tools":[1]}', "]},{[", '\\"', "\\", '"messages":', "tools"]),
)
SPACE = st.sampled_from(["", "", " ", "\n\t ", "\r\n"])


@st.composite
def encoded(draw: st.DrawFn, depth: int = 3) -> str:
    """JSON with every freedom of writing: white space, escapes, duplicate keys."""
    kind = draw(st.sampled_from(["scalar", "list", "object", "object"] if depth else ["scalar"]))
    space = draw(SPACE)
    if kind == "scalar":
        value = draw(SCALARS)
        if isinstance(value, str) and draw(st.booleans()):
            return spelled(value)
        return json.dumps(value, ensure_ascii=draw(st.booleans()))
    if kind == "list":
        items = [draw(encoded(depth=depth - 1)) for _ in range(draw(st.integers(0, 3)))]
        return f"[{space}" + f"{space},{space}".join(items) + f"{space}]"
    return draw(objects(depth=depth - 1))


@st.composite
def objects(draw: st.DrawFn, depth: int = 3) -> str:
    space = draw(SPACE)
    pairs = []
    for _ in range(draw(st.integers(0, 4))):
        name = draw(NAMES)
        key = spelled(name) if draw(st.integers(0, 5)) == 0 else json.dumps(name)
        pairs.append(f"{key}{space}:{space}{draw(encoded(depth=depth))}")
    return f"{space}{{{space}" + f"{space},{space}".join(pairs) + f"{space}}}{space}"


def spelled(text: str) -> str:
    """Every character as an escape."""
    units = text.encode("utf-16-be").hex()
    return '"' + "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)) + '"'


def paths(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [at] if at else []
    if isinstance(value, dict):
        for name, each in value.items():
            found += paths(each, (*at, name))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            found += paths(each, (*at, i))
    return found


@given(objects())
def test_every_value_of_the_parsed_body_is_found_in_its_bytes(text: str) -> None:
    raw = text.encode()
    body = orjson.loads(raw)

    for path in paths(body):
        expected = body
        for step in path:
            expected = expected[step]
        span = locate(raw, path)
        assert raw[span.start : span.end].strip() == raw[span.start : span.end]
        assert repr(orjson.loads(raw[span.start : span.end])) == repr(expected)


@given(objects(), st.data())
def test_replacing_a_found_value_changes_that_value_and_no_other_byte(
    text: str, data: st.DataObject
) -> None:
    raw = text.encode()
    found = paths(orjson.loads(raw))
    if not found:
        return
    span = locate(raw, data.draw(st.sampled_from(found)))

    new = replace(raw, [Edit(*span, b'"new"')])

    assert new == raw[: span.start] + b'"new"' + raw[span.end :]
    orjson.loads(new)


@pytest.mark.parametrize("path", [("b",), ("a", 1), ("a", "x"), ("a", 0, 0)], ids=str)
def test_a_path_that_leads_nowhere_is_an_error(path: tuple[str | int, ...]) -> None:
    with pytest.raises(LookupError):
        locate(b'{"a": [1]}', path)


def test_a_name_spelled_with_escapes_is_the_later_one_of_two() -> None:
    raw = b'{"tools": [1], "\\u0074ools": [2]}'

    span = locate(raw, ("tools",))

    assert raw[span.start : span.end] == b"[2]"
    assert orjson.loads(raw)["tools"] == [2]


def test_a_name_that_stands_only_inside_another_value_is_told_from_the_member() -> None:
    raw = b'{"x": {"tools": [1]}, "y": "tools", "tools": [2]}'

    span = locate(raw, ("tools",))

    assert raw[span.start : span.end] == b"[2]"


def test_nesting_of_ten_thousand_levels_is_a_value_like_any_other() -> None:
    deep = b'{"a":[' * 5_000 + b"1" + b"]}" * 5_000
    raw = b'{"x":' + deep + b',"messages":[' + deep + b',{"content":"q"}]}'

    assert [raw[m.value_start : m.end] == deep for m in members(raw)] == [True, False]
    span = locate(raw, ("messages", 1, "content"))
    assert raw[span.start : span.end] == b'"q"'
    assert len(list(elements(raw, raw.index(b"messages") + 10))) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda n: b'{"x":' + b"[" * n + b"]" * n + b',"tools":[1]}',
        lambda n: b'{"x":"' + b'\\"' * n + b'","tools":[1]}',
        lambda n: b'{"x":"' + b"\\\\" * n + b'","tools":[1]}',
        lambda n: b'{"x":"' + b"\\u0061" * n + b'","tools":[1]}',
        lambda n: b'{"x":[' + b'"tools",' * n + b'1],"tools":[1]}',
        lambda n: b'{"x":1' + b" " * n + b',"tools":[1]}',
        lambda n: b"{" + b'"tools":[1],' * n + b'"tools":[1]}',
    ],
    ids=["nested", "quotes", "backslashes", "escapes", "names", "spaces", "duplicates"],
)
def test_a_scan_takes_time_in_proportion_to_the_bytes(make: Any) -> None:
    def scan_s(n: int) -> float:
        raw = make(n)
        span = locate(raw, ("tools",))
        assert raw[span.start : span.end] == b"[1]"
        return cpu_s(lambda: locate(raw, ("tools",)), repeats=3)

    # Sixteen times as long; a quadratic scan takes 256 times as much.
    assert scan_s(160_000) < 64 * max(scan_s(10_000), 0.001)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans(), st.booleans())
def test_the_lines_of_a_literal_are_those_of_its_text(
    text: str, is_ascii: bool, is_spelled: bool
) -> None:
    literal = spelled(text) if is_spelled else json.dumps(text, ensure_ascii=is_ascii)

    lines = literal_lines(literal[1:-1].encode())

    assert [orjson.loads(b'"' + line + b'"') for line in lines] == text.split("\n")
