"""Lines about what clients send: does it begin the same way, and does it say what it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.doctor.checklist.verdict import Verdict, failed, passed, unknown, warned
from gateway.misses.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.doctor.checklist.facts import Facts

# Fewer requests show nothing.
MIN_REQUESTS = 20
# What busy fleets lose in passing, as in the diagnosis; and what nobody should go live with.
WARN_LOST_RATIO = 0.01
FAIL_LOST_RATIO = 0.10
# From this share on of the requests that could, clients plainly do name their documents.
NAMED_RATIO = 0.5

_OF_TOOLS = frozenset({Cause.TOOL_ORDER, Cause.TOOL_SERIALISATION, Cause.TOOLS_CHANGED})
# The prompt is as it was; the cache is not.
_OF_CACHES = frozenset({Cause.NOT_CACHED, Cause.ROUTED_ELSEWHERE})
_TRAFFIC = f"Send real traffic (at least {MIN_REQUESTS} requests), then ask again."


def system_prompt(facts: Facts) -> Verdict:
    """System prompt stable: no cause in it costs tokens."""

    def is_meant(row: dict[str, Any]) -> bool:
        return row["segment"] == "system" and row["cause"] not in _OF_TOOLS | _OF_CACHES

    return _stable(facts, "the system prompt", is_meant)


def tool_schemas(facts: Facts) -> Verdict:
    """Tool schemas stable: neither order, nor form, nor set of them changes."""

    def is_meant(row: dict[str, Any]) -> bool:
        is_there = row["segment"] == "tools" and row["cause"] not in _OF_CACHES
        return is_there or row["cause"] in _OF_TOOLS

    return _stable(facts, "tool schemas", is_meant)


def document_ids(facts: Facts) -> Verdict:
    """Document and chunk ids present: requests name what they are about."""
    rows = facts.documents.get("worth", {}).get("hints")
    if rows is None:
        return unknown(facts.why("worth"), "Ask a gateway of this version.")
    requests = sum(row["requests"] for row in rows)
    if requests < MIN_REQUESTS:
        return unknown(f"only {requests} requests were served", _TRAFFIC)
    named = sum(row["with_documents"] for row in rows)
    chunks = sum(row["with_chunks"] for row in rows)
    evidence = f"of {requests:,} requests {named:,} name a document, {chunks:,} its chunks"
    if named >= NAMED_RATIO * requests and chunks >= NAMED_RATIO * named:
        return passed(evidence)
    return warned(
        evidence,
        "Have clients that send documents say so: header x-document-id, or in the body "
        "warmlane.documents [{id, version, chunks}]. Without ids only the text itself can tell, "
        "documents cannot be warmed or purged by name, and where they end is a guess.",
    )


def _stable(facts: Facts, what: str, is_meant: Callable[[dict[str, Any]], bool]) -> Verdict:
    misses = facts.documents.get("misses")
    if misses is None:
        return unknown(facts.why("misses"), "Ask a gateway of this version.")
    totals = misses["totals"]
    requests, tokens = totals["requests"], totals["prompt_tokens"]
    if requests < MIN_REQUESTS or not tokens:
        return unknown(f"only {requests} requests were looked at", _TRAFFIC)
    rows = [row for row in misses["causes"] if is_meant(row)]
    lost = sum(row["tokens_lost"] for row in rows)
    share = lost / tokens
    evidence = f"{share:.1%} of {tokens:,} prompt tokens in {requests:,} requests lost to {what}"
    if not rows or share < WARN_LOST_RATIO:
        return passed(evidence)
    worst = max(rows, key=lambda row: row["tokens_lost"])
    evidence += f", most of it to {worst['cause']} ({worst['requests']:,} requests)"
    advice = worst["advice"]
    return failed(evidence, advice) if share >= FAIL_LOST_RATIO else warned(evidence, advice)
