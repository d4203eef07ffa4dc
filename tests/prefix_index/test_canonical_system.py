"""Billing lines are lifted and volatile lines moved only where that is nobody's text."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings

from prefix_index.canonical import (
    RULES,
    canonicalise,
    keeps_system_first,
)
from prefix_index.chat import ChatTemplate
from tests.prefix_index.canonical_parts import (
    BILLING,
    UUID,
    apply,
    bodies,
    masked,
    memory,
)


@settings(max_examples=200, deadline=None)
@given(bodies())
def test_moving_lines_loses_none(raw: bytes) -> None:
    form = apply(raw, "volatile-tail")

    def lines(body: Any) -> list[str]:
        texts = [json.dumps(m) for m in body["messages"]]
        return sorted(
            line for text in texts for line in text.replace('"', "\\n").split("\\n") if line.strip()
        )

    assert lines(form.body) == lines(orjson.loads(raw))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([BILLING, "You are.", "x"], ["You are.", "x"]),
        ([BILLING + "\r", "You are."], ["You are."]),
        ([BILLING.removesuffix(" cch=1a2b3;"), "You are."], ["You are."]),
        ([BILLING], [""]),
        ([BILLING, ""], [""]),
    ],
)
def test_a_billing_line_is_lifted_from_the_first_line(
    lines: list[str], expected: list[str]
) -> None:
    raw = orjson.dumps({"messages": [{"role": "system", "content": "\n".join(lines)}]})

    form = apply(raw, "attribution-header")

    assert form.body["messages"][0]["content"] == "\n".join(expected)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": f"{BILLING}\nwhat is this line?"}],
        [{"role": "system", "content": f"You are.\n{BILLING}\nx"}],
        [{"role": "system", "content": f" {BILLING}\nx"}],
        [{"role": "system", "content": f"{BILLING} Explain it.\nx"}],
        [{"role": "system", "content": f"> {BILLING}\nx"}],
        [{"role": "system", "content": "x-anthropic-billing-header: what does it mean?\nx"}],
        [{"role": "system", "content": f"{BILLING}\n{BILLING}\nx"}],
        [{"role": "system", "content": "You are."}, {"role": "system", "content": BILLING}],
        [
            {
                "role": "system",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": BILLING}],
            }
        ],
        [
            {
                "role": "system",
                "content": [{"type": "text", "text": BILLING}, {"type": "text", "text": BILLING}],
            }
        ],
        [{"role": "assistant", "content": BILLING}, {"role": "system", "content": BILLING}],
    ],
    ids=lambda messages: json.dumps(messages)[10:60],
)
def test_a_quoted_or_unknown_line_is_nobodys_to_lift(messages: list[Any]) -> None:
    raw = orjson.dumps({"messages": messages})

    assert apply(raw, "attribution-header").raw is raw


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": BILLING}, []),
        (BILLING, []),
        ({"type": "text", "text": BILLING, "x": 1}, [{"type": "text", "text": "", "x": 1}]),
        ({"type": "text", "text": f"{BILLING}\nYou"}, [{"type": "text", "text": "You"}]),
    ],
    ids=["part", "bare text", "part with more in it", "first line of a part"],
)
def test_a_billing_part_goes_whole_and_takes_nothing_else(part: Any, expected: list[Any]) -> None:
    rest = {"type": "text", "text": "é\\u00e9 1.0"}
    raw = json.dumps({"messages": [{"role": "system", "content": [part, rest]}]}).encode()

    form = apply(raw, "attribution-header")

    assert form.body["messages"][0]["content"] == [*expected, rest]
    assert masked(form.raw) == masked(raw)


def test_volatile_lines_go_last_in_their_order_with_their_escapes() -> None:
    raw = (
        b'{"messages":[{"role":"system","content":"Current time: 2026-11-30 10:14\\nR\\u00e9gles:'
        b'\\n- a\\nRequest id: 7f0c1f2e-2f0b-4a55-9b1e-3d0b7a3c9d10\\nDone \\/.\\n"}]}'
    )

    form = apply(raw, "volatile-tail")

    assert form.raw == (
        b'{"messages":[{"role":"system","content":"R\\u00e9gles:\\n- a\\nDone \\/.'
        b"\\nCurrent time: 2026-11-30 10:14"
        b'\\nRequest id: 7f0c1f2e-2f0b-4a55-9b1e-3d0b7a3c9d10\\n"}]}'
    )
    assert form.applied[0].changed == "2 lines"


def test_volatile_lines_cross_parts_and_messages_to_the_end_of_the_segment() -> None:
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "Today is Monday, November 30, 2026."}],
        },
        {"role": "developer", "content": "Rules.\n- a"},
        {"role": "user", "content": "Current time: 2026-11-30 10:14\nq"},
    ]

    form = apply(orjson.dumps({"messages": messages}), "volatile-tail")

    texts = [m["content"] for m in form.body["messages"]]
    assert texts[0] == [{"type": "text", "text": ""}]
    assert texts[1] == "Rules.\n- a\nToday is Monday, November 30, 2026."
    assert texts[2] == messages[2]["content"]


@pytest.mark.parametrize(
    "text",
    [
        f"Contract version effective 2026-01-01, id {UUID}.\nRules.",
        "You are a bot. The current date and time is 2026-11-30 10:14. " + "Rule. " * 99 + "\nx",
        "Log:\n```\nCurrent time: 2026-11-30 10:14\n```\nRules.",
        "Today we sell bread.\nRules.",
        "Rules.\nCurrent time: 2026-11-30 10:14",
        "Rules.\nCurrent time: 2026-11-30 10:14\n\n",
        "| 2026-01-01 | 5 kg |\nRules.",
        "The battle of 1815-06-18 was lost.\nRules.",
    ],
    ids=["content", "prose", "listing", "no span", "last", "last but blanks", "table", "history"],
)
def test_content_and_what_is_last_already_stay(text: str) -> None:
    raw = orjson.dumps({"messages": [{"role": "system", "content": text}]})

    assert apply(raw, "volatile-tail").raw is raw


def test_lines_are_not_moved_where_the_template_is_not_known_to_keep_them() -> None:
    text = "Current time: 2026-11-30 10:14\nRules."
    raw = orjson.dumps({"messages": [{"role": "system", "content": text}]})

    form = canonicalise(orjson.loads(raw), raw, rules=RULES, tenant="", memory=memory())

    assert form.raw is raw
    assert [rule.refused for rule in form.applied] == ["", "template", ""]


TEMPLATES = {
    "apart": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
        True,
    ),
    "merged into the user's turn": (
        "{% set s = messages[0].content %}{% for m in messages[1:] %}<|{{ m.role }}|>"
        "{% if loop.first %}{{ s }}\n\n{% endif %}{{ m.content }}{% endfor %}",
        False,
    ),
    "printed in the last turn": (
        "{% set s = messages[0].content %}{% for m in messages[1:] %}<|{{ m.role }}|>"
        "{% if loop.last %}[S]{{ s }}[/S]{% endif %}{{ m.content }}{% endfor %}",
        False,
    ),
    "later ones hoisted": (
        "{% for m in messages if m.role == 'system' %}<s>{{ m.content }}</s>{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
        False,
    ),
    "later ones refused": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('order') }}{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
        True,
    ),
    "none printed": (
        "{% for m in messages[1:] %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
        False,
    ),
    "refuses all": ("{{ raise_exception('no') }}", False),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_by_what_it_prints_where_system_text_goes(name: str) -> None:
    source, expected = TEMPLATES[name]
    template = ChatTemplate(source, special_tokens={})

    assert keeps_system_first(template.render) is expected
