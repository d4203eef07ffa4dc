"""Chat messages as a template gets to see them, for engines that change little about them.

Text parts are joined by newlines unless the template loops over a message's content itself. A part
that is not text makes the message refused: only the engine knows its tokens.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prefix_index.content_format import ContentFormat

# Part type -> the key its text stands under.
TEXT_KEYS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class NotTextError(ValueError):
    """A body whose prompt text cannot be known here."""


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a body, checked to be objects with a role; not copied.

    Raises:
        NotTextError: If they are not.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise NotTextError("messages must be a list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NotTextError("a message must be an object with a role")
    return messages


def message_as_sent(message: Mapping[str, Any], form: ContentFormat) -> dict[str, Any]:
    """Return a message with all its keys, its content as text or as parts; the rest as sent.

    Raises:
        NotTextError: If a part of it is not text.
    """
    content = message.get("content")
    if isinstance(content, str):
        return dict(message)
    texts = list(texts_of(content))
    as_parts = form == "openai" and content is not None and message["role"] != "tool"
    return {
        **message,
        "content": [text_part(t) for t in texts] if as_parts else "\n".join(texts),
    }


def runner_message(message: Mapping[str, Any], form: ContentFormat) -> dict[str, Any]:
    """Return a message as the bundled runner shapes it: known keys, arguments as objects.

    Raises:
        NotTextError: If a part of it is not text, or a tool call is not shaped as one.
    """
    role = message["role"]
    content = message.get("content")
    if type(content) is str and form == "string":  # nearly every message
        out = {"role": role, "content": content}
    else:
        texts = list(texts_of(content))
        # Tool results are joined in both forms: templates print them.
        as_parts = form == "openai" and role != "tool"
        parts_or_text = [text_part(t) for t in texts] if as_parts else "\n".join(texts)
        out = {"role": role, "content": parts_or_text}
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


def texts_of(content: Any) -> Iterator[str]:
    """Yield the texts of a message's content.

    Raises:
        NotTextError: If a part of it is not text.
    """
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
        key = TEXT_KEYS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if key is None:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise NotTextError(f"a content part of the type {str(kind)[:64]!r} is not text")
        text = part.get(key)
        if isinstance(text, str):
            yield text
        elif text is not None:
            raise NotTextError("a text part has no text")


def text_part(text: str) -> dict[str, str]:
    """Return a content part."""
    return {"type": "text", "text": text}


def tool_calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a message, checked to be objects with a function; not copied.

    Raises:
        NotTextError: If they are not.
    """
    calls = message.get("tool_calls")
    if not calls:
        return []
    if not isinstance(calls, list):
        raise NotTextError("tool_calls must be a list")
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise NotTextError("a tool call must be an object with a function")
    return calls


def _add_assistant_keys(out: dict[str, Any], message: Mapping[str, Any]) -> None:
    # An empty list is dropped, to keep templates on the plain assistant path.
    if calls := tool_calls_of(message):
        out["tool_calls"] = [_runner_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        # transformers 5.24 hands reasoning out under each name that templates read.
        out["thinking"] = out["reasoning"] = out["reasoning_content"] = reasoning


def _runner_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
    elif not isinstance(arguments, dict | list):
        arguments = {}
    return {**call, "function": {**call["function"], "arguments": arguments}}
