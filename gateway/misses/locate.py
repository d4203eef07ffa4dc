"""The place in a request's body where its prompt parts from a near-duplicate's, and what is there.

Found in the bodies, not in the tokens: a place is worth telling only in the words of whoever wrote
the request. Only where two changes compete is a third prompt read, to see which one comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from gateway.misses.causes import Cause
from gateway.misses.changed_text import first_char, is_reordered, volatile_at
from gateway.misses.compare import first_difference
from gateway.misses.known import INSTRUCTION_ROLES, message_text, prompt_text
from prefix_index.chat import TemplateRefusedError

if TYPE_CHECKING:
    from gateway.misses.known import Known

# Fields of a body, beside messages and tools, that templates print or branch on.
TEMPLATE_OPTIONS = (
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "tool_choice",
    "response_format",
    "add_generation_prompt",
    "continue_final_message",
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prefix breaks.

    Attributes:
        cause: What breaks it.
        segment: ``system``, ``tools``, ``history`` or ``current``; ``template`` for text of none.
        path: The place in the body, as one would write it in code.
        char: Characters into the text at ``path``; None where there is no one text.
        text: The text at ``path``; never shown unless the operator allows it.
    """

    cause: Cause
    segment: str
    path: str
    char: int | None = None
    text: str = ""


def locate(known: Known, twin: Known, token: int) -> Place:
    """Return where ``known`` parts from ``twin``.

    Args:
        known: The prompt that missed.
        twin: The near-duplicate.
        token: First position where their tokens differ.
    """
    if not known.num_messages:
        return _in_prompt(known, twin)
    in_tools = _in_tools(known.tools, twin.tools)
    in_messages = _in_messages(known.messages, twin.messages)
    if in_tools is not None and in_messages is not None:
        return in_tools if _tools_come_first(known, twin, token) else in_messages
    place = in_tools or in_messages
    if place is not None:
        return place
    for option in TEMPLATE_OPTIONS:
        if known.body.get(option) != twin.body.get(option):
            return Place(Cause.TEMPLATE_OPTIONS, "template", option)
    if known.prompt.root != twin.prompt.root:
        return Place(Cause.OTHER, "template", "cache_salt")
    # Equal bodies are rendered alike, unless the template looks at the clock.
    return Place(Cause.TEMPLATE_DATE, "template", "chat_template")


def _in_prompt(known: Known, twin: Known) -> Place:
    text, before = prompt_text(known.body), prompt_text(twin.body)
    if text is None or before is None:
        return Place(Cause.OTHER, "current", "prompt")
    char = first_char(text, before)
    cause = volatile_at(text, before, char)
    if cause is None:
        cause = Cause.PASSAGE_ORDER if is_reordered(text, before) else Cause.MOVED_TEXT
    return Place(cause, "current", "prompt", char, text)


def _in_tools(tools: list[Any], before: list[Any]) -> Place | None:
    printed, printed_before = [_dumps(t) for t in tools], [_dumps(t) for t in before]
    if printed == printed_before:
        return None
    plain, plain_before = [_plain(t) for t in tools], [_plain(t) for t in before]
    if plain == plain_before:
        at = _first_item(printed, printed_before)
        return Place(Cause.TOOL_SERIALISATION, "tools", f"tools[{at}]")
    at = _first_item(plain, plain_before)
    is_same_set = sorted(plain) == sorted(plain_before)
    cause = Cause.TOOL_ORDER if is_same_set else Cause.TOOLS_CHANGED
    return Place(cause, "tools", f"tools[{at}]")


def _in_messages(messages: list[dict[str, Any]], before: list[dict[str, Any]]) -> Place | None:
    printed, printed_before = [_dumps(m) for m in messages], [_dumps(m) for m in before]
    at = _first_item(printed, printed_before)
    if at == len(messages):
        # The beginning of the twin: whatever differs, it is no message.
        return None
    message = messages[at]
    segment = _segment(message, is_last=at == len(messages) - 1)
    if at == len(before):
        return None
    shift = _shift(printed, printed_before, at)
    if shift is not None:
        return Place(shift, segment, f"messages[{at}]", 0, message_text(message))
    was_last = at == len(before) - 1
    return _in_message(message, before[at], at, segment, was_last=was_last)


def _in_message(
    message: dict[str, Any], before: dict[str, Any], at: int, segment: str, *, was_last: bool
) -> Place:
    path = f"messages[{at}]"
    if segment == "system":
        unnamed = Cause.SYSTEM_TEXT
    elif segment == "current" or was_last:
        # What the twin had in its last message moves on with the conversation.
        unnamed = Cause.MOVED_TEXT
    else:
        unnamed = Cause.HISTORY_EDIT
    text, text_before = message_text(message), message_text(before)
    if message.get("role") != before.get("role"):
        return Place(unnamed, segment, path, 0, text)
    if text == text_before:
        return _beside_text(message, before, path, segment)
    char = first_char(text, text_before)
    cause = volatile_at(text, text_before, char)
    if cause is None:
        cause = Cause.PASSAGE_ORDER if is_reordered(text, text_before) else unnamed
    return Place(cause, segment, f"{path}.content", char, text)


def _beside_text(message: dict[str, Any], before: dict[str, Any], path: str, segment: str) -> Place:
    """Name the field of two messages of equal text that differs, tool calls by their number."""
    calls, calls_before = message.get("tool_calls"), before.get("tool_calls")
    if isinstance(calls, list) and isinstance(calls_before, list) and calls != calls_before:
        at = _first_item(list(map(_dumps, calls)), list(map(_dumps, calls_before)))
        same = [_plain(_parsed(c)) for c in calls] == [_plain(_parsed(c)) for c in calls_before]
        cause = Cause.TOOL_SERIALISATION if same else Cause.HISTORY_EDIT
        return Place(cause, segment, f"{path}.tool_calls[{at}]")
    is_same = _plain(message) == _plain(before)
    names = [n for n in {**message, **before} if _dumps(message.get(n)) != _dumps(before.get(n))]
    cause = Cause.TOOL_SERIALISATION if is_same else Cause.HISTORY_EDIT
    return Place(cause, segment, f"{path}.{names[0]}" if names else path)


def _shift(printed: list[bytes], before: list[bytes], at: int) -> Cause | None:
    """Say whether whole messages were taken out before this one, or put in."""
    if _continues(printed, at, before, at + 1):
        return Cause.HISTORY_TRIMMED
    if _continues(before, at, printed, at + 1):
        return Cause.HISTORY_EDIT
    return None


def _continues(left: list[bytes], at: int, right: list[bytes], start: int) -> bool:
    """Whether ``left`` from ``at`` on goes on like ``right`` from somewhere behind ``start``.

    Two messages in a row are no chance; one is enough where either conversation ends with it.
    """
    for begin in range(start, len(right)):
        if right[begin] != left[at]:
            continue
        both = (at + 1 < len(left), begin + 1 < len(right))
        if not all(both) or left[at + 1] == right[begin + 1]:
            return True
    return False


def _tools_come_first(known: Known, twin: Known, token: int) -> bool:
    """Whether the two prompts would agree for longer if only their tools were equal."""
    if known.reader is None:
        return False
    body = {**known.body, "tools": twin.body.get("tools")}
    try:
        draft = known.reader.chat(body, salt=known.salt)
        ids = draft.complete().token_ids
    except (TemplateRefusedError, TypeError, ValueError):
        return False
    return first_difference(ids, twin.prompt.token_ids, 0) > token


def _segment(message: Mapping[str, Any], *, is_last: bool) -> str:
    if message.get("role") in INSTRUCTION_ROLES:
        return "system"
    return "current" if is_last else "history"


def _first_item(left: list[bytes], right: list[bytes]) -> int:
    at, end = 0, min(len(left), len(right))
    while at < end and left[at] == right[at]:
        at += 1
    return at


def _parsed(call: Any) -> Any:
    """Return a tool call with its arguments as an object, where they are the text of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": orjson.loads(function["arguments"])}}
    except orjson.JSONDecodeError:
        return call


def _plain(value: Any) -> bytes:
    """Print a value so that its serialisation no longer matters: sorted keys and ``required``."""
    return orjson.dumps(_sorted_required(value), option=orjson.OPT_SORT_KEYS)


def _sorted_required(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: sorted(item)
            if key == "required"
            and isinstance(item, list)
            and all(isinstance(i, str) for i in item)
            else _sorted_required(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_sorted_required(item) for item in value]
    return value


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value)
