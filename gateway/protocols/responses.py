"""What can be read of a request to the responses API, and which worker keeps which response. Pure.

Source: OpenAI's API reference, "Responses" (input items, ``previous_response_id``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# Members that mean the same in the chat API, for keys, hints and rendering.
_SHARED = (
    *("model", "stream", "user", "prompt_cache_key", "warmlane", "cache_salt", "stop"),
    *("chat_template_kwargs", "tool_choice"),
)
_TEXT_PARTS = frozenset(("input_text", "output_text", "text"))
# Ids of responses whose worker is remembered: about 15 MB. A response nobody went on with while
# so many others came is rarely gone on with later.
MAX_RESPONSES = 50_000


def readable(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the chat request whose prompt is that of a request to ``/v1/responses``.

    As engines do it that have no format of their own for this API: instructions are the system
    message, input items are messages, functions are tools. None where the prompt depends on what
    only the engine knows: an earlier response, stored items, files, tools of its own.

    Args:
        body: The parsed request; not changed.
    """
    if any(body.get(name) for name in ("previous_response_id", "conversation", "prompt")):
        return None
    messages: list[dict[str, Any]] = []
    if isinstance(body.get("instructions"), str):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            message = _message(item)
            if message is None:
                return None
            messages.append(message)
    if not messages:
        return None
    chat: dict[str, Any] = {name: body[name] for name in _SHARED if name in body}
    chat["messages"] = messages
    tools = body.get("tools")
    if isinstance(tools, list) and tools:
        functions = [_function(tool) for tool in tools]
        if None in functions:
            return None
        chat["tools"] = functions
    return chat


def _message(item: object) -> dict[str, Any] | None:
    if not isinstance(item, dict):
        return None
    kind = item.get("type", "message")
    if kind == "function_call_output" and isinstance(item.get("output"), str):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item["output"]}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind != "message" or not isinstance(item.get("role"), str):
        return None
    role = "system" if item["role"] == "developer" else item["role"]
    content = item.get("content")
    if isinstance(content, str):
        return {"role": role, "content": content}
    parts = []
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
            return None
        parts.append({"type": "text", "text": part.get("text")})
    return {"role": role, "content": parts} if parts else None


def _function(tool: object) -> dict[str, Any] | None:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return None
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def routing_text(body: Mapping[str, Any]) -> str:
    """Return what a request says in plain text, as far as it goes, to route by."""
    texts = [body.get("instructions"), body.get("input")]
    if isinstance(body.get("input"), list):
        texts[1:] = [_text(item) for item in body["input"]]
    return "\n".join(text for text in texts if isinstance(text, str))


def _text(item: object) -> str:
    content = item.get("content") if isinstance(item, dict) else None
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


class ResponseHomes:
    """Which worker keeps which response: bounded, least recently used first; one event loop only.

    Args:
        max_responses: Bound on their number.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES) -> None:
        self._max_responses = max_responses
        self._workers: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, tenant: str, response_id: object) -> str:
        """Return the worker that keeps a tenant's response; empty if that is not known."""
        if not isinstance(response_id, str):
            return ""
        key = (tenant, response_id)
        worker = self._workers.get(key, "")
        if worker:
            self._workers.move_to_end(key)
        return worker

    def keep(self, tenant: str, response_id: object, worker: str) -> None:
        """Remember who made a response."""
        if not isinstance(response_id, str) or not 0 < len(response_id) <= 256:
            return
        self._workers[tenant, response_id] = worker
        self._workers.move_to_end((tenant, response_id))
        while len(self._workers) > self._max_responses:
            self._workers.popitem(last=False)
