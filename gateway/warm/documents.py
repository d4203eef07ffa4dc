"""What is hot: documents and prefixes with their copies, hit tokens and value, per tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.telemetry.decision_log import hashed_key
from gateway.warm.store import NAMED, key_parts
from prefix_index.holdings import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.routing.pool import Pool
    from gateway.warm.store import PromptStore
    from gateway.warm.warmed import Prefix, Warmed
    from gateway.worth.account import WorthAccount
    from gateway.worth.group import Group
    from prefix_index.blocks import BlockHash

# Rows listed unless the operator says otherwise; what one process counts is 2,048 at most.
DEFAULT_ROWS = 100
MAX_ROWS = 2048


def documents_report(
    pools: Sequence[Pool],
    account: WorthAccount,
    store: PromptStore,
    warmed: Warmed,
    *,
    limit: int = DEFAULT_ROWS,
    secret: bytes = b"",
) -> dict[str, Any]:
    """Return ``GET /admin/v1/documents``, as plain JSON values.

    ``hit_tokens`` and ``value_s`` are those of the last hour, older ones fading: prompt tokens that
    were found, and the prefill they would have taken.

    Args:
        pools: All pools.
        account: What is reused.
        store: Prompts that are kept.
        warmed: What was warmed.
        limit: Most rows of each kind.
        secret: For ``hashed_key``.
    """
    by_name = {pool.name: pool for pool in pools}
    hot = account.hot()
    rows = [
        hot_row(by_name.get(pool), pool, ring_key, group, store, secret)
        for pool, ring_key, group in hot[:limit]
    ]
    prefixes = sorted(warmed, key=lambda prefix: -prefix.hit_tokens)[:limit]
    return {
        "documents": rows,
        "warmed": [_warmed(by_name.get(prefix.pool), prefix) for prefix in prefixes],
        "tenants": _tenants(hot, store),
        "total": {
            "documents": len(hot),
            "warmed": len(warmed),
            "stored": len(store),
            "stored_bytes": store.num_bytes,
        },
    }


def copies_of(pool: Pool | None, end: BlockHash | None) -> list[dict[str, Any]]:
    """Return who holds a prefix by its last block, with the tiers that have it."""
    if pool is None or pool.index is None or end is None:
        return []
    index = pool.index
    # A block is visible only where all before it is, so one look-up tells who has the prefix.
    return [
        {"worker": worker, "tiers": [tier for tier in TIERS if index.holds(worker, end, tier)]}
        for worker in sorted(index.match([end]))
    ]


def hot_row(
    pool: Pool | None,
    name: str,
    ring_key: str,
    group: Group,
    store: PromptStore,
    secret: bytes = b"",
) -> dict[str, Any]:
    """Return one document's row of the report.

    Args:
        pool: Its pool; None if there is none of that name any more.
        name: Of the pool.
        ring_key: The document's key.
        group: What is known of its requests.
        store: Prompts that are kept.
        secret: For ``hashed_key``.
    """
    kind, value = key_parts(ring_key, group.tenant)
    entry = store.get(name, ring_key)
    hit_tokens = max(0.0, group.shared_tokens - group.lost_tokens)
    share = hit_tokens / group.shared_tokens if group.shared_tokens else 0.0
    return {
        "pool": name,
        "tenant": group.tenant,
        # As the worth report and the decision log call it.
        "document": hashed_key(ring_key, secret),
        "id": value if kind in NAMED else None,
        "kind": kind,
        "version": (entry.version or None) if entry is not None else None,
        "requests": round(group.requests, 2),
        "reuses": round(group.reuses, 2),
        "prefix_tokens": group.shared_end_tokens,
        "hit_tokens": round(hit_tokens),
        "lost_tokens": round(group.lost_tokens),
        "value_s": group.recompute_s * share,
        "copies": copies_of(pool, group.shared_end),
        "stored": entry is not None,
        "pinned": entry is not None and entry.is_pinned,
    }


def _warmed(pool: Pool | None, prefix: Prefix) -> dict[str, Any]:
    return {
        "pool": prefix.pool,
        "tenant": prefix.tenant,
        "id": prefix.id,
        "tokens": prefix.num_tokens,
        "warmed_on": sorted(prefix.workers),
        "copies": copies_of(pool, prefix.end),
        "computed_tokens": prefix.computed_tokens,
        "hit_tokens": prefix.hit_tokens,
    }


def _tenants(hot: Sequence[tuple[str, str, Group]], store: PromptStore) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}

    def row(tenant: str) -> dict[str, Any]:
        return rows.setdefault(
            tenant,
            {"tenant": tenant, "documents": 0, "hit_tokens": 0, "value_s": 0.0,
             "stored": 0, "stored_bytes": 0},
        )  # fmt: skip

    for _, _, group in hot:
        of = row(group.tenant)
        of["documents"] += 1
        of["hit_tokens"] += round(max(0.0, group.shared_tokens - group.lost_tokens))
        of["value_s"] += group.recompute_s
    for entry in store:
        of = row(entry.tenant)
        of["stored"] += 1
        of["stored_bytes"] += entry.num_bytes
    return sorted(rows.values(), key=lambda of: -of["value_s"])
