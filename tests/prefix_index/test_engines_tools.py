"""Tools and tool calls come to the template as each kind of engine hands them on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefix_index import TemplateRefusedError
from prefix_index.engines import EngineKind, RenderOptions
from tests.prefix_index.rendering import (
    ALL,
    FUNCTION,
    KINDS,
    called,
    prompt,
    seen,
    user,
)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("vllm", '{"type": "function", "function": {"name": "f", "description": "Find", "par'),
        ("sglang", '{"type": "function", "function": {"description": "Find", "name": "f", "par'),
        ("runner", '{"function": {"parameters": {"type": "object", "properties": {"z": {}, "a"'),
        ("openai", '{"function": {"parameters": {"type": "object", "properties": {"z": {}, "a"'),
    ],
)
def test_a_tool_is_printed_in_the_engines_order_of_fields(kind: EngineKind, expected: str) -> None:
    body = user("q", tools=[{"function": FUNCTION, "type": "function"}])

    assert prompt(kind, body, "{{ tools[0] | tojson }}").startswith(expected)


SPARSE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "nothing but a name": (
        {"name": "f"},
        {"name": "f", "description": None, "parameters": None},
        {"description": None, "name": "f", "parameters": None, "strict": False},
    ),
    "nulls": (
        {"name": "f", "description": None, "strict": None, "parameters": {}},
        {"name": "f", "description": None, "parameters": {}},
        None,
    ),
    "strict": (
        {"name": "f", "strict": True, "parameters": {}},
        {"name": "f", "description": None, "parameters": {}, "strict": True},
        {"description": None, "name": "f", "parameters": {}, "strict": True},
    ),
    "deferred": (
        {"name": "f", "defer_loading": False},
        {"name": "f", "description": None, "parameters": None, "defer_loading": False},
        {
            "description": None,
            "name": "f",
            "parameters": None,
            "strict": False,
            "defer_loading": False,
        },
    ),
    "unknown keys": (
        {"name": "f", "x": 1},
        {"name": "f", "description": None, "parameters": None},
        {"description": None, "name": "f", "parameters": None, "strict": False},
    ),
}


@pytest.mark.parametrize(("function", "vllm", "sglang"), SPARSE.values(), ids=SPARSE)
def test_fields_that_are_not_set_are_added_as_the_engine_adds_them(
    function: dict[str, Any], vllm: dict[str, Any], sglang: dict[str, Any] | None
) -> None:
    body = user("q", tools=[{"type": "function", "function": function}])

    printed = prompt("vllm", body, "{{ tools[0].function | tojson }}")
    assert printed == json.dumps(vllm)
    for kind in ("runner", "openai"):
        printed = prompt(kind, body, "{{ tools[0].function | tojson }}")
        assert printed == json.dumps(function)
    if sglang is None:  # answered with 400 there
        with pytest.raises(TemplateRefusedError):
            prompt("sglang", body, ALL)
    else:
        printed = prompt("sglang", body, "{{ tools[0].function | tojson }}")
        assert printed == json.dumps(sglang)


def test_a_newer_sglang_prints_tools_in_the_order_sent() -> None:
    options = RenderOptions(keeps_tool_order=True)
    body = user("q", tools=[{"function": {"parameters": {}, "name": "f", "strict": None}}])

    assert prompt("sglang", body, "{{ tools[0] | tojson }}", options) == (
        '{"type": "function", "function": {"parameters": {}, "name": "f", "description": null},'
        ' "defer_loading": null}'
    )


def test_a_deferred_tool_says_so_in_vllm_on_both_levels() -> None:
    tool = {"defer_loading": True, "function": {"name": "f"}, "type": "function"}

    assert seen("vllm", user("q", tools=[tool]))["t"] == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": None,
                "parameters": None,
                "defer_loading": True,
            },
            "defer_loading": True,
        }
    ]


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}
CHOICES: dict[str, tuple[Any, dict[str, int]]] = {
    "none": ("none", {"vllm": 2, "sglang": 0, "runner": 2, "openai": 2}),
    "auto": ("auto", {"vllm": 2, "sglang": 2, "runner": 2, "openai": 2}),
    "null": (None, {"vllm": 2, "sglang": 2, "runner": 2, "openai": 2}),
    "one by name": (NAMED, {"vllm": 2, "sglang": 1, "runner": 2, "openai": 2}),
}


@pytest.mark.parametrize(("choice", "expected"), CHOICES.values(), ids=CHOICES)
def test_a_tool_choice_drops_the_tools_that_the_engine_drops(
    choice: Any, expected: dict[EngineKind, int]
) -> None:
    body = user("q", tools=TOOLS, tool_choice=choice)

    assert {kind: len(seen(kind, body)["t"] or []) for kind in KINDS} == expected


def test_vllm_can_be_told_to_drop_tools_that_may_not_be_called() -> None:
    options = RenderOptions(drops_unused_tools=True)
    source = "{{ tools | tojson }}"

    assert prompt("vllm", user("q", tools=TOOLS, tool_choice="none"), source, options) == "null"
    assert "g" in prompt("vllm", user("q", tools=TOOLS, tool_choice="auto"), source, options)


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tools_are_no_tools_however_they_are_written(kind: EngineKind, tools: Any) -> None:
    assert seen(kind, user("q", tools=tools)) == seen(kind, user("q"))


ARGUMENTS: dict[str, tuple[Any, dict[EngineKind, Any]]] = {
    "an object": ('{"b":1,  "a":"\\u00e9"}', {"vllm": {"b": 1, "a": "é"}, "sglang": {}}),
    "nothing": ("", {"vllm": {}, "sglang": None}),
    "a list": ("[1]", {"vllm": {}, "sglang": None}),
    "no JSON": ("not json", {"vllm": {}, "sglang": None}),
    "an object already": ({"b": 1}, {"vllm": None, "sglang": {"b": 1}}),
}


@pytest.mark.parametrize(("sent", "expected"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_tool_calls_are_parsed_or_kept_as_the_engine_does(
    sent: Any, expected: dict[EngineKind, Any]
) -> None:
    if expected["sglang"] == {}:
        expected = {**expected, "sglang": expected["vllm"]}
    for kind, arguments in (*expected.items(), ("openai", sent)):
        if arguments is None:  # answered with 400 there
            with pytest.raises(TemplateRefusedError):
                seen(kind, called(sent))
        else:
            call = seen(kind, called(sent))["m"][1]["tool_calls"][0]
            assert call["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": "é"}', '{"b": 1, "a": "é"}'),
        ('{"b":1,"a":"\\u00e9"}', '{"b": 1, "a": "é"}'),
        ({"b": 1}, '{"b": 1}'),
        ("", "{}"),
        ("not json", "{}"),
        (None, "{}"),
    ],
)
def test_the_runner_takes_arguments_as_lenient_as_it_can(arguments: Any, expected: str) -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"

    assert prompt("runner", called(arguments), source) == expected


def test_a_tool_call_has_the_engines_order_of_fields() -> None:
    source = "{{ messages[1].tool_calls[0] | tojson }}"
    body = called("{}")
    function = body["messages"][1]["tool_calls"][0]["function"]
    body["messages"][1]["tool_calls"][0] |= {"index": 0, "function": {"x": 1, **function}}

    assert prompt("vllm", body, source) == (
        '{"id": "c1", "function": {"arguments": {}, "name": "f", "x": 1}, "type": "function",'
        ' "index": 0}'
    )
    assert prompt("sglang", body, source) == (
        '{"id": "c1", "index": 0, "type": "function", "function": {"name": "f", "arguments": {}}}'
    )


def test_sglang_tries_bare_functions_where_wrapped_ones_fail() -> None:
    source = "{% if tools %}{{ tools[0]['name'].upper() }}{% endif %}"

    assert prompt("sglang", user("q", tools=TOOLS), source) == "F"
    with pytest.raises(TemplateRefusedError):
        prompt("vllm", user("q", tools=TOOLS), source)
