"""The quick sandbox prints what jinja2's own prints, and refuses what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prefix_index.sandbox import Renderer, Sandbox

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "  be Brief\n", "items": 7, "_x": 1, "format": "f"},
    {"role": "user", "content": "{0.__class__} <b>"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
]
# A value in a loop over messages, as templates write it, and as an attacker would.
EXPRESSIONS = [
    *("m.role", "m['role']", "m.missing", "m.missing.more", "m.items", "m._x", "m.format", "m.get"),
    *("m.get('role')", "m.keys()|list", "m.items()|list", "m.tool_calls[0].function.name"),
    *("loop.first", "loop.last", "loop.index", "loop.index0", "loop.revindex", "loop.length"),
    *("loop.revindex0", "loop.previtem.role", "loop.nextitem.role", "loop.cycle('a', 'b')"),
    *("loop.changed(m.role)", "loop._iterator", "loop.__class__", "loop.depth", "loop.nothing"),
    *("m.role.upper()", "m.role.title()", "m.content.strip()", "m.role.split('s')"),
    *(
        "m.role.startswith('sys')",
        "m.role.__class__",
        "m.role.__class__.__mro__",
        "m.role.zfill(9)",
    ),
    *("m.content.format(m)", "'{0.__class__}'.format(m)", "'{a}'.format_map(m)", "m.role.nothing"),
    *("m.clear()", "m.update({})", "m.pop('role')", "messages.append(1)", "messages.count(1)"),
    *(
        "m.__class__",
        "m.get.__self__",
        "m|tojson",
        "m.content|trim",
        "messages[-1].role",
        "0 .real",
    ),
    *(
        "bos",
        "bos.strip()",
        "range(3)|list",
        "range(10**9)",
        "lipsum",
        "missing.a",
        "cycler('a').next()",
    ),
    *("namespace(a=1).a", "joiner(',')()", "dict(a=1).a", "self", "m.role ~ loop.index", "bos.a.b"),
]


def outcome(render: Any) -> str:
    try:
        return str(render())
    except Exception as error:  # the very point: any of them
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_look_up_ends_as_in_the_original_sandbox(expression: str) -> None:
    source = f"{{% for m in messages %}}[{{{{ {expression} }}}}]{{% endfor %}}"
    variables = {"messages": [dict(message) for message in MESSAGES]}
    constants = {"bos": " <s>"}
    theirs = ImmutableSandboxedEnvironment(extensions=[loopcontrols]).from_string(source)
    ours = Renderer(Sandbox(extensions=[loopcontrols]).from_string(source), constants)

    expected = outcome(lambda: theirs.render(constants | variables))
    got = outcome(lambda: ours(variables))
    # Objects print their addresses.
    assert got.split(" at 0x")[0] == expected.split(" at 0x")[0]
    assert variables["messages"] == MESSAGES


def test_variables_win_over_constants_and_renderings_share_nothing() -> None:
    source = "{% set n = namespace(x=x) %}{% macro f(y) %}{{ x }}{{ y }}{% endmacro %}{{ f(n.x) }}"
    render = Renderer(Sandbox().from_string(source), {"x": 1})

    assert [render({}), render({"x": 2}), render({})] == ["11", "22", "11"]
