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

from prefix_index.canonical.spans import Edit, find

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
# 16-byte digests: tens of bytes per entry, and identities of 50 tools take a millisecond.
_MAX_MEMO = 4096
_MAX_DEPTH = 200


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


_memo: OrderedDict[bytes, ToolSet | None] = OrderedDict()


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
    span = find(raw, ("tools",))
    assert span is not None  # the parsed body has them
    sent = raw[span.start : span.end]
    tool_set = identify(sent)
    if tool_set is None:
        return StableTools()
    form = memory.keep(tenant, tool_set.id, sent)
    if form == sent:
        return StableTools(tool_set.id)
    kept = identify(form)
    is_reordered = kept is not None and kept.order != tool_set.order
    changed = "order" if is_reordered else "serialisation"
    return StableTools(tool_set.id, changed, Edit(span.start, span.end, form))


def identify(tools: bytes) -> ToolSet | None:
    """Return the identity of a JSON list of tools; known bytes cost one hash.

    Returns:
        None for tools that cannot be told apart safely: duplicate keys, objects missing, nesting
        deeper than any schema.
    """
    digest = blake2b(tools, digest_size=16).digest()
    if digest in _memo:
        _memo.move_to_end(digest)
        return _memo[digest]
    found = _identify(tools)
    _memo[digest] = found
    if len(_memo) > _MAX_MEMO:
        _memo.popitem(last=False)
    return found


def _identify(tools: bytes) -> ToolSet | None:
    try:
        # Not orjson: integers beyond 64 bits must stay apart, and duplicate keys must show.
        parsed = json.loads(tools, object_pairs_hook=_without_duplicates, parse_float=_finite_float)
        order = tuple(_digest(_tool(tool, 0)) for tool in parsed)
    except (ValueError, RecursionError):
        return None
    return ToolSet(_digest(sorted(each.hex() for each in order)), order)


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
