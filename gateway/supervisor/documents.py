"""Merge what the admin endpoints of several processes answer into one answer.

Every process watches the same workers and shares one index, so most of what they say is the same;
their own load and counts add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway.usage.hints import merged_hints
from gateway.usage.scale_down import merged_rows, scale_down

if TYPE_CHECKING:
    from collections.abc import Callable

Document = dict[str, Any]

# What only the process that reads a worker's events can tell.
_EVENT_FIELDS = (
    *("gaps", "losses", "replays", "decode_errors", "rejected", "orphans"),
    *("event_health", "event_why", "lag_s", "mode"),
)
_WORTH_KEYS = {
    "pools": ("pool",),
    "tenants": ("pool", "tenant"),
    "documents": ("pool", "tenant", "document", "kind"),
}
_WORTH_SUMS = (
    *("requests", "saved_s", "prompt_tokens", "shared_tokens", "lost_tokens", "store_tokens"),
)
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
        for name in ("in_flight", "queued_tokens"):
            into[name] += row[name]
        into["ready"] = into["ready"] and row["ready"]
        if into["state"] == "ready":
            into["state"] = row["state"]
        _merge_events(into, row)
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
        into["by_tier"] = _by_key(into["by_tier"], row["by_tier"], max)
        into["age_s"] = _either(into["age_s"], row["age_s"], min)
        into["unread_prompts"] = _by_key(into["unread_prompts"], row["unread_prompts"], _add)
        # Whichever process reads a worker's events tells of them.
        followed = {worker: s for worker, s in row["workers"].items() if s["followed"]}
        into["workers"] = {**row["workers"], **into["workers"], **followed}
    return {**documents[0], "pools": list(pools.values())}


def merge_worth(documents: list[Document]) -> Document:
    """``GET worth``: tokens and requests add up; the verdict is that of who saw most requests."""
    merged = dict(documents[0])
    for name, keys in _WORTH_KEYS.items():
        rows: dict[tuple[str, ...], Document] = {}
        for row in (row for document in documents for row in document[name]):
            key = tuple(row[part] for part in keys)
            rows[key] = _merge_worth(rows[key], row) if key in rows else row
        merged[name] = list(rows.values())
    merged["documents"].sort(key=lambda row: -row["shared_tokens"])
    advice = {orjson.dumps(item): item for document in documents for item in document["advice"]}
    merged["advice"] = list(advice.values())
    merged["workers"] = merged_rows(document.get("workers", ()) for document in documents)
    merged["scale_down"] = scale_down(merged["workers"])
    merged["hints"] = merged_hints(document.get("hints", ()) for document in documents)
    return merged


def merge_misses(documents: list[Document]) -> Document:
    """``GET misses``: causes of all processes, the most expensive first."""
    causes: dict[tuple[str, str], Document] = {}
    for row in (row for document in documents for row in document["causes"]):
        key = (row["cause"], row["segment"])
        causes[key] = _merge_cause(causes[key], row) if key in causes else dict(row)
    totals: Document = {}
    for document in documents:
        window_s = max(totals.get("window_s", 0.0), document["totals"]["window_s"])
        totals = _by_key(totals, document["totals"], _add)
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


def _merge_worth(into: Document, row: Document) -> Document:
    summed = {name: into[name] + row[name] for name in _WORTH_SUMS}
    if "reusable_tokens" in into:  # each process sees most of what is hot
        summed["reusable_tokens"] = max(into["reusable_tokens"], row["reusable_tokens"])
    return {**(into if into["requests"] >= row["requests"] else row), **summed}


def _merge_events(into: Document, row: Document) -> None:
    """Take what is said of a worker's events from whichever process reads them."""
    if into.get("gaps") is None and row.get("gaps") is not None:
        into.update({name: row[name] for name in _EVENT_FIELDS if name in row})
    into["blocks"] = _by_key(into["blocks"], row["blocks"], max)
    into["event_age_s"] = _either(into.get("event_age_s"), row.get("event_age_s"), min)


def _add(a: Any, b: Any) -> Any:
    return a + b


def _either(a: Any, b: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine two values of which either may be unknown."""
    if a is None or b is None:
        return b if a is None else a
    return combine(a, b)


def _by_key(a: Document, b: Document, combine: Callable[[Any, Any], Any]) -> Document:
    names = dict.fromkeys((*a, *b))
    return {name: _either(a.get(name), b.get(name), combine) for name in names}
