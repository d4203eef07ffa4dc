"""What several processes of one gateway say of documents and purges, as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Row = dict[str, Any]

_SUMS = ("requests", "reuses", "hit_tokens", "lost_tokens", "value_s", "computed_tokens")
_TENANT_SUMS = ("hit_tokens", "value_s", "stored", "stored_bytes")


def merge_documents(documents: Sequence[Row]) -> Row:
    """``GET documents`` of several processes: each counts its own requests, so counts add up.

    A prompt that two processes keep is stored twice, and counts twice.
    """
    rows = _merged(
        (row for document in documents for row in document["documents"]),
        ("pool", "tenant", "document"),
        _merge_row,
    )
    warmed = _merged(
        (row for document in documents for row in document["warmed"]),
        ("pool", "tenant", "id", "tokens"),
        _merge_row,
    )
    tenants = _merged(
        (row for document in documents for row in document["tenants"]), ("tenant",), _merge_tenant
    )
    return {
        "documents": sorted(rows, key=lambda row: -row["value_s"]),
        "warmed": sorted(warmed, key=lambda row: -row["hit_tokens"]),
        "tenants": sorted(tenants, key=lambda row: -row["value_s"]),
        "total": {
            "documents": max(document["total"]["documents"] for document in documents),
            "warmed": max(document["total"]["warmed"] for document in documents),
            "stored": sum(document["total"]["stored"] for document in documents),
            "stored_bytes": sum(document["total"]["stored_bytes"] for document in documents),
        },
    }


def merge_purges(answers: Sequence[Row]) -> Row:
    """``POST purge`` of several processes: what each removed adds up; they share one index."""
    removed: dict[str, int] = {}
    for answer in answers:
        for name, number in answer["removed"].items():
            removed[name] = removed.get(name, 0) + number
    held = _merged(
        (row for answer in answers for row in answer["still_held"]), ("pool", "worker"), _fuller
    )
    return {**answers[0], "removed": removed, "still_held": held}


def _merged(
    rows: Iterable[Row], keys: Sequence[str], merge: Callable[[Row, Row], Row]
) -> list[Row]:
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        found[key] = merge(found[key], row) if key in found else row
    return list(found.values())


def _merge_row(into: Row, row: Row) -> Row:
    merged = into | {name: into[name] + row[name] for name in _SUMS if name in into}
    for name in ("stored", "pinned"):
        if name in into:
            merged[name] = into[name] or row[name]
    if "warmed_on" in into:
        merged["warmed_on"] = sorted({*into["warmed_on"], *row["warmed_on"]})
    return merged


def _merge_tenant(into: Row, row: Row) -> Row:
    summed = {name: into[name] + row[name] for name in _TENANT_SUMS}
    return into | summed | {"documents": max(into["documents"], row["documents"])}


def _fuller(into: Row, row: Row) -> Row:
    return into if into["tokens"] >= row["tokens"] else row
