"""Canonicalise a request body: the named rules, applied to its bytes in a fixed order.

A rule changes one value; every byte outside of it stays as it was sent. The result is pure in the
body, its bytes and the memory of first-seen forms, and canonical already: applying the rules to it
again changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

from prefix_index.canonical.attribution import lift_attribution
from prefix_index.canonical.spans import Edit, replace
from prefix_index.canonical.tail import move_volatile
from prefix_index.canonical.tools import stable_tools

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from prefix_index.canonical.firstseen import FirstSeen

# In the order of application: a billing line is lifted before volatile lines are looked for.
RULES = ("attribution-header", "volatile-tail", "stable-tools")


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """What one rule did to a body.

    Attributes:
        rule: Its name.
        applied: Whether it changed the body.
        changed: What it changed: ``order``, ``serialisation``, ``line``, or the count of lines.
        refused: Why it was not tried.
        tool_set: Identity of the tool set, in hex; equal for the same tools in any order.
    """

    rule: str
    applied: bool
    changed: str = ""
    refused: str = ""
    tool_set: str = ""


@dataclass(frozen=True, slots=True)
class Canonical:
    """A body after the rules.

    Attributes:
        raw: Its bytes; the very object that came in when nothing changed.
        body: What a parser reads from exactly these bytes.
        applied: One entry per rule asked for, in the order of application.
    """

    raw: bytes
    body: Mapping[str, Any]
    applied: tuple[AppliedRule, ...]

    @property
    def is_changed(self) -> bool:
        """Whether any rule changed the body."""
        return any(rule.applied for rule in self.applied)


def _unknown_template() -> bool:
    return False


def canonicalise(
    body: Mapping[str, Any],
    raw: bytes,
    *,
    rules: Collection[str],
    tenant: str,
    memory: FirstSeen,
    keeps_system_first: Callable[[], bool] = _unknown_template,
    parse: Callable[[bytes], Mapping[str, Any]] = orjson.loads,
) -> Canonical:
    """Apply rules to a chat body.

    Args:
        body: The parsed body; not changed.
        raw: Its bytes.
        rules: Names out of ``RULES``; their order does not matter.
        tenant: Whose first-seen forms count.
        memory: First-seen forms; a new tool set is kept there.
        keeps_system_first: Whether the model's template prints the system text first and apart;
            asked only when ``volatile-tail`` is among the rules. Without that it is refused.
        parse: Reads changed bytes, as ``body`` was read.

    Raises:
        ValueError: If a rule is unknown.
    """
    if unknown := set(rules) - set(RULES):
        raise ValueError(f"rules: expected some of {', '.join(RULES)}, got {sorted(unknown)}")
    applied = []
    for name in RULES:
        if name not in rules:
            continue
        if name == "volatile-tail" and not keeps_system_first():
            applied.append(AppliedRule(name, applied=False, refused="template"))
            continue
        rule, edits = _apply(name, body, raw, tenant, memory)
        if edits:
            raw = replace(raw, edits)
            body = parse(raw)
        applied.append(rule)
    return Canonical(raw, body, tuple(applied))


def better_form(
    held_as_sent: int | None, held_rewritten: int | None
) -> Literal["as_sent", "rewritten"]:
    """Say which form to forward, so that a rule never makes reuse worse.

    Args:
        held_as_sent: Most tokens that any worker holds of the form as sent; None = not known.
        held_rewritten: The same of the rewritten form.

    Returns:
        The rewritten form unless it is known to hit less; on a tie too, since only what was
        forwarded once can be held later.
    """
    if held_as_sent is None or held_rewritten is None:
        return "rewritten"
    return "as_sent" if held_as_sent > held_rewritten else "rewritten"


def _apply(
    name: str, body: Mapping[str, Any], raw: bytes, tenant: str, memory: FirstSeen
) -> tuple[AppliedRule, Sequence[Edit]]:
    if name == "attribution-header":
        edit = lift_attribution(body, raw)
        is_changed = edit is not None
        rule = AppliedRule(name, is_changed, "line" if is_changed else "")
    elif name == "volatile-tail":
        tail = move_volatile(body, raw)
        changed = f"{tail.num_lines} lines" if tail.edits else ""
        return AppliedRule(name, bool(tail.edits), changed), tail.edits
    else:
        tools = stable_tools(body, raw, tenant, memory)
        edit = tools.edit
        tool_set = tools.set_id.hex() if tools.set_id else ""
        rule = AppliedRule(name, edit is not None, tools.changed, tool_set=tool_set)
    return rule, (edit,) if edit is not None else ()
