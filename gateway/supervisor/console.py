"""``GET /console/data`` of several processes as one document.

They watch the same workers and share one index; load, requests and hits are each process's own and
add up. An alert that one of them sees is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.console.alerts import RELOAD_FAILED, alert_row, in_order
from gateway.console.decisions import MAX_DECISIONS
from gateway.console.snapshot import MAX_CAUSES, MAX_DOCUMENTS
from gateway.supervisor.documents import merge_misses, merge_worth
from gateway.warm.merge import merge_documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Document = dict[str, Any]

_POOL_SUMS = ("waiting", "requests", "recent_requests", "recent_errors")
_WORKER_SUMS = ("in_flight", "decoding", "queued_tokens")
_OBSERVED_SUMS = ("hit_tokens", "miss_tokens")
# What only the process that reads a worker's events can tell.
_EVENTS = ("mode", "event_health", "event_why", "lag_s", "losses")


def merge_console(documents: list[Document], *, is_reloaded: bool) -> Document:
    """Return one document; ``is_reloaded`` says whether the configuration read last holds."""
    alerts = _merged(
        (row for document in documents for row in document["alerts"]["active"]),
        ("alert", "pool", "worker"),
        _worse,
    )
    if not is_reloaded:
        alerts.append(alert_row(RELOAD_FAILED, 0.0))
    decisions = [row for document in documents for row in document["decisions"]]
    decisions.sort(key=lambda row: -row["at_unix_s"])
    documents_found = merge_documents([document["documents"] for document in documents])
    misses = merge_misses([document["misses"] for document in documents])
    fleet = documents[0]["fleet"]
    for document in documents[1:]:
        fleet = _observed(fleet, document["fleet"])
    return {
        **documents[0],
        "now_unix_s": max(document["now_unix_s"] for document in documents),
        # What any of them decides after this is told the next time.
        "decided_until_s": min(document["decided_until_s"] for document in documents),
        "processes": len(documents),
        "fleet": fleet,
        "pools": _merged(_rows(documents, "pools"), ("pool",), _pool),
        "workers": _merged(_rows(documents, "workers"), ("pool", "id"), _worker),
        "decisions": decisions[:MAX_DECISIONS],
        "alerts": {**documents[0]["alerts"], "active": in_order(alerts)},
        "documents": {
            **documents_found,
            "documents": documents_found["documents"][:MAX_DOCUMENTS],
        },
        "misses": {**misses, "causes": misses["causes"][:MAX_CAUSES]},
        "worth": merge_worth([document["worth"] for document in documents]),
    }


def _rows(documents: list[Document], name: str) -> Iterable[Document]:
    return (row for document in documents for row in document[name])


def _merged(
    rows: Iterable[Document], keys: tuple[str, ...], merge: Callable[[Document, Document], Document]
) -> list[Document]:
    found: dict[tuple[Any, ...], Document] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        found[key] = merge(found[key], row) if key in found else row
    return list(found.values())


def _worse(into: Document, row: Document) -> Document:
    """Return the row that fires, or of two alike the one that holds for longer."""
    return max(into, row, key=lambda found: (found["state"] == "firing", found["held_s"]))


def _pool(into: Document, row: Document) -> Document:
    summed = {name: into[name] + row[name] for name in _POOL_SUMS}
    return {**into, **summed, "blocks": _largest(into["blocks"], row["blocks"])}


def _worker(into: Document, row: Document) -> Document:
    summed = {name: into[name] + row[name] for name in _WORKER_SUMS}
    # As for ``GET workers``: one process that sees a fault shows it.
    state = row["state"] if into["state"] == "ready" else into["state"]
    reader = row if into["losses"] is None and row["losses"] is not None else into
    blocks = {
        tier: _largest(into["blocks"].get(tier), row["blocks"].get(tier))
        for tier in {**into["blocks"], **row["blocks"]}
    }
    known = {name: into[name] if into[name] is not None else row[name] for name in into}
    return {
        **known,
        **summed,
        **{name: reader[name] for name in _EVENTS},
        **_observed(into, row),
        "state": state,
        "ready": into["ready"] and row["ready"],
        "parity": min(into["parity"], row["parity"], key=lambda parity: (parity != 0, -parity)),
        "blocks": blocks,
        "kv_filled": _largest(into["kv_filled"], row["kv_filled"]),
    }


def _observed(into: Document, row: Document) -> Document:
    counts: dict[int, int] = {}
    for bucket, count in (*into["ttft"]["buckets"], *row["ttft"]["buckets"]):
        counts[bucket] = counts.get(bucket, 0) + count
    ttft = {name: into["ttft"][name] + row["ttft"][name] for name in ("count", "total_s")}
    told = {name: _sum(into[name], row[name]) for name in _OBSERVED_SUMS}
    return {**told, "ttft": {**ttft, "buckets": list(counts.items())}}


def _sum(a: int | None, b: int | None) -> int | None:
    """Add two counts, unknown only if both are."""
    return None if a is None and b is None else (a or 0) + (b or 0)


def _largest(a: Any, b: Any) -> Any:
    """Return the larger of two values of which either may be unknown."""
    known = [value for value in (a, b) if value is not None]
    return max(known, default=None)
