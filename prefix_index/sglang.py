"""What SGLang makes of a chat body before it renders.

The body passes through pydantic models: tools come out with their description first and unset
fields added, or, in newer releases, in the order in which they were sent. Parts are joined by
blanks. A conversation that ends with the assistant is continued behind the generation prompt if
the client asks for that, and otherwise that turn becomes the user's. A body that SGLang answers
with 400 is refused here or not, as is simpler.

Source: SGLang, ``srt/entrypoints/openai/protocol.py`` and ``serving_chat.py``,
``srt/parser/jinja_template_utils.py``; its main of summer 2026 and release 0.5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from prefix_index.chat import TemplateRefusedError
from prefix_index.messages import NotTextError, messages_of, text_part, tool_calls_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prefix_index.chat import ChatTemplate

_ROLES = ("system", "assistant", "tool", "function", "developer", "latest_reminder")
# What SGLang passes to the template itself; a second value is an error there.
_RESERVED = (
    "messages",
    "conversation",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "return_dict",
    "chat_template",
    "continue_final_message",
    "return_assistant_tokens_mask",
)


class SglangRenderer:
    """Renders chat bodies as SGLang does. May be called from any thread.

    Args:
        template: The model's template.
        default_kwargs: Template variables of every request.
        keeps_tool_order: Whether it prints a tool's fields in the order sent (0.5.23 does).
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        default_kwargs: Mapping[str, Any],
        keeps_tool_order: bool,
    ) -> None:
        self._template = template
        self._tool = _tool_as_sent if keeps_tool_order else _tool
        self._default_kwargs = default_kwargs
        self._as_parts = template.sglang_content_format == "openai"

    def render(self, body: Mapping[str, Any]) -> str:
        """Return the prompt text.

        Raises:
            NotTextError: If it cannot be known here.
            TemplateRefusedError: If the template refuses.
        """
        chat = [self._message(message) for message in messages_of(body)]
        if not chat:
            raise NotTextError("there are no messages")
        chat, continued = _end_with_user(chat, body.get("continue_final_message") is True)
        tools = self._tools(body)
        kwargs = {**self._default_kwargs, **_variables(body)}
        try:
            text = self._template.render(chat, tools=tools, kwargs=kwargs)
        except TemplateRefusedError:
            if not tools:
                raise
            # Some templates want functions without the wrapper; SGLang tries again with those.
            bare = [tool["function"] for tool in tools]
            text = self._template.render(chat, tools=bare, kwargs=kwargs)
        return text + continued

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role = message["role"]
        content = message.get("content")
        if role == "user":
            if content is None:
                raise NotTextError("a user message must have content")
            return {"role": role, "content": _content(content, role, self._as_parts)}
        role = role.lower()
        if role not in _ROLES:
            raise NotTextError("a message has an unknown role")
        out = {
            "role": role,
            "content": "" if content is None else _content(content, role, self._as_parts),
            "tool_call_id": message.get("tool_call_id"),
            "name": message.get("name"),
            "reasoning_content": message.get("reasoning_content"),
            "tool_calls": None,
            "tools": None,
        }
        if message.get("tool_calls") is not None:
            out["tool_calls"] = [_tool_call(call, role) for call in tool_calls_of(message)]
        if isinstance(message.get("tools"), list):
            out["tools"] = [self._tool(tool) for tool in message["tools"]]
        return {key: value for key, value in out.items() if value is not None}

    def _tools(self, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        tools = body.get("tools")
        choice = body.get("tool_choice")
        if not tools or choice == "none":
            return None
        if not isinstance(tools, list):
            raise NotTextError("tools must be a list")
        dumped = [self._tool(tool) for tool in tools]
        if isinstance(choice, dict):
            # A named tool is the only one that the model sees.
            name = choice.get("function", {}).get("name")
            dumped = [tool for tool in dumped if tool["function"]["name"] == name]
        return dumped


def _content(content: Any, role: str, as_parts: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise NotTextError("content must be text or a list of parts")
    texts = [text for part in content if (text := _text(part, role)) is not None]
    if as_parts and role != "tool":
        return [text_part(text) for text in texts]
    return " ".join(texts)


def _text(part: Any, role: str) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("thinking", "reasoning") and role == "assistant":
        return None  # accepted, and left out of the prompt
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise NotTextError("a content part is not text")
    return text


def _tool_call(call: dict[str, Any], role: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str) and role == "assistant":
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise NotTextError("tool call arguments must be JSON") from error
        if not isinstance(arguments, dict):
            raise NotTextError("tool call arguments must be an object")
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotTextError("a tool must be an object with a function that has a name")
    strict = function.get("strict", False)
    if not isinstance(strict, bool):
        raise NotTextError("strict must be true or false")
    out = {
        "description": function.get("description"),
        "name": function["name"],
        "parameters": function.get("parameters"),
        "strict": strict,
    }
    if function.get("defer_loading") is not None:
        out["defer_loading"] = function["defer_loading"]
    return {"type": tool.get("type", "function"), "function": out}


def _tool_as_sent(tool: Any) -> dict[str, Any]:
    """Return a tool with its fields in the order sent, the unset ones behind them."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotTextError("a tool must be an object with a function that has a name")
    fields = ("description", "name", "parameters")
    optional = ("strict", "defer_loading")
    out = {
        key: value
        for key, value in function.items()
        if key in fields or (key in optional and value is not None)
    }
    out |= {key: None for key in fields if key not in out}
    deferred = tool.get("defer_loading")
    if deferred is not None:
        out.setdefault("defer_loading", deferred)
    return {
        "type": tool.get("type", "function"),
        "function": out,
        "defer_loading": deferred,
    }


def _end_with_user(
    chat: list[dict[str, Any]], is_continued: bool
) -> tuple[list[dict[str, Any]], str]:
    """Return the messages to render and the text that goes behind the generation prompt."""
    *before, final = chat
    content = final["content"]
    if final["role"] != "assistant" or not isinstance(content, str):
        return chat, ""
    if is_continued:
        return before, content
    return [*before, {"role": "user", "content": content}], ""


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    asked = body.get("chat_template_kwargs") or {}
    if not isinstance(asked, dict) or any(name in asked for name in _RESERVED):
        raise NotTextError("chat_template_kwargs cannot be passed to a template")
    effort, thinks = _effort(body)
    kwargs = dict(asked)
    if thinks is not None:
        # Models look at one or the other.
        kwargs.setdefault("thinking", thinks)
        kwargs.setdefault("enable_thinking", thinks)
    if kwargs.get("reasoning_effort") is None:
        kwargs.pop("reasoning_effort", None)
        if effort is not None:
            kwargs["reasoning_effort"] = effort
    return kwargs


def _effort(body: Mapping[str, Any]) -> tuple[Any, bool | None]:
    """Return the effort a body asks for, and whether it thereby asks to think."""
    effort = body.get("reasoning_effort")
    thinks = None
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict):
        asked = reasoning.get("effort")
        if asked is None:
            asked = reasoning.get("reasoning_effort")
        effort = effort if asked is None else asked
        enabled = reasoning.get("enabled")
        if enabled is None:
            enabled = reasoning.get("enable", False)
        if isinstance(enabled, str):
            enabled = enabled.strip().lower() in ("1", "true", "yes", "y", "on")
        if enabled:
            thinks = True
    if effort is not None:
        thinks = effort != "none"
    return effort, thinks
