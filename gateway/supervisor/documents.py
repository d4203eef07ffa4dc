"""Merge what the admin endpoints of several processes answer into one answer.

Every process watches the same workers and shares one index, so most of what they say is the same;
their own load and counts add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Document = dict[str, Any]

# Groups shown per cause of misses; as many as one process shows.
MAX_LISTED = 10


def merge_workers(documents: list[Document]) -> Document:
    """``GET workers``: one row per worker; load adds up, one process that sees a fault shows it."""
    rows: dict[str, Document] = {}
    for row in (row for document in documents for row in document["workers"]):
        into = rows.get(row["id"])
        if into is None:
            rows[row["id"]] = dict(row)
            continue
        for name in ("in_flight", "queued_tokens", "gaps", "decode_errors"):
            into[name] = _either(into.get(name), row.get(name), lambda a, b: a + b)
        into["event_age_s"] = _either(into.get("event_age_s"), row.get("event_age_s"), min)
        into["ready"] = into["ready"] and row["ready"]
        into["blocks"] = _by_key(into["blocks"], row["blocks"], max)
        if into["state"] == "ready":
            into["state"] = row["state"]
    return {"workers": list(rows.values())}


def merge_index(documents: list[Document]) -> Document:
    """``GET index``: one row per pool; the fullest view, all unread prompts."""
    pools: dict[str, Document] = {}
    for row in (row for document in documents for row in document["pools"]):
        into = pools.get(row["pool"])
        if into is None:
            pools[row["pool"]] = dict(row)
            continue
        into["blocks"] = max(into["blocks"], row["blocks"])
        into["unread_prompts"] = _by_key(
            into["unread_prompts"], row["unread_prompts"], lambda a, b: a + b
        )
    return {**documents[0], "pools": list(pools.values())}


def merge_misses(documents: list[Document]) -> Document:
    """``GET misses``: causes of all processes, the most expensive first."""
    causes: dict[tuple[str, str], Document] = {}
    for row in (row for document in documents for row in document["causes"]):
        key = (row["cause"], row["segment"])
        causes[key] = _merge_cause(causes[key], row) if key in causes else dict(row)
    totals: Document = {}
    for document in documents:
        window_s = max(totals.get("window_s", 0.0), document["totals"]["window_s"])
        totals = _by_key(totals, document["totals"], lambda a, b: a + b)
        totals["window_s"] = window_s
    rows = sorted(causes.values(), key=lambda row: (-row["tokens_lost"], row["cause"]))
    lost = totals["tokens_lost"]
    for row in rows:
        row["share"] = round(row["tokens_lost"] / lost, 4) if lost else 0.0
    return {**documents[0], "causes": rows, "totals": totals}


def _merge_cause(into: Document, row: Document) -> Document:
    largest = into if into["example"]["tokens_lost"] >= row["example"]["tokens_lost"] else row
    groups: dict[tuple[str, ...], Document] = {}
    for group in (*into["by"], *row["by"]):
        key = tuple(group[name] for name in ("pool", "tenant", "model", "document"))
        if key in groups:
            known = groups[key]
            known["tokens_lost"] += group["tokens_lost"]
            known["requests"] += group["requests"]
        else:
            groups[key] = dict(group)
    ranked = sorted(groups.values(), key=lambda group: -group["tokens_lost"])
    return {
        **into,
        "tokens_lost": into["tokens_lost"] + row["tokens_lost"],
        "requests": into["requests"] + row["requests"],
        "example": largest["example"],
        "by": ranked[:MAX_LISTED],
    }


def _either(a: Any, b: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine two values of which either may be unknown."""
    if a is None or b is None:
        return b if a is None else a
    return combine(a, b)


def _by_key(a: Document, b: Document, combine: Callable[[Any, Any], Any]) -> Document:
    names = dict.fromkeys((*a, *b))
    return {name: _either(a.get(name), b.get(name), combine) for name in names}
