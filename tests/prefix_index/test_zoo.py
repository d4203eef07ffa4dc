"""Public templates print, and public tokenizers tokenize, what they do in transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from prefix_index import ChatTemplate, PromptReader, TemplateRefusedError, hash_blocks
from prefix_index.engines import build_renderer, render
from tests import zoo

B = 16
# Tokenizer -> the template that its model is served with.
MODELS = {
    "qwen3": "qwen3",
    "llama3_1": "llama3_1",
    "gemma3": "gemma3",
    "gptoss": "gptoss",
    "deepseek_v3": "deepseekv3",
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
AT_S = 1_796_031_000.0  # 30 Nov 2026 09:30 UTC


def system(content: Any = 'Answer <b>briefly</b> & "well".  ') -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any = " What is the refund window?\n") -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any = "<think>\nhm\n</think>\n\nThirty days.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TOOL = {
    "type": "function",
    "function": {
        "name": "search_docs",
        "description": "Find <passages> & more, naïvely",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for"},
                "limit": {"type": "integer", "minimum": 1, "default": 10},
                "kinds": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
            },
            "required": ["query"],
        },
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "search_docs", "arguments": {"query": "é", "limit": 2}},
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "search_docs", "content": "page 7"}
# What a template is given: messages and variables.
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([user()], {}),
    "instructions": ([system(), user()], {}),
    "several turns": ([system(), user(), answer(), user("And shoes?")], {}),
    "tools": ([system(), user()], {"tools": [TOOL]}),
    "a call": ([user(), answer("", tool_calls=[CALL]), RESULT], {"tools": [TOOL]}),
    "a call in between": (
        [user(), answer("", tool_calls=[CALL]), RESULT, answer("Done."), user("More?")],
        {"tools": [TOOL]},
    ),
    "no thinking": ([user()], {"enable_thinking": False, "reasoning_effort": "low"}),
    "reasoning": ([user(), answer("a", reasoning_content="because"), user()], {}),
    "awkward text": (
        [system("\u200d<|im_end|>\r\n{{ x }}"), user("<\uff5cUser\uff5c>🙂\x00</s>")],
        {},
    ),
    "parts": ([user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])], {}),
    "documents": ([user()], {"documents": [{"title": "t", "text": "d"}]}),
    "roles out of order": ([answer("a"), system("s"), user()], {}),
    "no content": ([user(), answer(None), user()], {}),
    "nobody": ([], {}),
}


def outcome(print_text: Callable[[], str]) -> str:
    """Return what is printed, or only that nothing is."""
    try:
        return "printed " + print_text()
    except Exception:  # the template's own, whatever it is
        return "refused"


@pytest.fixture
def _noon_of_one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers' templates print a fixed date."""
    import datetime as module

    class Clock(module.datetime):
        @classmethod
        def now(cls, tz: module.tzinfo | None = None) -> Clock:
            return cls.fromtimestamp(AT_S, tz or module.UTC)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)


def test_there_are_seventy_two_templates() -> None:
    assert len(zoo.templates()) == 72


@pytest.mark.usefixtures("_noon_of_one_day")
@pytest.mark.parametrize("name", zoo.templates())
def test_a_public_template_prints_or_refuses_as_in_transformers(name: str) -> None:
    source = zoo.templates()[name]
    ours = ChatTemplate(source, special_tokens=SPECIAL, clock=lambda: AT_S)
    num_printed = 0
    for chat, (messages, given_variables) in CHATS.items():
        for generate in (True, False):
            variables = {"add_generation_prompt": generate, **given_variables}
            expected = outcome(
                lambda messages=messages, variables=variables: render_jinja_template(
                    [messages], chat_template=source, **SPECIAL, **variables
                )[0][0]
            )
            tools = variables.pop("tools", None)
            documents = variables.pop("documents", None)
            # transformers fills in the names that reasoning goes by.
            named = [
                m | {"thinking": m["reasoning_content"]} if "reasoning_content" in m else m
                for m in messages
            ]
            got = outcome(
                lambda named=named, tools=tools, documents=documents, v=variables: ours.render(
                    named, tools=tools, documents=documents, kwargs=v
                )
            )
            assert got == expected, chat
            num_printed += got != "refused"

    assert num_printed >= 4


@pytest.mark.parametrize("name", zoo.templates())
def test_every_kind_of_engine_renders_or_refuses_every_public_template(name: str) -> None:
    template = ChatTemplate(zoo.templates()[name], special_tokens=SPECIAL)
    # Templates for pictures leave out content that is not a list, on the engines as well.
    is_for_text = "image" not in template.source
    body = {"messages": [system(), user(), answer("a"), user()], "tools": [TOOL]}
    for kind in ("runner", "vllm", "sglang", "openai"):
        renderer = build_renderer(kind, template)

        assert ("refund window?" in render(renderer, {"messages": [user()]})) or not is_for_text
        for odd in (body, {**body, "reasoning_effort": "low"}, {"messages": [user([])]}):
            with contextlib.suppress(TemplateRefusedError):
                assert render(renderer, odd)


@cache
def theirs(name: str) -> Any:
    return AutoTokenizer.from_pretrained(str(zoo.tokenizer_dir(name)))


@cache
def parts(name: str) -> tuple[ChatTemplate, PromptReader]:
    template = zoo.template(MODELS[name], name, clock=lambda: AT_S)
    # Knows more and more, and forgets, as tests go on.
    reader = PromptReader(zoo.tokenizer(name), template, model=name, block_size=B, engine="vllm")
    return template, reader


AWKWARD = [
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\n",
    "<start_of_turn>user\n", "<end_of_turn>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
    "<|start|>user", "<|message|>", "<|end|>", "<bos>", "<|begin_of_text|>", "<|im_",
    "<\uff5cbegin▁of▁sentence\uff5c>",
    "start|>", "<", "|>", "e\u0301", "\u0301", "\r\n", "\n\n", "\n", "\x00", " ", "   ", "\t",
    "▁", "12 345", "½", "🙂", "👩\u200d👩\u200d👧", "\u200d", "\ufeff", "日本語", "don't",
    "http://a.b/c?d=e", "a", "1", "",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=4)), max_size=6).map("".join)
turns = st.lists(st.tuples(texts, texts), min_size=0, max_size=3)


def conversation(instructions: str, pairs: list[tuple[str, str]], last: str) -> dict[str, Any]:
    messages = [system(instructions)]
    for question, reply in pairs:
        messages += [user(question), answer(reply)]
    return {"messages": [*messages, user(last)]}


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(instructions=texts, pairs=turns, last=texts)
@pytest.mark.parametrize("name", MODELS)
def test_segments_encode_to_what_the_whole_prompt_encodes_to(
    name: str, instructions: str, pairs: list[tuple[str, str]], last: str
) -> None:
    _, reader = parts(name)
    body = conversation(instructions, pairs, last)
    text = reader.render(body)
    expected = zoo.tokenizer(name).encode(text)

    assert expected == theirs(name).encode(text, add_special_tokens=False)
    for _ in range(2):  # unknown or partly known, then known
        prompt = reader.chat(body).complete()

        assert list(prompt.token_ids) == expected
        assert prompt.block_hashes == hash_blocks(expected, B, prompt.root)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_every_model_are_cut_about_once_per_message(name: str) -> None:
    _, reader = parts(name)
    body = conversation("Rules", [(f"q{n}", f"a{n}") for n in range(5)], "end")
    prompt = reader.chat(body).complete()
    again = reader.chat(conversation("Rules", [(f"q{n}", f"a{n}") for n in range(6)], "end"))

    assert len(prompt.segment_ends) >= 6
    assert again.known_tokens > prompt.num_tokens * 0.6


@settings(max_examples=100, deadline=None)
@given(text=texts)
@pytest.mark.parametrize("name", MODELS)
def test_completion_prompts_encode_to_what_transformers_encodes(name: str, text: str) -> None:
    prompt = parts(name)[1].completion(text).complete()

    assert list(prompt.token_ids) == theirs(name).encode(text)
