"""The usage export as JSON values and as CSV, of one process and of several."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from gateway.usage.account import TenantUsage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

COLUMNS = tuple(field.name for field in fields(TenantUsage))
CSV_CONTENT_TYPE = "text/csv; charset=utf-8"


def usage_document(
    tenants: Iterable[tuple[str, TenantUsage]], since_unix_s: float, now_unix_s: float
) -> dict[str, Any]:
    """Return ``GET /admin/v1/usage``: a row per tenant, who used most prompt tokens first.

    Args:
        tenants: Names and sums.
        since_unix_s: When counting began, seconds since 1970.
        now_unix_s: Now.
    """
    rows = [{"tenant": name, **asdict(usage)} for name, usage in tenants]
    return _document(rows, since_unix_s, now_unix_s)


def merge_usage(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the usage of several processes as that of one gateway: it adds up."""
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for document in documents for row in document["tenants"]):
        known = rows.setdefault(row["tenant"], {"tenant": row["tenant"], **asdict(TenantUsage())})
        for column in COLUMNS:
            known[column] += row[column]
    return _document(
        list(rows.values()),
        min(document["since_unix_s"] for document in documents),
        max(document["now_unix_s"] for document in documents),
    )


def with_replicas(
    document: dict[str, Any], added_up: int, missing: int | None, *, is_shared: bool
) -> dict[str, Any]:
    """Say in a usage document whose usage it is.

    Args:
        document: The usage of ``added_up`` gateway processes; gets ``replicas``.
        added_up: How many.
        missing: Those that are known and did not answer; None = Redis is away.
        is_shared: Whether gateways know each other at all.
    """
    if not is_shared:
        note = "This gateway alone: without index.backend: redis it knows of no other one."
    elif missing is None:
        note = "This gateway alone: Redis is away, so other ones are not added up."
    elif missing:
        note = f"Too low: {missing} gateway processes did not answer in time."
    else:
        note = "All gateway processes that share the index are added up."
    document["replicas"] = {"added_up": added_up, "missing": missing, "note": note}
    return document


def usage_csv(document: Mapping[str, Any]) -> bytes:
    """Return the rows as CSV with a head line (RFC 4180).

    The last columns are the period, and how many gateway processes are added up and are missing;
    the last one is empty where that is not known.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    last = ("since_unix_s", "now_unix_s", "replicas", "missing_replicas")
    writer.writerow(("tenant", *COLUMNS, *last))
    replicas = document["replicas"]
    period = (document["since_unix_s"], document["now_unix_s"])
    whose = (replicas["added_up"], replicas["missing"])
    for row in document["tenants"]:
        writer.writerow((row["tenant"], *(row[column] for column in COLUMNS), *period, *whose))
    return text.getvalue().encode()


def wants_csv(query: Mapping[str, str], accept: str) -> bool:
    """Whether who asks wants CSV: by ``?format=csv``, or an ``accept`` that names it alone."""
    given = query.get("format")
    return given == "csv" if given is not None else accept.split(";")[0].strip() == "text/csv"


def _document(rows: list[dict[str, Any]], since_unix_s: float, now_unix_s: float) -> dict[str, Any]:
    rows.sort(key=lambda row: (-row["prompt_tokens"], row["tenant"]))
    totals = {column: sum(row[column] for row in rows) for column in COLUMNS}
    return {
        "since_unix_s": since_unix_s,
        "now_unix_s": now_unix_s,
        "tenants": rows,
        "totals": totals,
    }
