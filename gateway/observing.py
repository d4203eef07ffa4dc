"""Everything that looks on: what is fed with requests that are over, and what is read by scrapes.

``gateway/serve.py`` makes one and calls it; whoever wants to see requests or be scraped is added
here, in one line.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

from gateway.console import Console
from gateway.discovery.metrics import DiscoveryCollector
from gateway.fleet.metrics import FleetCollector
from gateway.fleet.sharing import SharingCollector
from gateway.misses.metrics import MissCollector
from gateway.parts import make_decision_log
from gateway.replicas.metrics import LoadCollector
from gateway.routing import segments
from gateway.routing.decision_line import DecisionLogger
from gateway.routing.metrics import DispatchCollector
from gateway.routing.outcome import Outcome
from gateway.telemetry.finished import Finished
from gateway.telemetry.log_metrics import DecisionLogCollector
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.requests import Telemetry
from gateway.tenancy.metrics import TenancyCollector
from gateway.tracing import SpanCollector, make_tracing
from gateway.usage.metrics import UsageCollector
from gateway.usage.usage import Usage
from gateway.warm.metrics import WarmCollector
from gateway.worth.metrics import WorthCollector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol, TypeAlias

    from prometheus_client.registry import Collector

    from gateway.config import Settings
    from gateway.discovery.discovery import Discovery
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.sharing import Sharing
    from gateway.misses.report import MissReport
    from gateway.replicas.load import LoadExchange
    from gateway.routing.dispatch import Dispatcher, Plan, Ticket
    from gateway.routing.pool import Worker
    from gateway.telemetry.record import RequestRecord
    from gateway.tenancy import Tenancy
    from gateway.tenancy.exchange import BudgetExchange
    from gateway.warm.warmer import Warmer
    from gateway.worth.worth import Worth

    class Parts(Protocol):
        """The gateway's parts that are looked at; None where there is no such part."""

        fleet: Fleet
        dispatcher: Dispatcher
        misses: MissReport
        tenancy: Tenancy
        discovery: Discovery
        worth: Worth
        warmer: Warmer
        exchange: LoadExchange | None
        sharing: Sharing | None
        spending: BudgetExchange | None

    # Each with when it was over: monotonic seconds, and seconds since 1970.
    Attempt: TypeAlias = tuple[float, Plan, Ticket]
    Request: TypeAlias = tuple[float, RequestRecord]


# At most 20 prompts a second are looked at for text that recurs across conversations: a look takes
# 50 to 500 us of the loop, so this is a percent of a core at the worst.
RECURRENCE_EVERY_S = 0.05


class Observing:
    """The onlookers of one process; event loop only.

    Args:
        settings: Validated configuration.
        parts: What is looked at; read after ``watch``, when all of it exists.

    Attributes:
        telemetry: Counts, and owns the registry.
        usage: What tenants used, and what workers' caches save.
        console: The operator's page.
        request_log: A line per request; None where the log level hides them.
        decision_log: The decisions written down; None where that is not configured.
        tracing: Decides which requests are traced; None where no collector is configured.
    """

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self._parts = parts
        self.telemetry = Telemetry(outcomes=[outcome.value for outcome in Outcome])
        self.usage = Usage(parts.fleet.pools, parts.tenancy.is_configured, self.telemetry.overflows)
        logs_requests = settings.telemetry.log_level in ("debug", "info")
        self.request_log = RequestLog(sys.stderr.buffer) if logs_requests else None
        self.decision_log = make_decision_log(settings)
        self.tracing = make_tracing(settings)
        self.console = Console(parts, self.telemetry, self.usage, self._spans_lost)
        self._decisions: DecisionLogger | None = None
        if self.decision_log is not None:
            self._decisions = DecisionLogger(self.decision_log)
        self._recurrence_due_s = 0.0
        # What routing, warm-up or offload caps go by is told at once, see ``finished``.
        self._attempts: Finished[Attempt] = Finished(self._explain, self._value, self._write_down)
        self._requests: Finished[Request] = Finished(
            self._count, self._charge, self._show, self._log
        )
        self.telemetry.settle = self.usage.settle = self.settle

    def watch(self) -> None:
        """Let scrapes read the parts; once, when all of them are made."""
        self._parts.misses.settle = self.settle
        for collector in self._collectors():
            self.telemetry.register(collector)

    def _collectors(self) -> Iterator[Collector]:
        parts = self._parts
        yield MissCollector(parts.misses)
        yield FleetCollector(parts.fleet, self.telemetry, time.monotonic)
        yield DispatchCollector(parts.dispatcher)
        if parts.sharing is not None:
            yield SharingCollector(parts.sharing)
        if parts.exchange is not None:
            yield LoadCollector(parts.exchange)
        yield TenancyCollector(parts.tenancy, parts.spending)
        yield DiscoveryCollector(parts.discovery)
        yield WorthCollector(parts.worth.account)
        yield UsageCollector(self.usage, parts.dispatcher)
        warmer = parts.warmer
        yield WarmCollector(warmer.counts, warmer.num_warm, warmer.stored)
        if self.decision_log is not None:
            yield DecisionLogCollector(self.decision_log)
        if self.tracing is not None:
            yield SpanCollector(self.tracing.export)

    async def run(self) -> None:
        """Measure what needs a clock of its own, until cancelled."""
        await asyncio.gather(self.telemetry.lag.run(), self.console.run())

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

    def settle(self) -> None:
        """Have everything that is over counted; whoever reads what is counted calls it first."""
        self._attempts.settle()
        self._requests.settle()

    def warmed(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of a request of warm-up: the worker's, and nobody's traffic."""
        self._parts.fleet.finished(plan, ticket)
        self._routed(plan, ticket)

    def forget_worker(self, worker: Worker) -> None:
        """Drop the series of a worker that is no more; a second call does nothing more."""
        # What it did last must not bring them back.
        self.settle()
        self.telemetry.forget_worker(worker.id)

    def close(self) -> None:
        """Write what waits to be written."""
        self.settle()
        if self.decision_log is not None:
            self.decision_log.close()

    def _explain(self, attempts: Iterator[Attempt]) -> None:
        for at_s, plan, ticket in attempts:
            self._parts.misses.observe(plan, ticket, at_s)

    def _value(self, attempts: Iterator[Attempt]) -> None:
        for _, plan, ticket in attempts:
            self.usage.finished(plan, ticket)

    def _write_down(self, attempts: Iterator[Attempt]) -> None:
        if self._decisions is not None:
            for _, plan, ticket in attempts:
                self._decisions.finished(plan, ticket)

    def _count(self, requests: Iterator[Request]) -> None:
        for _, record in requests:
            self.telemetry.observe(record)

    def _charge(self, requests: Iterator[Request]) -> None:
        for _, record in requests:
            self.usage.observe(record)

    def _show(self, requests: Iterator[Request]) -> None:
        for at_s, record in requests:
            self.console.decisions.add(at_s, record)

    def _log(self, requests: Iterator[Request]) -> None:
        if self.request_log is not None:
            self.request_log.write(requests)

    def _spans_lost(self) -> int:
        export = None if self.tracing is None else self.tracing.export
        return 0 if export is None else export.dropped + export.failed

    def _routed(self, plan: Plan, ticket: Ticket) -> None:
        sharing = self._parts.sharing
        if sharing is not None and plan.prompt is not None:
            prompt = plan.prompt
            sharing.routed(plan.pool, ticket.worker, prompt.block_hashes, prompt.root)
