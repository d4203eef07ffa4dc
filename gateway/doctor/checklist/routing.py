"""Lines about where requests go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.doctor.checklist.verdict import Verdict, failed, listed, passed, unknown, warned
from gateway.worth.advice import MIN_REQUESTS

if TYPE_CHECKING:
    from gateway.doctor.checklist.facts import Facts


def cache_aware(facts: Facts) -> Verdict:
    """Cache-aware routing on: the rule decides for all of the traffic, and knows the caches."""
    config = facts.documents.get("config")
    if config is None:
        return unknown(facts.why("config"), "Ask a gateway of this version.")
    routing = config["settings"]["routing"]
    mode, share = routing["mode"], routing["share"]
    evidence = f"routing.mode is {mode}, share {share:g} %"
    if mode == "least_load" or not share:
        return failed(evidence, "Set routing.mode to observe, then to cost with a growing share.")
    blind = [worker["id"] for worker in facts.workers if worker["mode"] == "text"]
    if blind:
        return failed(
            f"{evidence}, but {listed(blind)} are routed by text: what they hold is not known",
            "Look at `warmlane doctor` for the reason: no tokenizer, other tokens, block size.",
        )
    if mode != "cost" or share < 100:
        return warned(
            evidence,
            "This is a stage of the roll-out: compare warmlane_shadow_* with what was served, then "
            "raise routing.share to 100.",
        )
    exact = sum(worker["mode"] == "exact" for worker in facts.workers)
    return passed(f"{evidence}; {exact} of {len(facts.workers)} workers known by their own events")


def separated(facts: Facts) -> Verdict:
    """Pools separated where it pays: no tenant fills the caches that others would reuse."""
    worth = facts.documents.get("worth")
    if worth is None:
        return unknown(facts.why("worth"), "Ask a gateway of this version.")
    advice = [item for item in worth["advice"] if item["kind"] == "separate_pool"]
    if advice:
        rest = "" if len(advice) == 1 else f" ({len(advice) - 1} more like it)"
        return warned(
            advice[0]["text"] + rest,
            f"Play both with `warmlane replay`; then a route for tenant {advice[0]['tenant']!r}.",
        )
    requests = sum(row["requests"] for row in worth["pools"])
    if requests < MIN_REQUESTS:
        return unknown(
            f"only {requests:.0f} requests in the last hour",
            f"Send real traffic (at least {MIN_REQUESTS:.0f} requests), then ask again.",
        )
    tenants = len({row["tenant"] for row in worth["tenants"]})
    return passed(f"{requests:,.0f} requests of {tenants} tenants: nobody costs others their reuse")
