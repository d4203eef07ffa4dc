"""Variables, limits and identity of rendering, for each kind of engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from prefix_index import ChatTemplate, PromptReader, PromptTokenizer, TemplateRefusedError
from prefix_index.engines import EngineKind, RenderOptions, build_renderer
from tests.prefix_index.rendering import (
    ALL,
    FUNCTION,
    HEADER,
    KINDS,
    called,
    prompt,
    seen,
    user,
)

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
