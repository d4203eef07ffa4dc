"""What is noted of one sampled request while it lives: ids, times, and what was decided.

No spans: those are made when it is over (``gateway/tracing/spans.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.routing.dispatch import Ticket, Usage
from gateway.routing.pool import Pool
from gateway.tracing.context import traceparent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.routing.dispatch import Decision, Inbound
    from gateway.tracing.context import Parent


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a worker.

    Attributes:
        span_id: The id that went out to the worker.
        pool: The worker's.
        ticket: Knows worker, decision and outcome.
        start_s: When it began, monotonic.
        end_s: When it was over; None = with the request.
        status: Of the worker's answer; None while there is none.
        usage: Token counts that it reported.
        said: The documents of its answer that tell what it was: all of it, or the first and the
            last events. Never told in full.
    """

    span_id: int
    pool: Pool
    ticket: Ticket
    start_s: float
    end_s: float | None = None
    status: int | None = None
    usage: Usage | None = None
    said: list[bytes | dict[str, Any]] = field(default_factory=list)


class Trace:
    """A sampled request's notes; written by the task that serves it.

    Args:
        trace_id: The trace's, of the client or drawn.
        flags: For the workers.
        parent: The client's span; None = this request begins the trace.
        state: Members of the client's ``tracestate``.
        start_s: When the request came, monotonic.
        start_ns: The same in nanoseconds of Unix time.
        draw_id: Draws the id of a span.

    Attributes:
        span_id: Of the server span.
        inbound: The request as routing reads it; None while it was not read.
        decision: Where it was to go first; None while that was not decided.
        decided_s: When choosing it began and ended.
        index_age_s: Age of the newest event in the index then; None if no worker sends any.
        attempts: At workers, in order.
    """

    __slots__ = (
        *("attempts", "decided_s", "decision", "draw_id", "flags", "inbound", "index_age_s"),
        *("parent", "span_id", "start_ns", "start_s", "state", "trace_id"),
    )

    def __init__(
        self,
        trace_id: int,
        flags: int,
        parent: Parent | None,
        state: Sequence[tuple[str, str]],
        start_s: float,
        start_ns: int,
        draw_id: Callable[[], int],
    ) -> None:
        self.trace_id = trace_id
        self.flags = flags
        self.parent = parent
        self.state = state
        self.start_s = start_s
        self.start_ns = start_ns
        self.span_id = draw_id()
        self.inbound: Inbound | None = None
        self.decision: Decision | None = None
        self.decided_s = (start_s, start_s)
        self.index_age_s: float | None = None
        self.attempts: list[Attempt] = []
        self.draw_id = draw_id

    def decided(
        self,
        inbound: Inbound,
        decision: Decision,
        decided_s: tuple[float, float],
        index_age_s: float | None,
    ) -> None:
        """Note the first decision; the arguments are those of the attributes."""
        self.inbound = inbound
        self.decision = decision
        self.decided_s = decided_s
        self.index_age_s = index_age_s

    def begin_attempt(self, pool: Pool, ticket: Ticket, now_s: float) -> bytes:
        """Begin an attempt; return the header lines that tell its worker."""
        attempt = Attempt(self.draw_id(), pool, ticket, now_s)
        self.attempts.append(attempt)
        lines = f"traceparent: {traceparent(self.trace_id, attempt.span_id, self.flags)}\r\n"
        if self.state:
            members = ",".join(f"{key}={value}" for key, value in self.state)
            lines += f"tracestate: {members}\r\n"
        return lines.encode()

    def end_attempt(self, now_s: float) -> None:
        """Note that the last attempt is over."""
        self.attempts[-1].end_s = now_s

    def answered(self, status: int) -> None:
        """Note the status with which its worker answers."""
        self.attempts[-1].status = status

    def reported(self, usage: Usage | None) -> None:
        """Note the token counts that its worker reports."""
        self.attempts[-1].usage = usage

    def heard(self, *said: bytes | dict[str, Any] | None) -> None:
        """Keep documents of its worker's answer until the request is over."""
        self.attempts[-1].said += [document for document in said if document]

    def time_ns(self, at_s: float) -> int:
        """Return a monotonic time in nanoseconds of Unix time."""
        return self.start_ns + round((at_s - self.start_s) * 1e9)
