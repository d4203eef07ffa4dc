"""The demo's table, its verdict on each row and the summary line."""

from __future__ import annotations

import json
from dataclasses import dataclass

from gateway.columns import aligned
from gateway.demo.workload import Ask


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Times in seconds, sizes in tokens."""

    ask: Ask
    worker: str
    prompt_tokens: int
    predicted_hit_tokens: int
    observed_hit_tokens: int
    ttft_s: float
    answer: str


def judge(rows: list[Row], *, block_size: int) -> list[str]:
    """Return what is wrong with the rows: a warm request that missed, or a bad prediction."""
    problems = []
    holder: dict[str, str] = {}
    for row in rows:
        gap = abs(row.predicted_hit_tokens - row.observed_hit_tokens)
        if gap > block_size:
            problems.append(f"{row.ask.label}: predicted and observed differ by {gap} tokens")
        if row.ask.is_warm and row.observed_hit_tokens * 2 < row.prompt_tokens:
            problems.append(
                f"{row.ask.label}: expected a hit, got {row.observed_hit_tokens} tokens"
            )
        if row.ask.is_warm and row.worker != holder.get(row.ask.document):
            problems.append(f"{row.ask.label}: sent to {row.worker}, which does not hold it")
        holder.setdefault(row.ask.document, row.worker)
    return problems


def table(rows: list[Row]) -> str:
    """Return the rows as aligned text."""
    head = ("request", "worker", "prompt tokens", "hit predicted / observed", "TTFT")
    lines = [
        (
            row.ask.label,
            row.worker,
            f"{row.prompt_tokens}",
            f"{row.predicted_hit_tokens} / {row.observed_hit_tokens}",
            f"{row.ttft_s:.3f} s",
        )
        for row in rows
    ]
    return "\n".join(aligned([head, *lines], "llrrr"))


def summary(rows: list[Row], problems: list[str]) -> str:
    """Return the one line below the table, preceded by what went wrong."""
    cold = [row.ttft_s for row in rows if not row.ask.is_warm]
    warm = [row.ttft_s for row in rows if row.ask.is_warm]
    hits = sum(row.observed_hit_tokens for row in rows if row.ask.is_warm)
    prompt = sum(row.prompt_tokens for row in rows if row.ask.is_warm)
    cold_s, warm_s = sum(cold) / len(cold), sum(warm) / len(warm)
    line = (
        f"{len(warm)} warm requests: {hits / prompt:.0%} of their prompt tokens were hits, "
        f"mean TTFT {warm_s:.3f} s against {cold_s:.3f} s cold ({cold_s / warm_s:.1f}x)"
    )
    return "\n".join([*problems, line])


def document(rows: list[Row], problems: list[str]) -> str:
    """Return rows and verdict as one JSON document."""
    requests = [
        {
            "request": row.ask.label,
            "is_warm": row.ask.is_warm,
            "worker": row.worker,
            "prompt_tokens": row.prompt_tokens,
            "predicted_hit_tokens": row.predicted_hit_tokens,
            "observed_hit_tokens": row.observed_hit_tokens,
            "ttft_s": row.ttft_s,
        }
        for row in rows
    ]
    return json.dumps({"ok": not problems, "problems": problems, "requests": requests}, indent=2)
