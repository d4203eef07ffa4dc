"""What the template gets to see of a body, on each kind of engine."""

from __future__ import annotations

import json
from typing import Any

from prefix_index import ChatTemplate
from prefix_index.engines import EngineKind, RenderOptions, build_renderer, render

KINDS: tuple[EngineKind, ...] = ("runner", "vllm", "sglang", "openai")
# What Claude Code puts before its system text.
HEADER = "x-anthropic-billing-header: cc_version=1; cch=123abc;"
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
