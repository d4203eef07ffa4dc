"""Templates print here what they print in transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from prefix_index import ChatTemplate, TemplateRefusedError

SPECIAL: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Rules: <b>1 & 2</b> 'quoted' \"twice\" "},
    {"role": "user", "content": "é\r\n\x00 <|im_start|> 🙂"},
    {"role": "assistant", "content": "Thirty days.\n\n"},
    {"role": "user", "content": "And?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search_docs",
            "description": "Find <passages> & more, naïvely",
            "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {}}},
        },
    }
]
CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}{{ bos_token }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
TEMPLATES = {
    "blocks and blanks": CHATML,
    "tools as JSON": "{% if tools %}{{ tools | tojson }}\n{{ tools | tojson(indent=4) }}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "generation mark": "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}{{ x }}{% endfor %}",
    "namespaces and macros": "{%- macro show(m) -%} {{ m.role | upper }} {%- endmacro -%}"
    "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}"
    "{% set ns.n = ns.n + m.content | length %}{{ show(m) }}{% endfor %}{{ ns.n }}",
    "variables that are not there": "{% if enable_thinking is defined %}T{% endif %}"
    "{% if documents %}D{% endif %}{% if tools is none %}N{% endif %}{{ nothing }}"
    "{{ bos_token }}{{ eos_token }}",
}


def build(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=SPECIAL, **options)


def reference(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """Return what transformers prints."""
    variables |= SPECIAL
    rendered: Any = render_jinja_template([messages], chat_template=source, **variables)
    return str(rendered[0][0])


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_prints_what_it_prints_in_transformers(
    source: str, tools: list[dict[str, Any]] | None, add_generation_prompt: bool
) -> None:
    expected = reference(source, MESSAGES, tools=tools, add_generation_prompt=add_generation_prompt)

    assert expected == build(source).render(
        MESSAGES, tools=tools, add_generation_prompt=add_generation_prompt
    )


@pytest.mark.parametrize("content", ["so far", " so far  ", "so far\n"])
@pytest.mark.parametrize(
    "source", [CHATML, CHATML.replace(" | trim", "")], ids=["trimmed", "verbatim"]
)
def test_a_final_message_is_continued_as_transformers_does(source: str, content: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    expected = reference(source, messages, continue_final_message=True)

    text = build(source).render(messages, add_generation_prompt=False, continue_final_message=True)

    assert expected == text
    assert text.endswith("so far") or "trim" not in source


def test_json_is_neither_sorted_nor_escaped() -> None:
    text = build("{{ tools | tojson }}").render([], tools=TOOLS)

    assert '"z": {"type": "string"}, "a": {}' in text
    assert "Find <passages> & more, naïvely" in text


def test_the_date_is_that_of_the_engines_zone() -> None:
    source = "{{ strftime_now('%d %b %Y %H:%M') }}"
    at = 1_796_031_000.0  # 30 Nov 2026 09:30 UTC

    assert build(source, clock=lambda: at).render([]) == "30 Nov 2026 09:30"
    zoned = build(source, clock=lambda: at, timezone="Asia/Tokyo")
    assert zoned.render([]) == "30 Nov 2026 18:30"


def test_template_variables_of_the_request_reach_the_template() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}"

    assert build(source).render([]) == ""
    assert build(source).render([], kwargs={"enable_thinking": False}) == "off"


FORMATS = {
    "prints content": ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
    "prints content by key": ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "string"),
    "loops over content": (
        "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}",
        "openai",
    ),
    "loops by key, through a slice and a variable": (
        "{% set rest = messages[1:] %}{% for m in rest %}"
        "{% for c in m['content'] | list %}{{ c.text }}{% endfor %}{% endfor %}",
        "openai",
    ),
    "loops over something else": (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}",
        "string",
    ),
}


@pytest.mark.parametrize(("source", "expected"), FORMATS.values(), ids=FORMATS)
def test_the_content_format_is_read_off_the_template(source: str, expected: str) -> None:
    assert build(source).content_format == expected


REFUSED: dict[str, tuple[str, Any]] = {
    "raise_exception": ("{{ raise_exception('no') }}", []),
    "an undefined attribute's attribute": ("{{ messages[0].a.b }}", [{"role": "user"}]),
    "a type error": ("{{ 1 + 'a' }}", []),
    "a division by zero": ("{{ 1 // 0 }}", []),
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", []),
    "a huge range": ("{% for i in range(10 ** 9) %}{% endfor %}", []),
    "the sandbox": ("{{ ''.__class__.__mro__ }}", []),
    "a change of the request": ("{{ messages.append(1) }}", []),
    "an unknown filter value": ("{{ messages | tojson(indent='x', separators=3) }}", []),
    "no messages": ("{% for m in messages %}{% endfor %}", None),
    "half a surrogate pair": ("{{ messages[0].content }}", [{"content": "\ud800"}]),
    "half a pair of its own": ("{{ '\\ud83d' }}", []),
}


@pytest.mark.parametrize(("source", "messages"), REFUSED.values(), ids=REFUSED)
def test_whatever_goes_wrong_the_template_refuses(source: str, messages: Any) -> None:
    with pytest.raises(TemplateRefusedError):
        build(source).render(messages)


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": None}]])
def test_there_must_be_a_message_to_continue(messages: Any) -> None:
    source = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateRefusedError, match="final message"):
        build(source).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_a_turn_cannot_be_both_continued_and_begun() -> None:
    with pytest.raises(TemplateRefusedError, match="excludes"):
        build(CHATML).render(MESSAGES, continue_final_message=True)


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "{% generation %}x", "{{ x | nofilter }}"])
def test_a_template_that_does_not_compile_is_refused_at_once(source: str) -> None:
    with pytest.raises(TemplateRefusedError, match="does not compile"):
        build(source)
