"""What ``warmlane bench`` found, as one document and as a table of it."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import TYPE_CHECKING, Any

from gateway.columns import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.bench.client import Answer

HEAD = ("requests", "failed", "TTFT mean", "p50", "p95", "p99", "prompt tokens", "cached")


def document(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Return the figures of a run of ``seconds``; what nobody told is None."""
    good = [answer for answer in answers if not answer.error]
    generated = sum(answer.completion_tokens or 0 for answer in good)
    return {
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "completion_tokens_per_s": generated / seconds,
        "all": _figures(answers),
        "first_of_a_document": _figures([answer for answer in answers if answer.is_first]),
        "again": _figures([answer for answer in answers if not answer.is_first]),
        "workers": dict(sorted(Counter(a.worker for a in good if a.worker).items())),
        "errors": dict(Counter(a.error for a in answers if a.error).most_common()),
    }


def table(found: dict[str, Any]) -> str:
    """Return the document for a person."""
    names = {"all": "all", "first_of_a_document": "first of a document", "again": "again"}
    rows = [("", *HEAD), *((name, *_cells(found[key])) for key, name in names.items())]
    lines = aligned(rows, "l" + "r" * len(HEAD))
    lines.append(
        f"{found['seconds']:.1f} s, {found['requests_per_s']:.2f} requests and "
        f"{found['completion_tokens_per_s']:.1f} generated tokens a second"
    )
    if found["workers"]:
        shares = ", ".join(f"{worker} {count}" for worker, count in found["workers"].items())
        lines.append(f"answered by: {shares}")
    lines += [f"failed {count} times: {error}" for error, count in found["errors"].items()]
    return "\n".join(lines)


def _figures(answers: Sequence[Answer]) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error]
    times_s = sorted(answer.ttft_s for answer in good if answer.ttft_s is not None)
    told = [answer for answer in good if answer.cached_tokens is not None]
    prompt = sum(answer.prompt_tokens or 0 for answer in told)
    cached = sum(answer.cached_tokens or 0 for answer in told)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "ttft_mean_s": sum(times_s) / len(times_s) if times_s else None,
        "ttft_p50_s": _quantile(times_s, 0.50),
        "ttft_p95_s": _quantile(times_s, 0.95),
        "ttft_p99_s": _quantile(times_s, 0.99),
        "prompt_tokens": sum(answer.prompt_tokens or 0 for answer in good),
        "cached_share": cached / prompt if prompt else None,
    }


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the least value that at least this share of them does not exceed."""
    if not ordered:
        return None
    return ordered[ceil(share * len(ordered)) - 1]


def _cells(figures: dict[str, Any]) -> tuple[str, ...]:
    times = ("ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s")
    share = figures["cached_share"]
    return (
        str(figures["requests"]),
        str(figures["failed"]),
        *("-" if figures[name] is None else f"{figures[name]:.3f} s" for name in times),
        str(figures["prompt_tokens"]),
        "-" if share is None else f"{share:.0%}",
    )
