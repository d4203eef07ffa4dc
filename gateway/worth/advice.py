"""Which tenants might be served apart: advice to try, never done by itself.

In the simulation a pool of their own for one-shot prompts cost the others 28 to 170 % of TTFT in
nearly all cases; it helped only where the cache was too small for what was asked again. So advice
needs both: somebody who fills the cache and reuses next to nothing, and others who lost to eviction
what they would have reused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

# Reuse below this share of its prompt tokens is one-shot traffic.
MAX_REUSED_RATIO = 0.05
# A tenant that brings less of the pool's new tokens fills nobody's cache.
MIN_NEW_RATIO = 0.2
# Share of what the others would have reused that was gone.
MIN_LOST_RATIO = 0.2
# Requests in the decayed hour without which nothing is said.
MIN_REQUESTS = 50.0


def separate_pools(tenants: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return advice: kind, pool, tenant, the shares it is based on, and text.

    Args:
        tenants: Rows of the worth report, of all pools.
    """
    return [
        advice
        for pool in dict.fromkeys(row["pool"] for row in tenants)
        for advice in _of_pool(pool, [row for row in tenants if row["pool"] == pool])
    ]


def _of_pool(pool: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    new_tokens = sum(_new(row) for row in rows)
    found = []
    for row in rows:
        others = [other for other in rows if other is not row]
        shared = sum(other["shared_tokens"] for other in others)
        if row["requests"] < MIN_REQUESTS or not shared or not new_tokens:
            continue
        reused = row["shared_tokens"] / max(1, row["prompt_tokens"])
        brought = _new(row) / new_tokens
        lost = sum(other["lost_tokens"] for other in others) / shared
        if reused > MAX_REUSED_RATIO or brought < MIN_NEW_RATIO or lost < MIN_LOST_RATIO:
            continue
        found.append(
            {
                "kind": "separate_pool",
                "pool": pool,
                "tenant": row["tenant"],
                "reused_ratio": round(reused, 4),
                "new_tokens_ratio": round(brought, 4),
                "others_lost_ratio": round(lost, 4),
                "text": f"Tenant {row['tenant']!r} brings {brought:.0%} of the new tokens of pool "
                f"{pool!r} and reuses {reused:.0%} of its own, while the other tenants found "
                f"{lost:.0%} of what they would have reused evicted. A pool of its own may help, "
                "and often does not: compare both with `warmlane replay` on the decision log "
                "before you try it.",
            }
        )
    return found


def _new(row: dict[str, Any]) -> int:
    return int(row["prompt_tokens"] - row["shared_tokens"])
