"""Rule ``stable-tools``: a tool set gets the order and serialisation in which it was first seen.

Two lists of tools are one set if their tools are equal up to order. Keys may stand in any order
only where JSON Schema and the tool format give order no meaning; under ``properties``, ``enum``,
``required``, defaults and everything unknown it is part of what the model reads, so it is part of
the identity. Nothing is ever sorted in what is forwarded.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from hashlib import blake2b
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from prefix_index.canonical.spans import Edit, value_end, value_start

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prefix_index.canonical.firstseen import FirstSeen

# Schema keywords whose value is one schema.
_SCHEMA = frozenset(
    (
        *("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames"),
        *("then", "unevaluatedItems", "unevaluatedProperties"),
    )
)
# Keywords whose value maps names to schemas: the order of the names is meaning.
_SCHEMA_MAP = frozenset(
    ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
)
# Keywords whose value lists schemas.
_SCHEMA_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
# Where a tool holds its schema: OpenAI's and Anthropic's names.
_PARAMETERS = frozenset(("parameters", "input_schema"))
# Deeper than any schema, and well within the interpreter's stack.
_MAX_DEPTH = 200
# Lists that begin alike are told apart by comparing them whole; shorter ones are not worth it.
_HEAD_BYTES = 256
# The orders that one client's reconnecting tool servers give, and the sets of its agents.
_MAX_SAME_HEAD = 8
# With the next: at most 64 MiB, in practice a few.
_MAX_SEEN_BYTES = 64 << 10
_MAX_HEADS = 128


class ToolSet(NamedTuple):
    """Identity of a list of tools.

    Attributes:
        id: Equal for equal sets, whatever the order of the tools. 16 bytes.
        order: Identity of each tool, as listed.
    """

    id: bytes
    order: tuple[bytes, ...]


class StableTools(NamedTuple):
    """What the rule says about one body.

    Attributes:
        set_id: The set's identity; None when there is no list of tools that it can identify.
        changed: ``order``, ``serialisation`` or nothing.
        edit: Puts the first-seen form in place; None when that is what was sent.
    """

    set_id: bytes | None = None
    changed: str = ""
    edit: Edit | None = None


class _NotPlainError(ValueError):
    """Tools that parsers could read in different ways are left alone."""


def stable_tools(
    body: Mapping[str, Any], raw: bytes, tenant: str, memory: FirstSeen
) -> StableTools:
    """Say how a body's tools have to change to be in their first-seen form.

    A set that is new to ``memory`` is kept there. ``tool_choice``, ``response_format`` and all
    other members are not looked at.
    """
    tools = body.get("tools")
    if not isinstance(tools, list) or not tools:
        return StableTools()
    start = value_start(raw, "tools")
    sent, tool_set = _seen.at(raw, start)
    if tool_set is None:
        return StableTools()
    form = memory.keep(tenant, tool_set.id, sent)
    if form == sent:
        return StableTools(tool_set.id)
    kept = _seen.at(form, 0)[1]
    is_reordered = kept is not None and kept.order != tool_set.order
    changed = "order" if is_reordered else "serialisation"
    return StableTools(tool_set.id, changed, Edit(start, start + len(sent), form))


def identify(tools: bytes) -> ToolSet | None:
    """Return the identity of a JSON list of tools. Costs about a millisecond for 50 tools.

    Returns:
        None for tools that cannot be told apart safely: duplicate keys, objects missing, numbers
        beyond a double, nesting deeper than any schema.
    """
    try:
        # Not orjson: integers beyond 64 bits must stay apart, and duplicate keys must show.
        parsed = json.loads(tools, object_pairs_hook=_without_duplicates, parse_float=_finite_float)
        order = tuple(_digest(_tool(tool, 0)) for tool in parsed)
    except (ValueError, RecursionError):
        return None
    return ToolSet(_digest(sorted(each.hex() for each in order)), order)


class SeenTools:
    """Lists of tools seen lately: where one ends in a body, and which set it is, without a scan.

    A JSON list ends itself, so a body that goes on with the bytes of a known list has that list.
    """

    def __init__(self) -> None:
        self._by_head: OrderedDict[bytes, list[tuple[bytes, ToolSet | None]]] = OrderedDict()

    def at(self, raw: bytes, start: int) -> tuple[bytes, ToolSet | None]:
        """Return the bytes of the list that begins at ``start``, and its identity."""
        head = raw[start : start + _HEAD_BYTES]
        known = self._by_head.get(head)
        if known is not None:
            self._by_head.move_to_end(head)
            for entry in known:
                if raw.startswith(entry[0], start):
                    return entry
        tools = raw[start : value_end(raw, start)]
        entry = tools, identify(tools)
        if _HEAD_BYTES <= len(tools) <= _MAX_SEEN_BYTES:
            self._by_head[head] = [entry, *(known or ())][:_MAX_SAME_HEAD]
            if len(self._by_head) > _MAX_HEADS:
                self._by_head.popitem(last=False)
        return entry


# A memory of pure results, so one serves everybody.
_seen = SeenTools()


def _digest(value: Any) -> bytes:
    return blake2b(json.dumps(value).encode(), digest_size=16).digest()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _NotPlainError("an object has two members of one name")
    return found


def _finite_float(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise _NotPlainError("a number is beyond what a double can tell apart")
    return number


# Objects become lists of [key, value] below, sorted by key where order means nothing. A marker
# tells them from lists.


def _tool(tool: Any, depth: int) -> Any:
    """Return a tool with its own keys and those of its ``function`` in one order."""
    if not isinstance(tool, dict):
        raise _NotPlainError("a tool is not an object")
    pairs: list[Any] = []
    for key in sorted(tool):
        value = tool[key]
        if key == "function" and isinstance(value, dict) and depth == 0:
            value = _tool(value, 1)
        else:
            value = _schema(value, 0) if key in _PARAMETERS else _as_sent(value)
        pairs.append([key, value])
    return {"sorted": pairs}


def _schema(schema: Any, depth: int) -> Any:
    """Return a schema with its keywords in one order and everything else as it was sent."""
    if not isinstance(schema, dict):
        return _as_sent(schema)
    if depth > _MAX_DEPTH:
        raise _NotPlainError("a schema is nested too deep")
    return {"sorted": [[key, _keyword(key, schema[key], depth + 1)] for key in sorted(schema)]}


def _keyword(key: str, value: Any, depth: int) -> Any:
    if key in _SCHEMA_MAP and isinstance(value, dict):
        return {"ordered": [[name, _schema(each, depth)] for name, each in value.items()]}
    if key in _SCHEMA:
        return _schema(value, depth)
    if key in _SCHEMA_LIST and isinstance(value, list):
        return [_schema(each, depth) for each in value]
    return _as_sent(value)


def _as_sent(value: Any) -> Any:
    """Mark a value whose order counts throughout; dumped as it stands, order of keys included."""
    return {"as_sent": value}
