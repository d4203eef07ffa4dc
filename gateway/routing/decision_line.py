"""What the decision log says about a finished attempt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gateway.telemetry.decision_log import GRAIN_TOKENS, DecisionLine, hashed_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.routing.plan import Plan
    from gateway.routing.ticket import Ticket
    from gateway.telemetry.decision_log import DecisionLog


def decision_line(
    plan: Plan, ticket: Ticket, *, unix_offset_s: float, secret: bytes = b""
) -> DecisionLine:
    """Describe a finished attempt; for the dispatcher's ``on_finish``. Mutates nothing.

    Args:
        plan: The request.
        ticket: The attempt, after ``finish``.
        unix_offset_s: Seconds since 1970 less the dispatcher's clock, now.
        secret: For ``hashed_key``.
    """
    decision = ticket.decision
    block_size = plan.pool.block_size
    hashes = (plan.hashes or ()) if plan.prompt is None else plan.prompt.block_hashes
    stride = max(1, GRAIN_TOKENS // block_size)
    outcome = ticket.outcome
    return DecisionLine(
        t_unix_s=decision.input.now_s + unix_offset_s,
        pool=plan.pool.name,
        model=plan.inbound.model,
        session=hashed_key(plan.key.ring_key, secret),
        block_grain_tokens=stride * block_size,
        blocks=[block.hex() for block in hashes[stride - 1 :: stride]],
        prompt_tokens=decision.input.prompt_tokens,
        output_tokens=ticket.completion_tokens,
        rotation=decision.rotation,
        input=decision.input,
        worker=ticket.worker.id,
        reason=decision.reason.value,
        source=decision.source,
        hit_tokens=decision.hit_tokens,
        predicted_ttft_s=decision.ttft_s,
        observed_ttft_s=ticket.ttft_s,
        observed_hit_tokens=ticket.observed_hit_tokens,
        outcome="" if outcome is None else outcome.value,
    )


class DecisionLogger:
    """Logs every finished attempt; event loop only.

    Args:
        log: Where lines go.
        clock: Monotonic seconds, the dispatcher's.
        clock_unix: Seconds since 1970.
        secret: For ``hashed_key``.
    """

    def __init__(
        self,
        log: DecisionLog,
        *,
        clock: Callable[[], float] = time.monotonic,
        clock_unix: Callable[[], float] = time.time,
        secret: bytes = b"",
    ) -> None:
        self._log = log
        self._clock = clock
        self._clock_unix = clock_unix
        self._secret = secret

    def finished(self, plan: Plan, ticket: Ticket) -> None:
        """Log an attempt; for the dispatcher's ``on_finish``. About 6 us; never waits."""
        offset_s = self._clock_unix() - self._clock()
        line = decision_line(plan, ticket, unix_offset_s=offset_s, secret=self._secret)
        self._log.add(line, len(ticket.decision.input.candidates))
