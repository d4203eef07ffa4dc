"""Lines about what is warm, and about what happens while it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.doctor.checklist.exposition import Bucketed, samples_of
from gateway.doctor.checklist.verdict import Verdict, failed, passed, unknown, warned

if TYPE_CHECKING:
    from gateway.doctor.checklist.facts import Facts

# Documents and prefixes that count as hot: asked for again in the fading hour, the most valuable.
MAX_HOT = 20
MIN_REUSES = 0.5
# Share of the hot tokens that is held somewhere quick.
WARM_RATIO = 0.9
COLD_RATIO = 0.5
QUICK_TIERS = frozenset({"gpu", "cpu"})

# The budget of the alerts: 99 % of first tokens within 5 s (WarmlaneTtftBudgetBurn). Of cold ones
# fewer may be as quick, and everybody is cold after a restart.
COLD_TTFT_S = 5.0
PASS_RATIO = 0.95
FAIL_RATIO = 0.8
# Fewer cold prompts are chance.
MIN_COLD = 10


def hot_documents(facts: Facts) -> Verdict:
    """Hot documents warm: what is asked for again lies in GPU or CPU memory of a worker."""
    found = facts.documents.get("documents")
    if found is None:
        return unknown(facts.why("documents"), "Ask a gateway of this version.")
    rows = [r for r in found["documents"] if r["reuses"] >= MIN_REUSES and r["prefix_tokens"]]
    hot = sorted(rows, key=lambda row: -row["reuses"] * row["prefix_tokens"])[:MAX_HOT]
    asked = [row for row in found["warmed"] if row["tokens"]]
    if not hot and not asked:
        return unknown(
            "nothing was asked for again in the last hour, and nothing was warmed",
            "Send real traffic, or warm the documents of a manifest with `warmlane warmup run`.",
        )
    tokens = sum(row["prefix_tokens"] for row in hot) + sum(row["tokens"] for row in asked)
    warm = sum(row["prefix_tokens"] for row in hot if _is_quick(row))
    warm += sum(row["tokens"] for row in asked if _is_quick(row))
    evidence = (
        f"{warm / tokens:.0%} of the {tokens:,} tokens of {len(hot)} hot and {len(asked)} warmed "
        "documents lie in GPU or CPU memory"
    )
    advice = (
        "Warm them (`warmlane warmup run`), switch pools[].keep_warm on, or make room: "
        "`warmlane doctor` says whose cache is worth least."
    )
    if warm >= WARM_RATIO * tokens:
        return passed(evidence)
    return failed(evidence, advice) if warm < COLD_RATIO * tokens else warned(evidence, advice)


def cold_start(facts: Facts) -> Verdict:
    """Cold start after a restart acceptable: first tokens of prompts of which nothing was cached.

    That is what every client of a worker sees whose process was started again.
    """
    if facts.metrics is None:
        return unknown(facts.why("metrics"), "Let this command reach the gateway's /metrics.")
    cold = Bucketed()
    for labels, name, value in samples_of(facts.metrics, "warmlane_ttft_by_hit_seconds"):
        if labels.get("hit_share") == "0":
            cold.add(labels, name, value)
    if cold.count < MIN_COLD:
        return unknown(
            f"only {cold.count:.0f} streamed prompts began with an empty cache",
            "Restart a worker under traffic, or POST /admin/v1/workers/ID/reset, and stream at "
            f"least {MIN_COLD} prompts.",
        )
    share = cold.share_within(COLD_TTFT_S)
    evidence = (
        f"{share:.0%} of {cold.count:,.0f} cold prompts had their first token within "
        f"{COLD_TTFT_S:g} s (mean {cold.mean_s:.2f} s){_refills(facts.metrics)}"
    )
    advice = (
        "Keep prompts to be warmed again (pools[].keep_warm: enabled, store), give workers a disk "
        "tier that outlives a restart, and roll out one worker at a time."
    )
    if share >= PASS_RATIO:
        return passed(evidence)
    return warned(evidence, advice) if share >= FAIL_RATIO else failed(evidence, advice)


def _refills(text: str) -> str:
    """Say how long caches took to be filled again, where that was done."""
    runs = sum(value for _, _, value in samples_of(text, "warmlane_warm_keep_runs"))
    seconds = sum(value for _, _, value in samples_of(text, "warmlane_warm_keep_seconds"))
    return f"; {runs:.0f} caches were filled again, in {seconds / runs:.1f} s each" if runs else ""


def _is_quick(row: dict[str, Any]) -> bool:
    return any(QUICK_TIERS.intersection(copy["tiers"]) for copy in row["copies"])
