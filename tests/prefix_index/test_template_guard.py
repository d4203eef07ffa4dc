"""No template hangs, fills the memory or brings the process down; what it prints stays the same."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefix_index import ChatTemplate, TemplateRefusedError

GROW = "{% set ns = namespace(s='ab', l=[1], n=2) %}{% for i in range(99) %}"
ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "loops in loops that use the loop's length": "{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% if loop.last %}{{ loop.length }}{% endif %}{% endfor %}"
    "{% endfor %}",
    "prints in loops": "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 900 + ""
    "{% endfor %}{% endfor %}",
    "prints a message in loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{{ messages[0].content }}{% endfor %}{% endfor %}",
    "prints into a variable": "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{{ messages[0].content }}{% endfor %}{% endfor %}{% endset %}",
    "prints in a macro": "{% macro m() %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{{ messages[0].content }}{% endfor %}{% endfor %}{% endmacro %}{{ m() }}",
    "a loop that calls itself": "{% for a in [[1, 2]] * 9 recursive %}"
    "{{ loop([a, a]) }}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}"
    "{% endif %}{% endmacro %}{{ m(60) }}",
    "a macro whose argument doubles": "{% macro m(s, n) %}{% if n %}{{ m(s + s, n - 1) }}"
    "{% else %}{{ s }}{% endif %}{% endmacro %}{{ m('ab', 99) }}",
    "a text that doubles": GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "a text that doubles by ~": GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "a text that doubles by a filter": GROW + "{% set ns.s = ns.s | replace('b', 'bb') "
    "| replace('b', 'bb') %}{% endfor %}{{ ns.s }}",
    "a text that doubles by a method": GROW + "{% set ns.s = ns.s.replace('b', ns.s) %}"
    "{% endfor %}{{ ns.s }}",
    "a list that doubles": GROW + "{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l }}",
    "a list of itself": GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "an object of itself": GROW + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l }}",
    "a number that squares": GROW + "{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "a huge power": "{{ 10 ** 1000000000 }}",
    "a huge power of a variable": "{% set n = 10000000 %}{{ n ** n }}",
    "a huge repetition": "{{ 'a' * 10 ** 10 }}",
    "a huge list": "{{ [0] * 10 ** 10 }}",
    "a huge range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "a huge width": "{{ '%9999999999d' % 1 }}",
    "a huge width from an argument": "{{ '%*d' % (999999999, 1) }}",
    "a huge width by format": "{{ '{:9999999999}'.format(1) }}",
    "a huge width by format from an argument": "{{ '{:{w}}'.format(1, w=9999999999) }}",
    "a huge width by a filter": "{{ 'a' | center(9999999999) }}",
    "a huge width by the format filter": "{{ '%9999999999d' | format(1) }}",
    "a huge width by a method": "{{ 'a'.ljust(9999999999) }}",
    "a huge indent": "{{ 'a\nb' | indent(9999999999) }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_an_end_is_refused_soon_and_in_little_memory(source: str) -> None:
    tracemalloc.start()
    start_s = time.thread_time()
    try:
        with pytest.raises(TemplateRefusedError):
            ChatTemplate(source, special_tokens={}).render([{"role": "u", "content": "q" * 9999}])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    # Tracing makes Python about four times slower than it is in a gateway.
    assert time.thread_time() - start_s < 8
    assert peak_bytes < 500_000_000


NESTED: Any = None
for _ in range(10_000):
    NESTED = {"a": NESTED}


@pytest.mark.parametrize("printed", ["{{ x | tojson }}", "{{ x }}", "{{ x | string }}"])
@pytest.mark.parametrize("value", [NESTED, [10**5000]], ids=["10,000 deep", "a huge number"])
def test_values_that_cannot_be_printed_are_refused(printed: str, value: Any) -> None:
    with pytest.raises(TemplateRefusedError):
        ChatTemplate(printed, special_tokens={}).render([], kwargs={"x": value})


def test_a_large_conversation_is_rendered_whole() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}"
    messages = [{"role": "user", "content": "word " * 200}] * 5_000
    text = ChatTemplate(source, special_tokens={}).render(messages)

    assert text == ("user: " + "word " * 200 + "\n") * 5_000


def test_a_template_may_collect_the_messages_of_a_long_conversation() -> None:
    source = (
        "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}"
        "{% endfor %}{{ ns.l | length }}"
    )
    messages = [{"role": "user", "content": f"word {at}"} for at in range(1_000)]

    assert ChatTemplate(source, special_tokens={}).render(messages) == "1000"


def test_one_rendering_does_not_spend_what_the_next_one_needs() -> None:
    source = "{% for a in range(90000) %}{% for b in range(6) %}{% endfor %}{% endfor %}x"
    template = ChatTemplate(source, special_tokens={})

    assert [template.render([]) for _ in range(3)] == ["x"] * 3


SAME = {
    "the loop's variables": "{% for a in x %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}"
    "{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.cycle('p', 'q') }}{{ loop.depth }}"
    "{{ loop.previtem }}{{ loop.nextitem }}{{ loop.changed(a) }}{% endfor %}",
    "loops with conditions and without items": "{% for a in x if a > 1 %}{{ a }}{{ loop.length }}"
    "{% endfor %}{% for a in [] %}{% else %}none{% endfor %}{% for a in nothing %}{% else %}no"
    "{% endfor %}",
    "objects and pairs": "{% for k, v in o.items() %}{{ k }}={{ v }}{% endfor %}"
    "{% for k in o %}{{ k }}{% endfor %}{% for c in 'abc' %}{{ c }}{% endfor %}",
    "recursion": "{% for a in [[1, [2, 3]], [4]] recursive %}{% if a is iterable %}({{ loop(a) }})"
    "{% else %}{{ a }}{% endif %}{% endfor %}",
    "loop controls": "{% for a in x %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}"
    "{% if a == 3 %}{% break %}{% endif %}{% endfor %}",
    "macros": "{% macro m(a, b='d', c=none) %}{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}"
    "{% endmacro %}{{ m(1) }}{{ m(1, 2, 3, 4, e=5) }}{{ m() }}",
    "calls with bodies": "{% macro m() %}<{{ caller('z') }}>{% endmacro %}"
    "{% call(y) m() %}{{ y }}b{% endcall %}",
    "set blocks and filters": "{% set s %}{% for a in x %}{{ a }},{% endfor %}{% endset %}{{ s }}"
    "{% set t | upper %}q{{ x[0] }}{% endset %}{{ t }}{% filter upper %}w{{ x }}{% endfilter %}",
    "namespaces in loops": "{% set ns = namespace(s='', l=[]) %}{% for a in x %}"
    "{% set ns.s = ns.s ~ a %}{% set ns.l = ns.l + [a] %}{% set b = [a, a] %}{{ b }}"
    "{% endfor %}{{ ns.s }}{{ ns.l }}",
    "arithmetic": "{{ 7 % 3 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ [1] * 2 }}{{ '%05d|%s' % (4, 'x') }}"
    "{{ 1.5 * 2 }}{{ 2 ** 0.5 }}{{ true * 3 }}{{ 3 * 'c' }}",
    "widths": "{{ 'a' | center(9) }}|{{ 'a\nb' | indent(4, true) }}|{{ x | batch(2) | list }}"
    "{{ x | slice(2) | list }}{{ '%s' | format(1) }}{{ '{:>5}'.format('a') }}{{ 'a'.ljust(4) }}"
    "{{ '12345 of %s, 100000%%' % 7 }}{{ '99999: {}'.format(8) }}{{ '%8.3f' % 1.5 }}"
    "{{ 3.14159 | round(2) }}{{ 'long text' | truncate(5) }}{{ 'a b c' | wordwrap(3) }}",
    "unpacking": "{% set a, b = (1, 2) %}{{ a }}{{ b }}{% for p, q in [(1, 2), (3, 4)] %}"
    "{% set c, d = (q, p) %}{{ c }}{{ d }}{% endfor %}",
    "scopes": "{% set v = 1 %}{% for a in x %}{% set v = a * 2 %}{{ v }}{% endfor %}{{ v }}"
    "{% with w = 3 %}{{ w }}{% endwith %}{{ w }}{% if v %}{% set v = [v] %}{% endif %}{{ v }}",
}


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_a_guarded_template_prints_what_it_would_print_unguarded(source: str) -> None:
    variables: dict[str, Any] = {"x": [1, 2, 3], "o": {"b": 1, "a": [2]}}
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    expected = plain.from_string(source).render(variables)

    assert expected == ChatTemplate(source, special_tokens={}).render([], kwargs=variables)
