"""A diagnosis for a terminal: what costs hits, what to do, what lower tiers are worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.columns import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.doctor.diagnosis import Diagnosis

# A template prints up to this many tokens before the first message.
START_TOKENS = 32
COLUMNS = ("tokens lost", "share", "requests", "cause", "where")
# A restore time with a question mark is a low guess: no restore was seen yet.
WORTH_COLUMNS = (
    *("reuses", "shared tokens", "restore", "recompute", "saved", "costs"),
    *("worth it", "who"),
)


def table(diagnosis: Diagnosis) -> str:
    """Return the diagnosis for a terminal: causes, each with what to do, then the findings."""
    totals = diagnosis.totals
    lines = [
        f"{totals['tokens_lost']:,} of {totals['prompt_tokens']:,} prompt tokens in "
        f"{totals['requests']:,} requests were computed again because a prefix broke "
        f"(last {totals['window_s'] / 60:.0f} min)."
    ]
    if totals["not_compared"]:
        lines.append(f"{totals['not_compared']:,} more requests were too many to look into.")
    if diagnosis.causes:
        lines += ["", *_rows([COLUMNS, *map(_cause_row, diagnosis.causes)], 3, diagnosis.causes)]
    if diagnosis.worth is not None and diagnosis.worth["pools"]:
        lines += ["", *_worth_lines(diagnosis.worth)]
    for advice in (diagnosis.worth or {}).get("scale_down", ()):
        lines += ["", advice["text"]]
    for finding in diagnosis.findings:
        lines += ["", f"{finding.subject}: {finding.what}", f"    {finding.advice}"]
    if diagnosis.is_healthy:
        lines += ["", "Nothing to mend."]
    return "\n".join(lines)


def _rows(
    rows: Sequence[tuple[str, ...]], num_right: int, notes: Sequence[dict[str, Any]] = ()
) -> Iterator[str]:
    """Align rows, the first ``num_right`` columns to the right; each note's advice is under it."""
    for number, line in enumerate(
        aligned(rows, "r" * num_right + "l" * (len(rows[0]) - num_right))
    ):
        yield line
        if number and notes:
            yield f"    {notes[number - 1]['advice']}"


def _worth_lines(worth: dict[str, Any]) -> Iterator[str]:
    """Say of pools and tenants whether keeping KV in a lower tier pays."""
    yield "Lower tiers (an hour's reuse of prefixes, what a restore takes and what it replaces):"
    rows = [*worth["pools"], *worth["tenants"]]
    yield from _rows([WORTH_COLUMNS, *map(_worth_row, rows)], 6)
    for advice in worth["advice"]:
        yield f"    {advice['text']}"


def _worth_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['reuse_count']:,.0f}",
        f"{row['shared_prefix_tokens']:,.0f}",
        f"{row['restore_s'] * 1000:,.0f} ms" + ("" if row["is_measured"] else "?"),
        f"{row['recompute_s'] * 1000:,.0f} ms",
        f"{row['saved_s']:,.2f} s",
        f"{row['store_s'] + row['eviction_s']:,.2f} s",
        row["verdict"],
        f"tenant {row['tenant']} in {row['pool']}" if "tenant" in row else f"pool {row['pool']}",
    )


def _cause_row(row: dict[str, Any]) -> tuple[str, ...]:
    example = row["example"]
    place = example["place"]
    if example["char"] is not None:
        place += f" character {example['char']}"
    if example["token"] < START_TOKENS and place:
        place += " (start of the prompt)"
    return (
        f"{row['tokens_lost']:,}",
        f"{row['share']:.0%}",
        f"{row['requests']:,}",
        row["cause"],
        f"{row['segment']}: {place}" if place else row["segment"],
    )
