"""A request of the messages API as a chat request. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.errors import InvalidRequest
from gateway.protocols.anthropic.blocks import assistant_message, text_of_blocks, user_messages

if TYPE_CHECKING:
    from collections.abc import Mapping

# Members that are translated here.
_TRANSLATED = frozenset(
    (
        *("messages", "system", "tools", "tool_choice", "stop_sequences", "metadata"),
        *("output_config", "stream", "stream_options", "n"),
    )
)
# Members without a counterpart that do not change what is asked: hints, budgets, tiers.
_LEFT_OUT = frozenset(
    (
        *("thinking", "service_tier", "container", "context_management", "betas"),
        *("inference_geo", "cache_control"),
    )
)
# Members without a counterpart that would have the model do something else.
_REFUSED = ("mcp_servers",)
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request that asks for the same; members nobody knows go along unchanged.

    Args:
        body: A parsed request to ``/v1/messages``; not changed.

    Raises:
        InvalidRequest: If it is not valid, or asks for what the chat API cannot say.
    """
    for name in _REFUSED:
        if body.get(name):
            raise _refused(name, f"{name!r} is not known to the engines of this model.")
    messages: list[dict[str, Any]] = []
    system = body.get("system")
    if system:
        messages.append({"role": "system", "content": text_of_blocks(system, "system")})
    given = body.get("messages")
    for i, message in enumerate(given if isinstance(given, list) else ()):
        messages += _chat_messages(message, f"messages.{i}")
    chat: dict[str, Any] = {"messages": messages}
    chat |= {
        name: value
        for name, value in body.items()
        if name not in _TRANSLATED and name not in _LEFT_OUT and name not in _REFUSED
    }
    if body.get("stream") is True:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
        chat["user"] = metadata["user_id"]
    _add_tools(chat, body)
    _add_format(chat, body.get("output_config"))
    if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        # The model is to go on with these words, not to answer them.
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def check_max_tokens(body: Mapping[str, Any]) -> None:
    """Refuse a message without the bound that this API asks for: the chat API would set none.

    Raises:
        InvalidRequest: If it is not there, or no positive number.
    """
    given = body.get("max_tokens")
    if not isinstance(given, int) or isinstance(given, bool) or given <= 0:
        raise _refused("max_tokens", "'max_tokens' is required and must be a positive integer.")


def is_messages(body: Mapping[str, Any]) -> bool:
    """Whether a body with messages has what only this API has; for where no path tells."""
    tools = body.get("tools")
    tool = tools[0] if isinstance(tools, list) and tools else None
    has_schema = isinstance(tool, dict) and "input_schema" in tool
    return has_schema or any(name in body for name in ("system", "stop_sequences", "thinking"))


def _chat_messages(message: object, where: str) -> list[dict[str, Any]]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise _refused(where, f"{where}: expected an object with the role user or assistant.")
    assert isinstance(message, dict)  # it has a role
    content = message.get("content")
    if not isinstance(content, str | list):
        raise _refused(where, f"{where}.content: expected text or a list of blocks.")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "system":
        return [{"role": role, "content": text_of_blocks(content, where)}]
    if role == "assistant":
        return [assistant_message(content, where)]
    return user_messages(content, where)


def _add_tools(chat: dict[str, Any], body: Mapping[str, Any]) -> None:
    tools = body.get("tools")
    if not isinstance(tools, list) or not tools:
        return
    chat["tools"] = [_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    if not isinstance(choice, dict):
        return
    kind = choice.get("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _TOOL_CHOICES:
        chat["tool_choice"] = _TOOL_CHOICES[kind]
    else:
        raise _refused("tool_choice", "tool_choice.type: expected auto, any, tool or none.")
    if choice.get("disable_parallel_tool_use") is True:
        chat["parallel_tool_calls"] = False


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise _refused(where, f"{where}: expected an object with a name.")
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("input_schema"), dict):
        raise _refused(
            where,
            f"{where}: {tool['name']!r} is one of the API's own tools; engines of this model know "
            "only tools with an input_schema.",
        )
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _add_format(chat: dict[str, Any], config: object) -> None:
    form = config.get("format") if isinstance(config, dict) else None
    if not isinstance(form, dict):
        return
    if form.get("type") != "json_schema":
        raise _refused("output_config", "output_config.format.type: expected json_schema.")
    schema = {"name": "output", "schema": form.get("schema"), "strict": True}
    chat["response_format"] = {"type": "json_schema", "json_schema": schema}


def _refused(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param)
