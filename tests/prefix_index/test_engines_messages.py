"""Messages come to the template as each kind of engine hands them on."""

from __future__ import annotations

from typing import Any

import pytest

from prefix_index.engines import EngineKind
from tests.prefix_index.rendering import (
    CONTENT,
    HEADER,
    PARTS,
    prompt,
    user,
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
