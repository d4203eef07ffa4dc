"""What a command says at its end: tables for people, plain values for programs. Pure."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from warmup.talk import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmup.book import Book, Copy, Row
    from warmup.events import Placement


def plan_table(book: Book) -> str:
    """Return every placement with tokens, bytes, seconds and gain, and the totals."""
    rows: list[tuple[str, ...]] = [
        ("document", "worker", "tier", "tokens", "bytes", "seconds", "gain", "action", "why")
    ]
    for name, row in book.rows.items():
        if row.problem is not None:
            rows.append((name, "-", "-", "-", "-", "-", "-", "refused", row.problem))
        placed = (copy.placement for copy in row.copies.values())
        rows += [_plan_row(placement) for placement in placed if placement is not None]
    totals = plan_totals(book)
    seconds = totals["seconds"]
    summary = (
        f"{totals['documents']:,} documents: {totals['tokens']:,} tokens to compute in "
        f"{totals['copies']:,} copies, {_size(totals['bytes'])}, "
        f"about {'unknown time' if seconds is None else f'{seconds:,.1f} s'}; "
        f"{totals['held']:,} copies are held, {totals['left_out']:,} are left out, "
        f"{totals['problems']:,} documents cannot be placed"
    )
    return f"{_table(rows)}\n\n{summary}"


def plan_totals(book: Book) -> dict[str, Any]:
    """Return the sums of a plan; seconds are those of the worker with the most to do."""
    placements = book.placements()
    warm = [p for p in placements if p.action == "warm"]
    by_worker: dict[str | None, float] = {}
    for placement in warm:
        before_s = by_worker.get(placement.worker, 0.0)
        by_worker[placement.worker] = before_s + (placement.seconds or 0.0)
    known = all(p.seconds is not None for p in warm)
    sizes = [p.bytes for p in warm]
    return {
        "documents": len(book.rows),
        "copies": len(warm),
        "tokens": sum(p.tokens for p in warm),
        "bytes": None if None in sizes else sum(size or 0 for size in sizes),
        "seconds": (max(by_worker.values()) if by_worker else 0.0) if known else None,
        "gain_s": sum(p.gain_s or 0.0 for p in warm),
        "held": sum(p.action == "skip_held" for p in placements),
        "left_out": sum(p.action not in ("warm", "skip_held") for p in placements),
        "problems": sum(row.problem is not None for row in book.rows.values()),
    }


def plan_json(book: Book) -> dict[str, Any]:
    """Return a plan as plain values."""
    problems = [
        {"id": name, "reason": row.problem}
        for name, row in book.rows.items()
        if row.problem is not None
    ]
    return {
        "placements": [msgspec.to_builtins(p) for p in book.placements()],
        "problems": problems,
        "totals": plan_totals(book),
    }


def will_be_warm(book: Book) -> bool:
    """Whether everything a plan names is held or would be computed."""
    return all(
        row.problem is None
        and row.copies
        and all(c.state != "skipped" for c in row.copies.values())
        for row in book.rows.values()
    )


def proof_table(book: Book, *, only_trouble: bool) -> str:
    """Return each copy with what proves it warm or shows that it is not, and a summary.

    Args:
        book: After a run or a verification.
        only_trouble: Leave out the documents that are warm.
    """
    rows: list[tuple[str, ...]] = [("document", "worker", "state", "cached", "wanted", "why")]
    for name, row in book.rows.items():
        if not (only_trouble and row.is_warm):
            rows += _proof_rows(name, row)
    table = f"{_table(rows)}\n\n" if len(rows) > 1 else ""
    totals = proof_totals(book)
    return (
        f"{table}{totals['warm']:,} of {totals['documents']:,} documents are warm, "
        f"{totals['partial']:,} in part, {totals['cold']:,} not; "
        f"{totals['computed_tokens']:,} tokens computed"
    )


def proof_totals(book: Book) -> dict[str, int]:
    """Return how many documents are in which state, and what was computed for them."""
    counts = Counter(row.state for row in book.rows.values())
    return {
        "documents": len(book.rows),
        "warm": counts["warm"],
        "partial": counts["partial"],
        "cold": counts["cold"],
        "computed_tokens": book.computed_tokens,
    }


def proof_json(book: Book) -> dict[str, Any]:
    """Return every document with its copies as plain values."""
    documents = [
        {
            "id": name,
            "state": row.state,
            "reason": row.problem,
            "copies": [_copy_json(copy) for copy in row.copies.values()],
        }
        for name, row in book.rows.items()
    ]
    return {"documents": documents, "totals": proof_totals(book)}


def runs_table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the gateway's runs, as it told them."""
    if not runs:
        return "no warm-up has run since the gateway started"
    columns = ("run_id", "state", "items", "warm", "partial", "failed", "computed_tokens")
    rows: list[tuple[str, ...]] = [("run", *columns[1:6], "computed", "started", "took")]
    for run in runs:
        cells = [_cell(run.get(column)) for column in columns]
        started, elapsed_s = run.get("started_at"), run.get("elapsed_s")
        cells.append(_time(started) if isinstance(started, int | float) else "-")
        cells.append(f"{elapsed_s:,.1f} s" if isinstance(elapsed_s, int | float) else "-")
        rows.append(tuple(cells))
    return _table(rows)


def _plan_row(p: Placement) -> tuple[str, ...]:
    return (
        p.id,
        p.worker or "-",
        p.tier or "-",
        f"{p.tokens:,}",
        _size(p.bytes),
        "-" if p.seconds is None else f"{p.seconds:,.2f}",
        "-" if p.gain_s is None else f"{p.gain_s:,.2f}",
        p.action,
        p.reason or "",
    )


def _proof_rows(name: str, row: Row) -> list[tuple[str, ...]]:
    if row.problem is not None or not row.copies:
        return [(name, "-", "cold", "-", "-", row.problem or "never sent")]
    return [
        (
            name,
            copy.worker or "-",
            copy.state,
            _cell(copy.cached_tokens),
            _cell(copy.wanted_tokens),
            copy.reason or ("" if copy.state == "warm" else "not proven before the end"),
        )
        for copy in row.copies.values()
    ]


def _copy_json(copy: Copy) -> dict[str, Any]:
    return {
        "worker": copy.worker,
        "state": copy.state,
        "cached_tokens": copy.cached_tokens,
        "wanted_tokens": copy.wanted_tokens,
        "computed_tokens": copy.computed_tokens,
        "reason": copy.reason,
    }


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    cleaned = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cleaned) for column in range(len(cleaned[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cleaned
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_number else str(value)


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
