"""What a request's record says of one attempt: the decision before it, the outcome after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.routing.outcome import Outcome

if TYPE_CHECKING:
    from gateway.routing.dispatch import Plan, Ticket
    from gateway.telemetry.record import RequestRecord


def note_decision(record: RequestRecord, ticket: Ticket, plan: Plan) -> None:
    """Write down a decision before it is acted on."""
    decision = ticket.decision
    record.attempts += 1
    record.worker = ticket.worker.id
    record.reason = str(decision.reason)  # an enum's ``value`` takes four times as long
    record.prompt_tokens = decision.input.prompt_tokens
    record.predicted_hit_tokens = ticket.predicted_hit_tokens
    record.predicted_ttft_s = decision.ttft_s
    record.source = decision.source
    record.pull_tokens = decision.pull_tokens
    if plan.route is not None:
        record.route = plan.route.name
    rule = plan.rule
    if rule is not None:
        record.shadow_worker = rule.worker
        record.shadow_hit_tokens = rule.hit_tokens
        record.shadow_saved_s = rule.saved_s


def note_outcome(record: RequestRecord, ticket: Ticket) -> None:
    """Release the books if nothing else did, and write down how the attempt ended."""
    # Only an exception that names no outcome gets here unfinished: cancellation, or a defect.
    if ticket.outcome is None:
        ticket.finish(Outcome.CANCELLED)
    record.outcome = str(ticket.outcome)
    record.observed_hit_tokens = ticket.observed_hit_tokens
