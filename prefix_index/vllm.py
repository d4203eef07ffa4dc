"""What vLLM makes of a chat body before it renders.

The body passes through pydantic models: tools come out in the order of their fields, with unset
ones added; tool calls in the order of their types. Then messages are flattened and tool call
arguments parsed. A body that vLLM answers with 400 is refused here or not, as is simpler: it has no
prompt either way.

Source: vLLM 0.32 ``entrypoints/openai/chat_completion/protocol.py``, ``renderers/chat_utils.py``,
``renderers/hf.py``, ``renderers/online_renderer.py``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from prefix_index.messages import TEXT_KEYS, NotTextError, messages_of, text_part, tool_calls_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prefix_index.chat import ChatTemplate

# A line that Claude Code puts before its system text, other in each request; vLLM cuts it.
_BILLING_HEADER = "x-anthropic-billing-header"
# Keys of content parts that mean something to vLLM; it hands others on to the template.
_PART_KEYS = frozenset(
    (
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    )
)
# chat_template_kwargs that collide with arguments of the call they are passed to.
_RESERVED = (
    "messages",
    "conversation",
    "chat_template",
    "tokenize",
    "return_assistant_tokens_mask",
)


class VllmRenderer:
    """Renders chat bodies as vLLM does. May be called from any thread.

    Args:
        template: The model's template.
        default_kwargs: vLLM's ``--default-chat-template-kwargs``.
        drops_unused_tools: Its ``--exclude-tools-when-tool-choice-none``.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        default_kwargs: Mapping[str, Any],
        drops_unused_tools: bool,
    ) -> None:
        self._template = template
        self._default_kwargs = default_kwargs
        self._drops_unused_tools = drops_unused_tools
        # vLLM looks for the word itself.
        self._knows_developers = any(f"{q}developer{q}" in template.source for q in "\"'")

    def render(self, body: Mapping[str, Any]) -> str:
        """Return the prompt text.

        Raises:
            NotTextError: If it cannot be known here.
            TemplateRefusedError: If the template refuses.
        """
        messages = messages_of(body)
        if not messages:
            raise NotTextError("there are no messages")
        as_parts = self._template.content_format == "openai"
        chat = [_message(message, as_parts) for message in messages]
        if not self._knows_developers and any(m["role"] == "developer" for m in chat):
            chat = _without_developers(chat)
        kwargs, flags = self._variables(body)
        return self._template.render(
            chat,
            tools=self._tools(body),
            add_generation_prompt=flags["add_generation_prompt"],
            continue_final_message=flags["continue_final_message"],
            documents=body.get("documents"),
            kwargs=kwargs,
        )

    def _tools(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        tools = body.get("tools")
        if not tools or (self._drops_unused_tools and body.get("tool_choice") == "none"):
            return None
        if not isinstance(tools, list):
            raise NotTextError("tools must be a list")
        return [_tool(tool) for tool in tools]

    def _variables(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
        asked = body.get("chat_template_kwargs") or {}
        if not isinstance(asked, dict) or any(name in asked for name in _RESERVED):
            raise NotTextError("chat_template_kwargs cannot be passed to a template")
        flags = {
            "add_generation_prompt": bool(body.get("add_generation_prompt", True)),
            "continue_final_message": bool(body.get("continue_final_message", False)),
        }
        effort = body.get("reasoning_effort")
        if effort is not None:
            asked = {"enable_thinking": effort != "none", **asked, "reasoning_effort": effort}
        # Neither null nor "auto" counts as set. The body's own fields win over kwargs.
        kwargs = {
            **self._default_kwargs,
            **{k: v for k, v in asked.items() if v is not None and v != "auto"},
        }
        for name in flags:
            kwargs.pop(name, None)
        if body.get("documents") is not None:
            kwargs.pop("documents", None)
        return kwargs, flags


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotTextError("a tool must be an object with a function that has a name")
    out = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        out["strict"] = function["strict"]
    deferred = tool.get("defer_loading")
    own_deferred = function.get("defer_loading")
    if own_deferred is not None or deferred is not None:
        out["defer_loading"] = deferred if own_deferred is None else own_deferred
    wrapped: dict[str, Any] = {"type": "function", "function": out}
    if deferred is not None:
        wrapped["defer_loading"] = deferred
    return wrapped


def _message(message: Mapping[str, Any], as_parts: bool) -> dict[str, Any]:
    role = message["role"]
    content = message.get("content")
    if type(content) is str and role != "system" and not as_parts:  # nearly every message
        out = {"role": role, "content": content}
    else:
        parts: list[Any] = (
            [text_part(content)] if isinstance(content, str) else _checked_parts(content)
        )
        if role == "system":
            parts = _without_billing_header(parts)
        out = {"role": role, "content": _content(parts, as_parts, role)}
    if role == "assistant":
        _add_assistant_keys(out, message)
    elif role == "tool" and "tool_call_id" in message:
        out["tool_call_id"] = message["tool_call_id"]
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            out[key] = message[key]
    if role == "developer":
        out["tools"] = _developer_tools(message.get("tools"))
    return out


def _checked_parts(content: Any) -> list[Any]:
    if content is None:
        return []
    if not isinstance(content, list):
        raise NotTextError("content must be text or a list of parts")
    for part in content:
        if isinstance(part, str):
            continue
        key = TEXT_KEYS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if key is None or part.get("uuid") is not None:
            raise NotTextError("a content part is not text")
        if not isinstance(part.get(key), str):
            raise NotTextError("a text part has no text")
    return content


def _content(parts: Iterable[Any], as_parts: bool, role: str) -> str | list[dict[str, Any]]:
    if not as_parts:
        # Empty texts leave no newline behind.
        return "\n".join(filter(None, map(_text, parts)))
    if role == "tool":  # templates print tool results
        return "\n".join(map(_text, parts))
    return [
        {
            **text_part(_text(part)),
            **({} if isinstance(part, str) else _unknown_keys(part)),
        }
        for part in parts
    ]


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text: str = part[TEXT_KEYS[part["type"]]]
    return text


def _unknown_keys(part: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in _PART_KEYS}


def _without_billing_header(parts: Sequence[Any]) -> list[Any]:
    out: list[Any] = []
    for part in parts:
        is_text = isinstance(part, str) or part["type"] == "text"
        text = _text(part)
        if not (is_text and text.startswith(_BILLING_HEADER)):
            out.append(part)
        elif rest := text.partition("\n")[2]:
            out.append(rest if isinstance(part, str) else {**part, "text": rest})
    return out


def _add_assistant_keys(out: dict[str, Any], message: Mapping[str, Any]) -> None:
    if calls := tool_calls_of(message):
        out["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        out["reasoning"] = out["reasoning_content"] = reasoning


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if call.get("type") != "function" or not isinstance(function.get("arguments"), str):
        raise NotTextError("a tool call must be of type function, with arguments as text")
    try:
        arguments = json.loads(function["arguments"])
    except json.JSONDecodeError:
        arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    ordered = {"arguments": arguments, "name": function.get("name")}
    known = {"id": call.get("id"), "function": ordered | _others(function, ordered)}
    return {**known, "type": "function", **_others(call, {**known, "type": ""})}


def _others(sent: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sent.items() if key not in known}


def _developer_tools(tools: Any) -> Any:
    """Return a developer message's tools, in the order of their types' fields."""
    if not isinstance(tools, list):
        return None
    fields = ("name", "description", "parameters", "strict")
    out = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise NotTextError("a tool must be an object with a function")
        known = {key: function[key] for key in fields if key in function}
        ordered = {"function": known | _others(function, known)}
        if "type" in tool:
            ordered["type"] = tool["type"]
        out.append(ordered | _others(tool, ordered))
    return out


def _without_developers(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make developer messages system messages, and all system messages one at the front."""
    chat = [
        {k: v for k, v in m.items() if k != "tools"} | {"role": "system"}
        if m["role"] == "developer"
        else m
        for m in chat
    ]
    places = [m for m, message in enumerate(chat) if message["role"] == "system"]
    if places in ([], [0]):
        return chat
    texts = []
    for message in (chat[m] for m in places):
        content = message["content"]
        text = content if isinstance(content, str) else "\n".join(p["text"] for p in content)
        if text:
            texts.append(text)
    merged = {"role": "system", "content": "\n\n".join(texts)}
    return [merged, *(m for m in chat if m["role"] != "system")]
