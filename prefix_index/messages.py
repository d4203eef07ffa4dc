"""Chat messages as a template gets to see them: what vLLM does to them before it renders.

Text parts are joined by newlines unless the template loops over a message's content itself; tool
call arguments are parsed, since templates print them as objects; keys that vLLM does not know are
left out. A part that is not text makes the message refused: only the engine knows its tokens.

Source: vLLM 0.32 ``entrypoints/chat_utils.py`` (``parse_chat_messages``) and
``renderers/hf.py`` (content format detection).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jinja2 import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ContentFormat: TypeAlias = Literal["string", "openai"]

# Part type -> the key its text stands under.
_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class NotTextError(ValueError):
    """A message whose prompt text cannot be known here."""


def conversation(
    messages: Sequence[Mapping[str, Any]], content_format: ContentFormat
) -> list[dict[str, Any]]:
    """Return new messages in the form that templates are written for; the input is not changed.

    Raises:
        NotTextError: If a part is not text, or a message is not shaped as a message.
    """
    if not isinstance(messages, list | tuple):
        raise NotTextError("messages must be a list")
    return [_message(message, content_format) for message in messages]


def content_format(template: nodes.Template) -> ContentFormat:
    """Say whether a parsed template loops over a message's content ("openai") or prints it."""
    messages = _aliases(template, "messages")
    items = {
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name)
        and any(_is_access(loop.iter, name) for name in messages)
    }
    loops_over_content = any(
        _is_access(loop.iter, item, "content")
        for loop in template.find_all(nodes.For)
        for item in items
    )
    return "openai" if loops_over_content else "string"


def _message(message: Mapping[str, Any], form: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise NotTextError("a message must be an object with a role")
    role = message["role"]
    content = message.get("content")
    if type(content) is str and form == "string":  # nearly every message
        out = {"role": role, "content": content}
    else:
        texts = list(_texts(content))
        # Tool results are joined in both forms: templates print them.
        wrapped = form == "openai" and role != "tool"
        out = {"role": role, "content": [_text_part(t) for t in texts] if wrapped else _join(texts)}
    if role == "assistant":
        _add_assistant_keys(out, message)
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        out["tools"] = message.get("tools")
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            out[key] = message[key]
    return out


def _add_assistant_keys(out: dict[str, Any], message: Mapping[str, Any]) -> None:
    # An empty list is dropped, to keep templates on the plain assistant path.
    if message.get("tool_calls"):
        out["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        # transformers 5.24 hands reasoning out under each name that templates read.
        out["thinking"] = out["reasoning"] = out["reasoning_content"] = reasoning


def _tool_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise NotTextError("a tool call must be an object with a function")
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
    elif not isinstance(arguments, dict | list):
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _texts(content: Any) -> Iterator[str]:
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list | tuple):
        raise NotTextError("content must be text or a list of parts")
    for part in content:
        if isinstance(part, str):
            yield part
            continue
        key = _TEXT_KEYS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if key is None:
            raise NotTextError("a content part is not text")
        text = part.get(key)
        if isinstance(text, str):
            yield text
        elif text is not None:
            raise NotTextError("a text part has no text")


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _join(texts: list[str]) -> str:
    return "\n".join(texts)


def _aliases(template: nodes.Template, name: str) -> set[str]:
    """Return ``name`` and every variable that is assigned from it."""
    found = {name}
    pending = [name]
    while pending:
        current = pending.pop()
        for assign in template.find_all(nodes.Assign):
            target = assign.target
            if (
                isinstance(target, nodes.Name)
                and target.name not in found
                and _is_access(assign.node, current)
            ):
                found.add(target.name)
                pending.append(target.name)
    return found


def _is_access(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Say whether an expression is ``name`` (or ``name.key``), perhaps filtered or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _is_access(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_access(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.name == name
    if isinstance(node, nodes.Getitem):
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == key
    else:
        is_key = isinstance(node, nodes.Getattr) and node.attr == key
    return is_key and _is_access(node.node, name)  # type: ignore[attr-defined]
