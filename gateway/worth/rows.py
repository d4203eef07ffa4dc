"""Rows of the worth report as plain values, and the reports of several processes as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.worth.advice import separate_pools
from gateway.worth.rule import Terms, judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Stands for all documents or tenants that are not listed by themselves.
OTHER = "other"
_NAMES = ("pool", "tenant", "document", "kind")
_COUNTS = ("prompt_tokens", "shared_tokens", "lost_tokens", "store_tokens")


def row_of(
    terms: Terms,
    *,
    prompt_tokens: float,
    shared_tokens: float,
    lost_tokens: float,
    store_tokens: float,
) -> dict[str, Any]:
    """Return the numbers of one row, judged; who it is about is added by the caller."""
    worth = judge(terms)
    return {
        "verdict": worth.verdict.value,
        "requests": round(terms.requests, 2),
        "reuse_count": round(terms.reuse_count, 2),
        "shared_prefix_tokens": round(terms.shared_prefix_tokens, 1),
        "recompute_s": terms.recompute_s,
        "restore_s": terms.restore_s,
        "reuse_gain_s": worth.reuse_gain_s,
        "saved_s": worth.saved_s,
        "store_s": terms.store_s,
        "eviction_s": terms.eviction_s,
        "prefill_token_s": terms.prefill_token_s,
        "restore_tokens_per_s": terms.restore_tokens_per_s,
        "is_measured": terms.is_measured,
        "prompt_tokens": round(prompt_tokens),
        "shared_tokens": round(shared_tokens),
        "lost_tokens": round(lost_tokens),
        "store_tokens": round(store_tokens),
        "short": {
            "worth_cache": worth.short_verdict.value,
            "gain_s": worth.short_gain_s,
            "cost_s": worth.short_cost_s,
        },
    }


def merge_reports(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """``GET worth`` of several processes as one: sums are added and judged anew.

    Each process knows the prefixes of its own requests, so the first request for a prefix in each
    of them counts as new: reuse is told a little too low.
    """
    merged = {
        name: _merged([row for document in documents for row in document[name]])
        for name in ("pools", "tenants", "documents")
    }
    # The unnamed rest comes last, as in one process.
    merged["documents"].sort(
        key=lambda row: (row["document"] == OTHER, -row["reuse_count"] * row["recompute_s"])
    )
    return {**documents[0], **merged, "advice": separate_pools(merged["tenants"])}


def _merged(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    same: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        same.setdefault(tuple(row.get(name, "") for name in _NAMES), []).append(row)
    return [group[0] if len(group) == 1 else _sum(group) for group in same.values()]


def _sum(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    reuses = sum(row["reuse_count"] for row in rows)
    counts = {name: sum(row[name] for row in rows) for name in _COUNTS}
    # What was measured anywhere is better than any guess.
    known = [row for row in rows if row["is_measured"]] or rows
    rate = _mean(known, "restore_tokens_per_s", "requests")
    shared = counts["shared_tokens"] / reuses if reuses else 0.0
    terms = Terms(
        requests=sum(row["requests"] for row in rows),
        reuse_count=reuses,
        shared_prefix_tokens=shared,
        recompute_s=_mean(rows, "recompute_s", "reuse_count"),
        restore_s=shared / rate if rate else 0.0,
        store_s=sum(row["store_s"] for row in rows),
        eviction_s=sum(row["eviction_s"] for row in rows),
        prefill_token_s=_mean(rows, "prefill_token_s", "requests"),
        restore_tokens_per_s=rate,
        is_measured=known[0]["is_measured"],
    )
    names = {name: rows[0][name] for name in _NAMES if name in rows[0]}
    if "reusable_tokens" in rows[0]:  # each process sees most of what is hot
        names["reusable_tokens"] = max(row["reusable_tokens"] for row in rows)
    return names | row_of(terms, **counts)


def _mean(rows: Sequence[dict[str, Any]], value: str, weight: str) -> float:
    total = sum(row[weight] for row in rows)
    return sum(row[value] * row[weight] for row in rows) / total if total else 0.0
