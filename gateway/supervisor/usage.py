"""The usage of several processes as one gateway's, with what processes that died had counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from gateway.supervisor.exposition import render
from gateway.usage.account import TenantUsage
from gateway.usage.document import merge_usage, usage_document, with_replicas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.supervisor.exposition import Snapshot

# What is said of others where the process that was asked has just ended.
NOBODY_ELSE: dict[str, Any] = {"replicas": {}, "num_missing": None, "is_shared": True}
USAGE_PATH = "/admin/v1/usage"
_REQUESTS = "warmlane_tenant_requests_total"
_SAVED = "warmlane_tenant_saved_seconds_total"
_TOKENS = "warmlane_tenant_tokens_total"


def merged_usage(
    documents: Sequence[dict[str, Any]],
    others: dict[str, Any],
    ended: Snapshot,
    since_unix_s: float,
) -> dict[str, Any]:
    """Return ``GET /admin/v1/usage`` of all processes, dead ones and other gateways' included.

    Args:
        documents: Of the living ones.
        others: What one of them heard of all others, which may be among ``documents``.
        ended: What dead ones had counted when they were scraped last.
        since_unix_s: When the first of them began.
    """
    now_unix_s = max(document["now_unix_s"] for document in documents)
    dead = usage_document(_ended(ended).items(), since_unix_s, now_unix_s)
    ours = {document["replica"] for document in documents}
    elsewhere = [told for name, told in others["replicas"].items() if name not in ours]
    return with_replicas(
        merge_usage([*documents, dead, *elsewhere]),
        len(documents) + len(elsewhere),
        others["num_missing"],
        is_shared=others["is_shared"],
    )


def _ended(ended: Snapshot) -> dict[str, TenantUsage]:
    names = (_REQUESTS, _SAVED, _TOKENS)
    text = render({name: ended[name] for name in names if name in ended})
    tenants: dict[str, TenantUsage] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            usage = tenants.setdefault(sample.labels["tenant"], TenantUsage())
            if sample.name == _TOKENS:
                setattr(usage, f"{sample.labels['kind']}_tokens", int(sample.value))
            elif sample.name == _REQUESTS:
                usage.requests = int(sample.value)
            else:
                usage.saved_s = sample.value
    return tenants
