"""Each kind of engine makes its own prompt of a body; the rules are those of its public source."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from prefix_index import ChatTemplate, PromptReader, PromptTokenizer, TemplateRefusedError
from prefix_index.engines import EngineKind, RenderOptions, build_renderer, render

KINDS: tuple[EngineKind, ...] = ("runner", "vllm", "sglang", "openai")
ALL = "{{ {'m': messages, 't': tools, 'd': documents} | tojson }}"
CONTENT = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
PARTS = (
    "{% for message in messages %}{% if message.content is string %}S{{ message.content }}"
    "{% else %}{% for c in message.content %}({{ c.type }}:{{ c.text }}){% endfor %}{% endif %}"
    "{% endfor %}"
)


def prompt(
    kind: EngineKind, body: dict[str, Any], source: str, options: RenderOptions | None = None
) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
    return render(build_renderer(kind, template, options), body)


def seen(kind: EngineKind, body: dict[str, Any]) -> dict[str, Any]:
    """Return the messages, tools and documents that the template gets to see."""
    found: dict[str, Any] = json.loads(prompt(kind, body, ALL))
    return found


def user(content: Any, **others: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **others}


def called(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}, "id": "c1"}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"tool_calls": [call], "role": "assistant", "content": None},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}]},
        ]
    }


FUNCTION: dict[str, Any] = {
    "parameters": {"type": "object", "properties": {"z": {}, "a": {"minimum": 1.0}}},
    "description": "Find",
    "name": "f",
}


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


JOINED: list[Any] = [
    {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
    {"text": "", "type": "text"},
    {"type": "text", "text": "two"},
]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("vllm", "[one\ntwo][][]"),
        ("sglang", "[one  two][][]"),
        ("runner", "[one\n\ntwo][][]"),
        ("openai", "[one\n\ntwo][][]"),
    ],
)
def test_text_parts_are_joined_as_the_engine_joins_them(kind: EngineKind, expected: str) -> None:
    messages = [
        {"role": "user", "content": JOINED},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "end"},
    ]

    assert prompt(kind, {"messages": messages}, CONTENT) == f"{expected}[end]"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("vllm", "(text:one)(text:)(text:two)(text:plain)Sone\n\ntwo(text:e)"),
        ("sglang", "(text:one)(text:)(text:two)SplainSone  twoSe"),
        ("runner", "(text:one)(text:)(text:two)(text:plain)Sone\n\ntwo(text:e)"),
        ("openai", "(text:one)(text:)(text:two)SplainSone\n\ntwoSe"),
    ],
)
def test_text_parts_stay_apart_for_templates_that_loop_over_content(
    kind: EngineKind, expected: str
) -> None:
    messages = [
        {"role": "user", "content": JOINED},
        {"role": "user", "content": "plain"},
        {"role": "tool", "tool_call_id": "c", "content": JOINED},
        {"role": "user", "content": "e"},
    ]

    assert prompt(kind, {"messages": messages}, PARTS) == expected


def test_vllm_hands_on_what_it_does_not_know_of_a_part() -> None:
    source = (
        "{% for m in messages %}{% for c in m.content %}{{ c | tojson }}{% endfor %}{% endfor %}"
    )

    assert prompt("vllm", user(JOINED[:1]), source) == (
        '{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}'
    )


HEADER = "x-anthropic-billing-header: cc_version=1; cch=123abc;"


@pytest.mark.parametrize(
    "content",
    [f"{HEADER}\nRules", [{"type": "text", "text": HEADER}, {"type": "text", "text": "Rules"}]],
)
def test_vllm_cuts_the_billing_line_of_a_coding_agent(content: Any) -> None:
    body = {"messages": [{"role": "system", "content": content}, {"role": "user", "content": "q"}]}

    assert prompt("vllm", body, CONTENT) == "[Rules][q]"
    assert HEADER in prompt("sglang", body, CONTENT)
    quoted = {"messages": [{"role": "user", "content": content}]}
    assert HEADER in prompt("vllm", quoted, CONTENT)


ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


def test_vllm_makes_developers_of_templates_that_do_not_know_them_the_system() -> None:
    messages = [
        {"role": "developer", "content": "a", "tools": None},
        {"role": "user", "content": "q"},
        {"role": "developer", "content": "b"},
        {"role": "system", "content": "c"},
    ]
    body = {"messages": messages}

    assert prompt("vllm", body, ROLES) == "system:a\n\nb\n\nc|user:q|"
    assert prompt("vllm", body, ROLES + "{# 'developer' #}").startswith("developer:a|user:q|")
    assert prompt("sglang", body, ROLES).startswith("developer:a|user:q|")
    assert prompt("openai", body, ROLES).startswith("developer:a|user:q|")


def test_sglang_makes_an_answer_at_the_end_the_users() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so far"}]
    source = ROLES + "{% if add_generation_prompt %}assistant:{% endif %}"

    assert prompt("sglang", {"messages": messages}, source) == "user:q|user:so far|assistant:"
    continued = {"messages": messages, "continue_final_message": True}
    assert prompt("sglang", continued, source) == "user:q|assistant:so far"
    begun = {**continued, "add_generation_prompt": False}
    assert prompt("sglang", begun, source) == "user:q|assistant:so far"
    assert prompt("vllm", begun, source) == "user:q|assistant:so far"
    assert prompt("openai", begun, source) == "user:q|assistant:so far"


def test_sglang_tries_bare_functions_where_wrapped_ones_fail() -> None:
    source = "{% if tools %}{{ tools[0]['name'].upper() }}{% endif %}"

    assert prompt("sglang", user("q", tools=TOOLS), source) == "F"
    with pytest.raises(TemplateRefusedError):
        prompt("vllm", user("q", tools=TOOLS), source)


VARIABLES = (
    "{% if enable_thinking is defined %}E{{ enable_thinking }}{% endif %}"
    "{% if thinking is defined %}T{{ thinking }}{% endif %}"
    "{% if reasoning_effort is defined %}R{{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}G{% endif %}{% if x is defined %}X{{ x }}{% endif %}"
)
ASKED: dict[str, tuple[dict[str, Any], dict[EngineKind, str | None]]] = {
    "nothing": ({}, {"vllm": "G", "sglang": "G", "openai": "G"}),
    "an effort": (
        {"reasoning_effort": "low"},
        {"vllm": "ETrueRlowG", "sglang": "ETrueTTrueRlowG", "openai": "RlowG"},
    ),
    "no effort": (
        {"reasoning_effort": "none"},
        {"vllm": "EFalseRnoneG", "sglang": "EFalseTFalseRnoneG", "openai": "RnoneG"},
    ),
    "an effort twice": (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        {"vllm": "ETrueRlowG", "sglang": "ETrueTTrueRhighG", "openai": "RhighG"},
    ),
    "an effort and no thinking": (
        {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
        {"vllm": "EFalseRlowG", "sglang": "EFalseTTrueRlowG", "openai": "EFalseRlowG"},
    ),
    "reasoning as an object": (
        {"reasoning": {"effort": "high"}},
        {"vllm": "G", "sglang": "ETrueTTrueRhighG", "openai": "G"},
    ),
    "null": (
        {"chat_template_kwargs": {"x": None}},
        {"vllm": "G", "sglang": "GXNone", "openai": "GXNone"},
    ),
    "no generation prompt": (
        {"add_generation_prompt": False},
        {"vllm": "", "sglang": "G", "openai": ""},
    ),
    "no generation prompt as a variable": (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"vllm": "G", "sglang": None, "openai": ""},
    ),
    "a variable of ours": (
        {"chat_template_kwargs": {"messages": []}},
        {"vllm": None, "sglang": None},
    ),
    "variables that are text": (
        {"chat_template_kwargs": "x"},
        {"vllm": None, "sglang": None, "openai": None, "runner": None},
    ),
}


@pytest.mark.parametrize(("asked", "expected"), ASKED.values(), ids=ASKED)
def test_variables_reach_the_template_as_the_engine_passes_them(
    asked: dict[str, Any], expected: dict[EngineKind, str | None]
) -> None:
    for kind, text in expected.items():
        if text is None:
            with pytest.raises(TemplateRefusedError):
                prompt(kind, user("q", **asked), VARIABLES)
        else:
            assert prompt(kind, user("q", **asked), VARIABLES) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_overrules_the_engines_defaults(kind: EngineKind) -> None:
    options = RenderOptions(default_kwargs={"x": 1, "enable_thinking": False})

    assert prompt(kind, user("q"), VARIABLES, options) == "EFalseGX1"
    asked = user("q", chat_template_kwargs={"x": 2})
    assert prompt(kind, asked, VARIABLES, options) == "EFalseGX2"


def test_documents_reach_the_template_of_engines_that_pass_them() -> None:
    body = user("q", documents=[{"title": "t", "text": "x"}])

    assert {kind: bool(seen(kind, body)["d"]) for kind in KINDS} == {
        "vllm": True,
        "sglang": False,
        "runner": True,
        "openai": True,
    }


def test_reasoning_of_earlier_turns_has_the_engines_names() -> None:
    answer = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    body = {"messages": [answer, {"role": "user", "content": "q"}]}
    names = {"vllm": {"reasoning", "reasoning_content"}, "sglang": {"reasoning_content"}}
    names["runner"] = {"reasoning", "reasoning_content", "thinking"}
    for kind in ("vllm", "sglang", "runner"):
        assert seen(kind, body)["m"][0].keys() == {"role", "content"} | names[kind]


def test_messages_keep_only_what_engines_hand_on() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q", "name": "n", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": "a", "tool_calls": [], "refusal": None},
        {"role": "tool", "content": "t", "tool_call_id": "c1"},
    ]
    kept = [
        {"role": "user", "content": "q", "name": "n"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "t", "tool_call_id": "c1"},
    ]

    assert seen("vllm", {"messages": messages})["m"] == kept
    assert seen("runner", {"messages": messages})["m"] == kept
    assert seen("openai", {"messages": messages})["m"] == messages
    kept[0].pop("name")
    kept[1]["tool_calls"] = []  # type: ignore[assignment]
    assert seen("sglang", {"messages": messages})["m"] == kept


@pytest.mark.parametrize("kind", KINDS)
def test_the_body_is_not_changed(kind: EngineKind) -> None:
    body = called('{"a": 1}') | {
        "tools": [{"type": "function", "function": dict(FUNCTION)}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"x": 1},
    }
    body["messages"].insert(0, {"role": "system", "content": f"{HEADER}\nRules"})
    before = copy.deepcopy(body)
    prompt(kind, body, ALL)

    assert body == before


DEEP: Any = []
for _ in range(10_000):
    DEEP = [DEEP]
REFUSED: dict[str, Any] = {
    "no messages": {},
    "messages that are null": {"messages": None},
    "messages that are text": {"messages": "abc"},
    "messages that are an object": {"messages": {"role": "user", "content": "q"}},
    "a message that is text": {"messages": ["a"]},
    "a message without a role": {"messages": [{"content": "a"}]},
    "a role that is a number": {"messages": [{"role": 1, "content": "a"}]},
    "a picture": user([{"type": "image_url", "image_url": {"url": "http://x"}}]),
    "text and a picture": user([{"type": "text", "text": "a"}, {"type": "image_url"}]),
    "a part that is a number": user([1]),
    "a part that is deep": user([DEEP]),
    "a part of unknown type": user([{"type": ["x"]}]),
    "text that is a number": user([{"type": "text", "text": 1}]),
    "content that is a number": user(1),
    "content that is an object": user({"type": "text", "text": "a"}),
    "half a surrogate pair": user("\ud800"),
    "half a surrogate pair in a part": user([{"type": "text", "text": "a \udc97"}]),
    "half a surrogate pair in a tool": user("q", tools=[{"function": {"name": "\ud800"}}]),
    "a template of its own": user("q", chat_template="{{ messages }}"),
    "a prompt to cut": user("q", truncate_prompt_tokens=5),
    "tools that are deep": user("q", tools=[{"type": "function", "function": {"name": DEEP}}]),
    "a deep tool": user(
        "q", tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": DEEP}}}]
    ),
    "variables that are deep": user("q", chat_template_kwargs={"tools": DEEP, "messages": DEEP}),
    "a huge number in a tool": user(
        "q",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": 10**5000}}}],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_a_body_whose_prompt_cannot_be_known_is_refused_and_nothing_else_happens(
    body: dict[str, Any], kind: EngineKind
) -> None:
    with pytest.raises(TemplateRefusedError):
        prompt(
            kind, body, ALL.replace("}}", "}}{% for m in messages %}{{ m.content }}{% endfor %}")
        )


@pytest.mark.parametrize("kind", ["vllm", "sglang", "runner"])
@pytest.mark.parametrize("calls", [["x"], 3, [{}], [{"function": "f"}]])
def test_a_tool_call_that_is_none_is_refused(kind: EngineKind, calls: Any) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    with pytest.raises(TemplateRefusedError):
        prompt(kind, {"messages": [answer, {"role": "user", "content": "q"}]}, ALL)


def reader(
    tokenizer: PromptTokenizer, template: ChatTemplate, kind: EngineKind, **options: Any
) -> PromptReader:
    return PromptReader(tokenizer, template, model="m", block_size=16, engine=kind, **options)


def test_a_prompt_that_comes_as_token_ids_is_taken_as_it_is(
    tokenizer: PromptTokenizer, template: ChatTemplate
) -> None:
    ids = list(range(40))
    sglang = user("q", input_ids=ids)
    vllm = user("q", kv_transfer_params={"prompt_token_ids": ids})

    assert list(reader(tokenizer, template, "sglang").chat(sglang).complete().token_ids) == ids
    assert list(reader(tokenizer, template, "vllm").chat(vllm).complete().token_ids) == ids
    assert list(reader(tokenizer, template, "openai").chat(vllm).complete().token_ids) != ids
    with pytest.raises(TemplateRefusedError):
        reader(tokenizer, template, "sglang").chat(user("q", input_ids="abc"))


def test_whoever_renders_or_tokenizes_otherwise_has_another_fingerprint(
    tokenizer: PromptTokenizer, template: ChatTemplate
) -> None:
    prints = [reader(tokenizer, template, kind).fingerprint for kind in KINDS]
    other = ChatTemplate(template.source + " ", special_tokens=tokenizer.special_tokens)
    zoned = ChatTemplate(
        template.source, special_tokens=tokenizer.special_tokens, timezone="Asia/Tokyo"
    )
    options = RenderOptions(default_kwargs={"x": 1})
    prints += [
        reader(tokenizer, other, "vllm").fingerprint,
        reader(tokenizer, zoned, "vllm").fingerprint,
        reader(tokenizer, template, "vllm", options=options).fingerprint,
    ]

    assert len(set(prints)) == len(prints)
    assert prints[1] == reader(tokenizer, template, "vllm").fingerprint


def test_an_unknown_kind_of_engine_is_an_error(template: ChatTemplate) -> None:
    with pytest.raises(ValueError, match="kind of engine: other"):
        build_renderer("other", template)  # type: ignore[arg-type]
