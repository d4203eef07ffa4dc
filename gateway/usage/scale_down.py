"""Which worker of a pool would be missed least: advice to whoever scales down, never done here."""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, Any

from gateway.usage.cache_value import WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A worker that was watched for less was still filling its cache.
MIN_WATCHED_S = 900.0
# Requests of the pool in the fading hour below which differences between workers are chance.
MIN_REQUESTS = 50.0


def scale_down(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return advice, one per pool that has it: kind, pool, worker, saved_s, pool_saved_s, text.

    Args:
        rows: ``workers`` of ``GET /admin/v1/worth``.
    """
    names = dict.fromkeys(row["pool"] for row in rows)
    found = (_of_pool(name, [row for row in rows if row["pool"] == name]) for name in names)
    return [advice for advice in found if advice is not None]


def merged_rows(documents: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Add up what several processes say of the same workers."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for document in documents for row in document):
        key = (row["pool"], row["worker"])
        known = rows.get(key)
        if known is None:
            rows[key] = dict(row)
            continue
        known["saved_s"] += row["saved_s"]
        known["requests"] += row["requests"]
        known["watched_s"] = max(known["watched_s"], row["watched_s"])
    return list(rows.values())


def _of_pool(pool: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if len(rows) < 2 or sum(row["requests"] for row in rows) < MIN_REQUESTS:
        return None
    if min(row["watched_s"] for row in rows) < MIN_WATCHED_S:
        return None
    rates = {row["worker"]: _rate_s(row) for row in rows}
    least = min(rows, key=lambda row: (rates[row["worker"]], row["requests"], row["worker"]))
    worker, whole_s = least["worker"], sum(rates.values())
    share = rates[worker] / whole_s if whole_s else 0.0
    others = sorted(rate for name, rate in rates.items() if name != worker)
    return {
        "kind": "scale_down",
        "pool": pool,
        "worker": worker,
        "saved_s": round(rates[worker], 3),
        "pool_saved_s": round(whole_s, 3),
        "text": f"Worker {worker!r} of pool {pool!r} would be missed least: its cache saves "
        f"{rates[worker]:,.2f} s of prefill an hour, {share:.0%} of the pool's "
        f"{whole_s:,.2f} s; the others save {_range(others)}. If you scale down, drain it first: "
        f"`warmlane workers drain {worker}`.",
    }


def _rate_s(row: dict[str, Any]) -> float:
    """Return seconds an hour; a cache that was watched for less than the window is not less."""
    return float(row["saved_s"] / (1.0 - exp(-row["watched_s"] / WINDOW_S)))


def _range(rates: Sequence[float]) -> str:
    if len(rates) == 1:
        return f"{rates[0]:,.2f} s"
    return f"{rates[0]:,.2f} to {rates[-1]:,.2f} s each"
