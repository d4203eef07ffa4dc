"""Segments are spans of the one tokenization, told from the messages and not from the text."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_index.chat import ChatTemplate
from prefix_index.prompts import PromptReader
from prefix_index.recurrence import Run
from prefix_index.regions import current_from, documents_in
from prefix_index.segments import (
    Found,
    Hints,
    Layout,
    read_layout,
    read_segments,
    stable_end,
    stable_tokens,
)
from tests.gateway.routing_parts import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Tools behind the instructions, as Qwen prints them.
QWEN = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A date, trimmed texts and four control tokens between them, as Llama 3 prints them.
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Today Date: {{ strftime_now('%d %b %Y') }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Instructions inside the first user turn, as Gemma prints them.
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first and first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Takes texts apart: no mark survives at their start.
PICKY = (
    "{% for m in messages %}[{{ m.role }}{{ ' ' if m.content.startswith('W') }}]{{ m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REVERSING = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
DOCUMENTS = "{% for d in documents or [] %}[DOC]{{ d.text }}[/DOC]\n{% endfor %}" + CHATML
TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "llama": LLAMA,
    "gemma": GEMMA,
    "picky": PICKY,
}
NOON_S = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
TOKENIZER = byte_tokenizer()


def reader_of(source: str) -> PromptReader:
    template = ChatTemplate(source, special_tokens=TOKENIZER.special_tokens, clock=lambda: NOON_S)
    return PromptReader(TOKENIZER, template, model="m", block_size=16)


READERS = {name: reader_of(source) for name, source in TEMPLATES.items()}


def turns(*texts: Any, system: str = "Be brief.") -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[t % 2], "content": text} for t, text in enumerate(texts)]
    return {"messages": [{"role": "system", "content": system}, *messages]}


def layout(
    reader: PromptReader, body: dict[str, Any], hints: Hints | None = None, **more: Any
) -> Layout:
    prompt = reader.chat(body).complete()
    before = json.dumps(body)
    found = read_layout(reader, body, hints or Hints(), prompt, **more)
    assert json.dumps(body) == before
    at = 0
    for segment in found.segments:
        assert segment.start_token == at < segment.end_token
        at = segment.end_token
    assert at == prompt.num_tokens
    return found


def texts(reader: PromptReader, body: dict[str, Any], found: Layout) -> list[tuple[str, str]]:
    """Return kind and text of each segment: the tokenizer is one token per byte or mark."""
    ids = list(reader.chat(body).complete().token_ids)
    decode = TOKENIZER._tokenizer.decode
    return [
        (s.kind, decode(ids[s.start_token : s.end_token], skip_special_tokens=False))
        for s in found.segments
    ]


def test_chatml_segments_start_at_their_messages_marks() -> None:
    body = turns("First?", "Yes.", "Second?")
    found = layout(READERS["chatml"], body)

    assert texts(READERS["chatml"], body, found) == [
        ("system", "<|im_start|>system\nBe brief.<|im_end|>\n"),
        (
            "history",
            "<|im_start|>user\nFirst?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n",
        ),
        ("current", "<|im_start|>user\nSecond?<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_tools_are_where_the_template_prints_them() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {**turns("First?"), "tools": [tool]}
    kinds = texts(READERS["qwen"], body, layout(READERS["qwen"], body))

    assert [kind for kind, _ in kinds] == ["system", "tools", "system", "current"]
    assert kinds[0][1] == "<|im_start|>system\nBe brief."
    assert '"name": "f"' in kinds[1][1]
    assert kinds[3][1].startswith("<|im_start|>user\nFirst?")


def test_tools_without_instructions_come_first() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"messages": turns("First?")["messages"][1:], "tools": [tool]}
    kinds = texts(READERS["qwen"], body, layout(READERS["qwen"], body))

    assert kinds[0][0] == "tools"
    assert kinds[-1] == ("current", "<|im_start|>user\nFirst?<|im_end|>\n<|im_start|>assistant\n")


def test_what_a_template_says_by_itself_is_system_and_its_date_is_told() -> None:
    reader = READERS["llama"]
    body = {"messages": [{"role": "user", "content": "On 29 Nov 2026?"}]}
    found = layout(reader, body)
    kinds = texts(reader, body, found)
    (date,) = found.segments[0].volatile

    assert [kind for kind, _ in kinds] == ["system", "current"]
    assert kinds[1][1].startswith("<|start_header_id|>user<|end_header_id|>\n\nOn 29")
    assert isinstance(date, Found)
    assert (date.source, date.value, date.kind) == ("template", "30 Nov 2026", "date")
    assert reader.render(body)[date.start_char : date.end_char] == "30 Nov 2026"
    (users,) = found.segments[1].volatile
    assert isinstance(users, Found)
    assert (users.source, users.value, users.message) == ("message", "", 0)
    assert (users.start_char, users.end_char) == (3, 14)


def test_blanks_that_a_template_trims_belong_to_no_segment_of_their_own() -> None:
    body = turns("  First?  \n", "\n\nYes. ", " Second?\n", system="  Be brief.  ")
    kinds = texts(READERS["llama"], body, layout(READERS["llama"], body))

    assert [kind for kind, _ in kinds] == ["system", "history", "current"]
    assert kinds[2][1].startswith("<|start_header_id|>user<|end_header_id|>\n\nSecond?<|eot_id|>")


def test_instructions_inside_a_user_turn_are_system() -> None:
    body = turns("First?", "Yes.", "Second?")
    kinds = texts(READERS["gemma"], body, layout(READERS["gemma"], body))

    assert kinds[0][0] == "system"
    assert kinds[0][1].startswith("<bos><start_of_turn>user\nBe brief.")
    assert kinds[1] == (
        "history",
        "\n\nFirst?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n",
    )
    assert kinds[2][1].startswith("<start_of_turn>user\nSecond?")


def test_where_no_mark_survives_the_prompt_up_to_a_message_tells_its_end() -> None:
    body = turns("Who?", "We.", "What?")
    kinds = texts(READERS["picky"], body, layout(READERS["picky"], body))

    assert kinds == [
        ("system", "[system]Be brief.</s>"),
        ("history", "[user ]Who?</s>[assistant ]We.</s>"),
        ("current", "[user ]What?</s>[assistant]"),
    ]


def test_a_question_printed_first_leaves_nothing_stable() -> None:
    reader = reader_of(REVERSING)
    found = layout(reader, turns("Question?"))

    assert [s.kind for s in found.segments][:2] == ["current", "system"]
    assert stable_end(found.segments) == 0


CONTROL = st.sampled_from(
    [
        "<|im_end|>\n<|im_start|>user\n",
        "<|eot_id|>",
        "<end_of_turn>",
        "[/INST]",
        "</s>",
        "system",
        "",
    ]
)
WORDS = st.tuples(CONTROL, st.text("Wab \né<|>", max_size=20), CONTROL).map("".join)


@given(
    st.sampled_from(sorted(READERS)), st.lists(WORDS, min_size=1, max_size=6), WORDS, st.booleans()
)
@settings(max_examples=150, deadline=None)
def test_whatever_users_write_segments_cover_the_prompt_in_order(
    name: str, contents: list[str], system: str, as_parts: bool
) -> None:
    body = turns(*contents, system=system)
    if as_parts:
        for message in body["messages"]:
            message["content"] = [{"type": "text", "text": message["content"]}]
    reader = READERS[name]
    found = layout(reader, body)
    kinds = [segment.kind for segment in found.segments]

    assert kinds[-1] == "current"
    order = ["system", "history", "current"]
    assert kinds == sorted(kinds, key=order.index)
    assert len(set(kinds)) == len(kinds)
    # The current question is nowhere in what is called stable.
    if len(contents) % 2 and contents[-1].strip() and name in ("chatml", "qwen"):
        current = reader.render({"messages": [body["messages"][-1]]})
        assert reader.chat(body).complete().num_tokens - stable_end(found.segments) == len(
            TOKENIZER.encode(current)
        )


@given(st.integers(0, 40), st.integers(0, 40))
def test_moving_a_boundary_leaves_the_tokens_as_they_are(first: int, second: int) -> None:
    text = "A long document about lanes, warm ones mostly, and what is in them."
    reader = READERS["chatml"]
    body = turns(text)
    prompt = reader.chat(body).complete()
    runs = [[], [Run(min(first, second), 25 + max(first, second), False)]]
    before = prompt.token_ids
    layout(reader, body, runs=runs)

    assert prompt.token_ids == before == reader.chat(body).complete().token_ids


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_an_assistants_calls_are_history_and_their_results_current() -> None:
    reader = reader_of(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    body = turns("Go.")
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]

    assert texts(reader, body, layout(reader, body))[1:] == [
        (
            "history",
            "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n<call>f</call><|im_end|>\n",
        ),
        ("current", "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"),
    ]
    body["messages"][-1]["content"] = ""
    assert texts(reader, body, layout(reader, body))[2] == (
        "current",
        "<|im_start|>tool\n<|im_end|>\n<|im_start|>assistant\n",
    )


# --- hints ---------------------------------------------------------------------------------------

DOCUMENT = "The warm lane keeps its blocks. " * 40


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


CACHE = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("contents", "kinds"),
    [
        ([[part(DOCUMENT, **CACHE), part("q")]], ["system", "knowledge", "current"]),
        ([[part("a"), part(DOCUMENT, **CACHE), part("q")]], ["system", "knowledge", "current"]),
        ([[part(DOCUMENT), part("q")]], ["system", "current"]),
        ([[part("all of it", **CACHE)]], ["system", "knowledge", "current"]),
        (
            [[part(DOCUMENT, **CACHE)], "Yes.", "More?"],
            ["system", "knowledge", "history", "current"],
        ),
        ([[part(DOCUMENT, cache_control=None), part("q")]], ["system", "current"]),
    ],
)
def test_cache_control_ends_a_stable_segment(contents: list[Any], kinds: list[str]) -> None:
    found = layout(READERS["chatml"], turns(*contents))

    assert [segment.kind for segment in found.segments] == kinds


def test_cache_control_in_instructions_leaves_them_system() -> None:
    body = turns("q")
    body["messages"][0]["content"] = [part("a", **CACHE), part("b")]

    assert [s.kind for s in layout(READERS["chatml"], body).segments] == ["system", "current"]


@pytest.mark.parametrize("role", ["user", "system"])
def test_chunks_given_as_hints_are_knowledge_where_they_stand(role: str) -> None:
    chunks = ("The first passage, which is about lanes.", "The second passage, about blocks.")
    text = f"Use these:\n{chunks[1]}\n{chunks[0]}\nNow answer."
    body = turns("q") if role == "system" else turns(text)
    if role == "system":
        body["messages"][0]["content"] = text
    found = layout(READERS["chatml"], body, Hints(chunks, True))
    (known,) = [
        shown for kind, shown in texts(READERS["chatml"], body, found) if kind == "knowledge"
    ]

    assert known == f"{chunks[1]}\n{chunks[0]}"


def test_named_documents_make_large_text_above_the_question_knowledge() -> None:
    body = turns(f"{DOCUMENT}\nQuestion: why?")
    found = layout(READERS["chatml"], body, Hints((), True))

    assert [s.kind for s in found.segments] == ["system", "knowledge", "current"]
    assert stable_tokens(found.segments, 16) == found.segments[1].end_token // 16 * 16
    assert [s.kind for s in layout(READERS["chatml"], body).segments] == ["system", "current"]


def test_documents_that_the_template_prints_are_knowledge() -> None:
    reader = reader_of(DOCUMENTS)
    body = {**turns("q"), "documents": [{"text": "Lanes are warm."}, {"text": "Blocks."}]}
    kinds = texts(reader, body, layout(reader, body))

    assert kinds[0][0] == "knowledge"
    assert "Lanes are warm." in kinds[0][1]
    assert [kind for kind, _ in kinds[1:]] == ["system", "current"]


def test_recurring_text_is_knowledge_if_large_and_not_an_instruction() -> None:
    body = turns(f"Hi.\n{DOCUMENT}\nWhy?")
    run = Run(4, 4 + len(DOCUMENT), True)
    found = layout(READERS["chatml"], body, runs=[[], [run]])
    shown = dict(texts(READERS["chatml"], body, found))

    assert shown["knowledge"] == DOCUMENT.rstrip() + " "
    (moved,) = found.moved
    assert (moved.kind, moved.num_tokens) == ("knowledge", len(DOCUMENT))
    small = layout(READERS["chatml"], body, runs=[[], [Run(4, 500, True)]])
    assert [s.kind for s in small.segments] == ["system", "current"]
    instructions = turns("q", system=DOCUMENT)
    found = layout(READERS["chatml"], instructions, runs=[[Run(0, len(DOCUMENT), False)], []])
    assert [s.kind for s in found.segments] == ["system", "current"]


def test_shared_pairs_are_knowledge_and_the_rest_is_history() -> None:
    body = turns("2+2?", "4", "3+3?", "6", "8+8?")
    kinds = [s.kind for s in layout(READERS["chatml"], body, num_shared=3).segments]

    assert kinds == ["system", "knowledge", "history", "current"]
    assert [s.kind for s in layout(READERS["chatml"], body, num_shared=2).segments] == [
        "system",
        "history",
        "current",
    ]
    # The current question is never an example.
    assert [s.kind for s in layout(READERS["chatml"], body, num_shared=6).segments] == [
        "system",
        "knowledge",
        "current",
    ]


@pytest.mark.parametrize(
    ("roles", "first"),
    [
        (["user"], 0),
        (["system", "user"], 1),
        (["user", "assistant", "user"], 2),
        (["user", "assistant", "tool", "tool"], 2),
        (["user", "assistant", "user", "tool"], 2),
        (["user", "assistant"], 0),
        (["assistant"], 0),
        (["tool", "tool"], 0),
        (["user", "user"], 1),
        (["system", "developer"], 1),
    ],
)
def test_the_current_turn_is_the_last_question_with_its_tool_results(
    roles: list[str], first: int
) -> None:
    assert current_from([{"role": role, "content": "x"} for role in roles]) == first


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "x",
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": " \n "}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [part("")]}],
        [{"role": "assistant", "content": "a"}],
    ],
)
def test_odd_messages_have_segments_too(messages: Any) -> None:
    reader = READERS["chatml"]
    body = {"messages": messages, "prompt": "2026-11-30"}
    prompt = reader.completion("hello").complete()
    if messages and isinstance(messages, list):
        prompt = reader.chat(body).complete()
    segments = read_segments(reader, body, Hints(), prompt)

    assert segments[0].start_token == 0
    assert segments[-1].end_token == prompt.num_tokens


def test_tokens_that_are_not_the_renderings_are_one_segment() -> None:
    reader = READERS["chatml"]
    prompt = reader.completion("something else").complete()
    (whole,) = read_segments(reader, turns("q"), Hints(), prompt)

    assert (whole.kind, whole.start_token, whole.end_token) == ("current", 0, prompt.num_tokens)


def test_stable_text_never_holds_a_token_that_the_question_has_a_part_in() -> None:
    reader = READERS["chatml"]
    body = turns("é" * 3)
    found = layout(reader, body, runs=[[], [Run(0, 1, False)]])

    assert found.segments[-1].kind == "current"


def test_documents_are_found_by_their_marks() -> None:
    text = "a <doc id=1>x</doc>\n<document>y</document> <doc>open <source name='s'>z</source>"

    assert [text[a:b] for a, b in documents_in(text)] == [
        "<doc id=1>x</doc>",
        "<document>y</document>",
        "<source name='s'>z</source>",
    ]
    assert documents_in("<docs> and <documentation> and 3 < doc > 4") == []
