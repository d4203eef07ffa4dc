"""Those who hear of attempts and requests that are over: each of them at once, or of many together.

What routing, warm-up or offload caps go by is told at once, so that waiting changes no decision.
``gateway/observing.py`` makes them; whoever wants to hear is added here, in a line or two.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gateway.routing import segments
from gateway.telemetry.finished import Finished

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    from gateway.console.decisions import Decisions
    from gateway.console.parts import Parts
    from gateway.routing.decision_line import DecisionLogger
    from gateway.routing.plan import Plan
    from gateway.routing.ticket import Ticket
    from gateway.telemetry.record import RequestRecord
    from gateway.telemetry.request_log import RequestLog
    from gateway.telemetry.requests import Telemetry
    from gateway.usage.usage import Usage

    # Each with when it was over: monotonic seconds, and seconds since 1970.
    Attempt: TypeAlias = tuple[float, Plan, Ticket]
    Request: TypeAlias = tuple[float, RequestRecord]

# At most 20 prompts a second are looked at for text that recurs across conversations: a look takes
# 50 to 500 us of the loop, so this is a percent of a core at the worst.
RECURRENCE_EVERY_S = 0.05


class Onlookers:
    """All of one process; event loop only.

    Args:
        parts: Of the gateway; read when something is over.
        telemetry: Counts.
        usage: Adds up what tenants used and caches saved.
        shown: The console's decisions.
        request_log: Writes a line per request; None = nobody does.
        decision_log: Writes a line per attempt; None = nobody does.
    """

    def __init__(
        self,
        parts: Parts,
        telemetry: Telemetry,
        usage: Usage,
        shown: Decisions,
        request_log: RequestLog | None,
        decision_log: DecisionLogger | None,
    ) -> None:
        self._parts = parts
        self._telemetry = telemetry
        self._usage = usage
        self._shown = shown
        self._request_log = request_log
        self._decision_log = decision_log
        self._recurrence_due_s = 0.0
        self._attempts: Finished[Attempt] = Finished(self._explain, self._value, self._write_down)
        self._requests: Finished[Request] = Finished(
            self._count, self._charge, self._show, self._log
        )

    def observe(self, record: RequestRecord) -> None:
        """Take note of a request of a client that is over."""
        self._parts.fleet.observe(record)
        self._requests.add((time.time(), record))

    def finished(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of an attempt that is over."""
        parts = self._parts
        parts.fleet.finished(plan, ticket)
        parts.warmer.finished(plan, ticket, parts.worth.observe(plan, ticket))
        self._routed(plan, ticket)
        now_s = time.monotonic()
        # What recurs is seen in a sample as well, and every request would pay for more.
        if now_s >= self._recurrence_due_s:
            self._recurrence_due_s = now_s + RECURRENCE_EVERY_S
            segments.observe(plan)
        self._attempts.add((now_s, plan, ticket))

    def warmed(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of a request of warm-up: the worker's, and nobody's traffic."""
        self._parts.fleet.finished(plan, ticket)
        self._routed(plan, ticket)

    def settle(self) -> None:
        """Have everything that is over counted; whoever reads what is counted calls it first."""
        self._attempts.settle()
        self._requests.settle()

    def _routed(self, plan: Plan, ticket: Ticket) -> None:
        sharing = self._parts.sharing
        if sharing is not None and plan.prompt is not None:
            prompt = plan.prompt
            sharing.routed(plan.pool, ticket.worker, prompt.block_hashes, prompt.root)

    def _explain(self, attempts: Iterator[Attempt]) -> None:
        misses = self._parts.misses
        for at_s, plan, ticket in attempts:
            misses.observe(plan, ticket, at_s)

    def _value(self, attempts: Iterator[Attempt]) -> None:
        for _, plan, ticket in attempts:
            self._usage.finished(plan, ticket)

    def _write_down(self, attempts: Iterator[Attempt]) -> None:
        log = self._decision_log
        if log is not None:
            for _, plan, ticket in attempts:
                log.finished(plan, ticket)

    def _count(self, requests: Iterator[Request]) -> None:
        for _, record in requests:
            self._telemetry.observe(record)

    def _charge(self, requests: Iterator[Request]) -> None:
        for _, record in requests:
            self._usage.observe(record)

    def _show(self, requests: Iterator[Request]) -> None:
        for at_s, record in requests:
            self._shown.add(at_s, record)

    def _log(self, requests: Iterator[Request]) -> None:
        if self._request_log is not None:
            self._request_log.write(requests)
