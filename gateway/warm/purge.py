"""Forget a tenant or a document: what this gateway keeps of it, and who still holds its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.errors import InvalidRequest
from gateway.warm.checks import text
from gateway.warm.items import MAX_NAME_CHARS
from gateway.warm.store import NAMED, key_parts, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.routing.pool import Pool
    from gateway.warm.store import PromptStore
    from gateway.warm.warmed import Warmed
    from gateway.worth.account import WorthAccount
    from prefix_index.blocks import BlockHash

_FIELDS = frozenset({"tenant", "document"})


@dataclass(frozen=True, slots=True)
class Purge:
    """What is to be forgotten.

    Attributes:
        tenant: Everything of this tenant, or only the document's; None = of all tenants.
        document: This document in all versions, or only that one (``id@version``); empty = all.
    """

    tenant: str | None
    document: str

    def means(self, tenant: str, kind: str, value: str) -> bool:
        """Whether something of a tenant with this identity is meant."""
        if self.tenant is not None and tenant != self.tenant:
            return False
        if not self.document:
            return True
        return kind in NAMED and self.document in (value, name_of(value))


def read_purge(document: object) -> Purge:
    """Read the body of a purge.

    Raises:
        InvalidRequest: If it names neither a tenant nor a document.
    """
    if not isinstance(document, dict) or set(document) - _FIELDS or not document:
        raise InvalidRequest('Expected {"tenant": NAME}, {"document": ID} or both.')
    named = text(document, "document", MAX_NAME_CHARS)
    tenant = text(document, "tenant", MAX_NAME_CHARS)
    if not named and "tenant" not in document:
        raise InvalidRequest("document: expected a text that is not empty.", param="document")
    if not named and not tenant:
        raise InvalidRequest("tenant: expected a text that is not empty.", param="tenant")
    return Purge(tenant if document.get("tenant") is not None else None, named)


def purge(
    order: Purge,
    pools: Sequence[Pool],
    account: WorthAccount,
    store: PromptStore,
    warmed: Warmed,
) -> dict[str, Any]:
    """Forget it; say what was removed and what engines still hold.

    KV stays with the engines until they evict it: no engine drops one prefix. ``reset`` of a worker
    drops all of its KV.
    """

    def is_meant(_pool: str, tenant: str, ring_key: str) -> bool:
        if not ring_key:  # a tenant's own sums
            return not order.document and order.means(tenant, "", "")
        return order.means(tenant, *key_parts(ring_key, tenant))

    ends: dict[tuple[str, BlockHash], int] = {}
    for pool, ring_key, group in account.hot():
        if group.shared_end is not None and is_meant(pool, group.tenant, ring_key):
            ends[pool, group.shared_end] = group.shared_end_tokens
    for prefix in warmed:
        if is_meant(prefix.pool, prefix.tenant, prefix.ring_key):
            ends[prefix.pool, prefix.end] = prefix.num_tokens
    gone = store.forget(lambda entry: order.means(entry.tenant, entry.kind, entry.value))
    for entry in gone:
        ends[entry.pool, entry.end] = len(entry.ids)
    return {
        "removed": {
            "stored_prompts": len(gone),
            "stored_bytes": sum(entry.num_bytes for entry in gone),
            "worth_rows": account.forget(is_meant),
            "warmed_prefixes": warmed.forget(
                lambda prefix: is_meant(prefix.pool, prefix.tenant, prefix.ring_key)
            ),
        },
        "still_held": _still_held(pools, ends),
    }


def _still_held(
    pools: Sequence[Pool], ends: dict[tuple[str, BlockHash], int]
) -> list[dict[str, Any]]:
    """Return how many prefixes and tokens each worker holds of what was forgotten."""
    by_name = {pool.name: pool for pool in pools}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (name, end), tokens in ends.items():
        pool = by_name.get(name)
        if pool is None or pool.index is None:
            continue
        for worker in pool.index.match([end]):
            row = rows.setdefault(
                (name, worker), {"pool": name, "worker": worker, "prefixes": 0, "tokens": 0}
            )
            row["prefixes"] += 1
            row["tokens"] += tokens
    return [rows[key] for key in sorted(rows)]
