"""A chat completion as an answer of the messages API. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway.errors import MalformedAnswer

if TYPE_CHECKING:
    from collections.abc import Collection

STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


def to_message(completion: Any, *, model: str, stop_sequences: Collection[str]) -> bytes:
    """Return the message that says what a chat completion says.

    Args:
        completion: The parsed completion.
        model: Name that the client asked for.
        stop_sequences: Those of the request.

    Raises:
        MalformedAnswer: If it is no chat completion.
    """
    choices = completion.get("choices") if isinstance(completion, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    said = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(said, dict) or not isinstance(choice, dict):
        raise MalformedAnswer("not a chat completion: it has no choice with a message")
    content: list[dict[str, Any]] = []
    if thought := reasoning_of(said):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if isinstance(said.get("content"), str) and said["content"]:
        content.append({"type": "text", "text": said["content"]})
    calls = said.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    content += [_tool_use(call) for call in calls if isinstance(call, dict)]
    reason, sequence = stop_of(choice, stop_sequences)
    message = {
        "id": message_id(completion),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage_of_chat(completion.get("usage")),
    }
    return orjson.dumps(message)


def message_id(document: dict[str, Any]) -> str:
    """Return the id of the message that a completion becomes."""
    return f"msg_{document.get('id') or 'unnamed'}"


def reasoning_of(said: dict[str, Any]) -> str:
    """Return what the model thought, under whichever name the engine has for it."""
    thought = said.get("reasoning_content") or said.get("reasoning")
    return thought if isinstance(thought, str) else ""


def stop_of(choice: dict[str, Any], stop_sequences: Collection[str]) -> tuple[str, str | None]:
    """Return why a choice ended, and on which of the client's sequences."""
    # vLLM and SGLang say what they stopped at.
    matched = choice.get("stop_reason", choice.get("matched_stop"))
    if isinstance(matched, str) and matched in stop_sequences:
        return "stop_sequence", matched
    return STOP_REASONS.get(str(choice.get("finish_reason")), "end_turn"), None


def usage_of_chat(usage: Any) -> dict[str, int]:
    """Return token counts as the messages API has them: what was cached counts apart."""
    counts = usage if isinstance(usage, dict) else {}
    details = counts.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    cached = cached if isinstance(cached, int) else 0
    prompt, completion = counts.get("prompt_tokens"), counts.get("completion_tokens")
    return {
        "input_tokens": max(0, prompt - cached) if isinstance(prompt, int) else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion if isinstance(completion, int) else 0,
    }


def input_of(arguments: object) -> dict[str, Any]:
    """Return a call's arguments as an object; text that is none stands under ``arguments``."""
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    try:
        given = orjson.loads(str(arguments))
    except orjson.JSONDecodeError:
        given = None
    return given if isinstance(given, dict) else {"arguments": arguments}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return {
        "type": "tool_use",
        "id": call.get("id"),
        "name": function.get("name"),
        "input": input_of(function.get("arguments")),
    }
