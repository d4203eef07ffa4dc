"""What a finished request tells of its worker's events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.routing.outcome import OK

if TYPE_CHECKING:
    from gateway.fleet.feed import Feed
    from gateway.routing.dispatch import Plan, Ticket
    from gateway.telemetry.record import RequestRecord


def of_record(record: RequestRecord, feed: Feed) -> None:
    """Tell a worker's feed of a request that made blocks there, so that it owes us events."""
    if record.outcome != "ok":
        return
    if record.prompt_tokens - (record.observed_hit_tokens or 0) > feed.announced_tokens:
        feed.saw_new_prompt(record.duration_s)


def of_attempt(plan: Plan, ticket: Ticket, feed: Feed) -> None:
    """Tell a worker's feed of an attempt that is over: what it must announce, and what it hit."""
    if ticket.outcome is not OK:
        return
    if plan.prompt is not None and plan.prompt.num_tokens >= feed.announced_tokens:
        is_salted = bool(plan.inbound.cache_salt)
        feed.saw_prompt(plan.prompt.block_hashes[0], is_salted=is_salted)
    observed = ticket.observed_hit_tokens
    # Workers that never report any are not asked to report many.
    if observed is None or not ticket.worker.reports_cached:
        return
    if plan.is_comparable:
        feed.saw_hit(predicted_tokens=ticket.predicted_hit_tokens, observed_tokens=observed)
