"""Content blocks of the messages API as the content of chat messages. Pure.

Texts are put together as vLLM's own translation does, so that a prompt has the same tokens whether
the engine or the gateway translates it.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.errors import InvalidRequest

# What a model said while nobody should read it; no engine takes it back.
_SILENT = frozenset(("redacted_thinking",))


def text_of_blocks(content: object, where: str) -> str:
    """Return the text of content that may be nothing but text.

    Raises:
        InvalidRequest: If it has other blocks.
    """
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content if isinstance(content, list) else ()):
        if _type_of(block) != "text":
            raise _unknown(block, f"{where}.{i}")
        texts.append(_text(block, f"{where}.{i}"))
    return "".join(texts)


def assistant_message(content: list[Any], where: str) -> dict[str, Any]:
    """Return an assistant's message.

    Raises:
        InvalidRequest: If a block has no counterpart.
    """
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at, kind = f"{where}.content.{i}", _type_of(block)
        if kind == "text":
            parts.append(_text_part(block, at))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind not in _SILENT:
            raise _unknown(block, at)
    message: dict[str, Any] = {"role": "assistant", "content": _content(parts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
        if not parts:
            message["content"] = None
    return message


def user_messages(content: list[Any], where: str) -> list[dict[str, Any]]:
    """Return a user's message, behind the messages of the tools that it brings the results of.

    Raises:
        InvalidRequest: If a block has no counterpart.
    """
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        at, kind = f"{where}.content.{i}", _type_of(block)
        if kind == "tool_result":
            result, images = _result(block, at)
            messages.append(result)
            parts += images
        else:
            parts.append(_user_part(block, kind, at))
    if parts or not messages:
        messages.append({"role": "user", "content": _content(parts)})
    return messages


def _result(block: dict[str, Any], where: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a tool's message, which is text, and its images, which only a user may send."""
    content = block.get("content")
    texts, images = [], []
    for i, inner in enumerate(content if isinstance(content, list) else ()):
        at, kind = f"{where}.content.{i}", _type_of(inner)
        if kind == "image":
            images.append(_image(inner, at))
        else:
            texts.append(_user_part(inner, kind, at)["text"])
    text = content if isinstance(content, str) else "\n".join(texts)
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str):
        raise InvalidRequest(f"{where}.tool_use_id: expected text.", param=where)
    return {"role": "tool", "tool_call_id": call_id, "content": text}, images


def _user_part(block: Any, kind: str, where: str) -> dict[str, Any]:
    if kind == "text":
        return _text_part(block, where)
    if kind == "image":
        return _image(block, where)
    source = block.get("source") if kind == "document" else None
    if isinstance(source, dict) and source.get("type") == "text":
        text = {"type": "text", "text": source.get("data"), "cache_control": None}
        return _text_part(text | {"cache_control": block.get("cache_control")}, where)
    raise _unknown(block, where)


def _text_part(block: dict[str, Any], where: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "text", "text": _text(block, where)}
    # Says where a stable segment ends; engines pass over it.
    if block.get("cache_control"):
        part["cache_control"] = block["cache_control"]
    return part


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    kind = source.get("type")
    if kind == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif kind == "url":
        url = str(source.get("url"))
    else:
        raise InvalidRequest(
            f"{where}.source.type: expected base64 or url; files are not kept here.", param=where
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = orjson.dumps(block.get("input") or {}).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a single text as text, as clients of the chat API send it; hints need parts."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return str(parts[0]["text"])
    return parts


def _type_of(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else ""


def _text(block: dict[str, Any], where: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text: expected text.", param=where)
    return text


def _unknown(block: object, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where}: blocks of type {_type_of(block)!r} are not known to the engines of this model.",
        param=where,
    )
