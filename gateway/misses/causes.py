"""What breaks a prefix, as a bounded set of names, each with what an operator can do about it."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a prompt hit less than a near-duplicate before it (bounded: it is a metric label)."""

    DATETIME = "datetime"
    DATE = "date"
    UUID = "uuid"
    HEX_ID = "hex_id"
    COUNTER = "counter"
    ATTRIBUTION_HEADER = "attribution_header"
    RANDOM = "random"
    TOOL_ORDER = "tool_order"
    TOOL_SERIALISATION = "tool_serialisation"
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_TEXT = "system_text"
    HISTORY_EDIT = "history_edit"
    HISTORY_TRIMMED = "history_trimmed"
    PASSAGE_ORDER = "passage_order"
    MOVED_TEXT = "moved_text"
    TEMPLATE_DATE = "template_date"
    TEMPLATE_OPTIONS = "template_options"
    NOT_CACHED = "not_cached"
    ROUTED_ELSEWHERE = "routed_elsewhere"
    OTHER = "other"


_MOVE = "move it behind the stable text, to the last message or into a tool's answer"

ADVICE = {
    Cause.DATETIME: (
        f"A clock is printed before stable text: {_MOVE}, or round it to the day. "
        "In rewrite mode the rule `volatile-tail` moves such a line of the system text."
    ),
    Cause.DATE: f"A date is printed before stable text: {_MOVE}.",
    Cause.UUID: f"A fresh UUID is printed before stable text: drop it, or {_MOVE}.",
    Cause.HEX_ID: f"An id is printed before stable text: drop it, or {_MOVE}.",
    Cause.COUNTER: f"A counter is printed before stable text: drop it, or {_MOVE}.",
    Cause.ATTRIBUTION_HEADER: (
        "A coding agent prints a billing line per request into the system text: switch it off "
        "there, or allow the rule `attribution-header` in rewrite mode."
    ),
    Cause.RANDOM: f"Random text is printed before stable text: drop it, or {_MOVE}.",
    Cause.TOOL_ORDER: (
        "The same tools come in another order: send them in a fixed one, or allow the rule "
        "`stable-tools` in rewrite mode."
    ),
    Cause.TOOL_SERIALISATION: (
        "The same tools or tool calls come in another serialisation: print them with a fixed "
        "key order, or allow the rule `stable-tools` in rewrite mode."
    ),
    Cause.TOOLS_CHANGED: (
        "The set of tools differs between requests: send one set and refuse the tools that are "
        "not wanted, or order them so that the common ones come first."
    ),
    Cause.SYSTEM_TEXT: (
        "Text that differs per user or per request is printed before stable text: "
        "put the shared text first and the personal text behind it."
    ),
    Cause.HISTORY_EDIT: (
        "Earlier messages are changed after they were sent: append instead of editing, and "
        "inject context into the last message only."
    ),
    Cause.HISTORY_TRIMMED: (
        "Old messages are dropped from the front of the history, which moves all others: trim "
        "rarely and by much, not by one message per turn."
    ),
    Cause.PASSAGE_ORDER: (
        "The same passages come in another order: order them by their id or place in the "
        "document instead of by score, the common ones first."
    ),
    Cause.MOVED_TEXT: (
        "A large stable text stands behind changing text: put it first, for example into the "
        "system message."
    ),
    Cause.TEMPLATE_DATE: (
        "The chat template prints the date: pass a fixed date in `chat_template_kwargs`, or use "
        "a template without one."
    ),
    Cause.TEMPLATE_OPTIONS: (
        "The same messages are rendered with other template options (`chat_template_kwargs`, "
        "`reasoning_effort`, `documents`): keep them fixed within one conversation."
    ),
    Cause.NOT_CACHED: (
        "The prefix was unchanged but no worker held it any more: the caches are too small for "
        "the working set, or a worker restarted. Add KV capacity or an offload tier."
    ),
    Cause.ROUTED_ELSEWHERE: (
        "The prefix was unchanged but another worker held it: load decided against the holder. "
        "Harmless in bursts; if it goes on, add capacity."
    ),
    Cause.OTHER: "The prompts differ in a way without a name here; look at the example's place.",
}


def volatile_cause(kind: str) -> Cause:
    """Return the cause for a kind of volatile text; a kind without a name of its own is random."""
    try:
        return Cause(kind.replace(" ", "_").replace("-", "_"))
    except ValueError:
        return Cause.RANDOM
