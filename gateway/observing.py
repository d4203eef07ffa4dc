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
    from typing import Protocol

    from prometheus_client.registry import Collector

    from gateway.config import Settings
    from gateway.discovery.discovery import Discovery
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.sharing import Sharing
    from gateway.misses.report import MissReport
    from gateway.replicas.load import LoadExchange
    from gateway.routing.dispatch import Dispatcher, Plan, Ticket
    from gateway.routing.pool import Worker
    from gateway.telemetry.finished import Batch
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
        self._over = Finished(self._tell)
        self.telemetry.settle = self._over.settle

    def watch(self) -> None:
        """Let scrapes read the parts; once, when all of them are made."""
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
        self._over.add(record)

    def finished(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of an attempt that is over."""
        parts = self._parts
        parts.fleet.finished(plan, ticket)
        parts.misses.observe(plan, ticket)
        parts.warmer.finished(plan, ticket, parts.worth.observe(plan, ticket))
        self.usage.finished(plan, ticket)
        if self._decisions is not None:
            self._decisions.finished(plan, ticket)
        self._routed(plan, ticket)
        # What recurs is seen in a sample as well, and every request would pay for more.
        now_s = time.monotonic()
        if now_s >= self._recurrence_due_s:
            self._recurrence_due_s = now_s + RECURRENCE_EVERY_S
            segments.observe(plan)

    def warmed(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of a request of warm-up: the worker's, and nobody's traffic."""
        self._parts.fleet.finished(plan, ticket)
        self._routed(plan, ticket)

    def forget_worker(self, worker: Worker) -> None:
        """Drop the series of a worker that is no more; a second call does nothing more."""
        # What it did last must not bring them back.
        self._over.settle()
        self.telemetry.forget_worker(worker.id)

    def close(self) -> None:
        """Write what waits to be written."""
        self._over.settle()
        if self.decision_log is not None:
            self.decision_log.close()

    def _tell(self, batch: Batch) -> None:
        telemetry, usage, decisions = self.telemetry, self.usage, self.console.decisions
        # One onlooker after the other: that is what they are told of many at a time for.
        for _, record in batch:
            telemetry.observe(record)
        for _, record in batch:
            usage.observe(record)
        for at_s, record in batch:
            decisions.add(at_s, record)
        if self.request_log is not None:
            self.request_log.write(batch)

    def _spans_lost(self) -> int:
        export = None if self.tracing is None else self.tracing.export
        return 0 if export is None else export.dropped + export.failed

    def _routed(self, plan: Plan, ticket: Ticket) -> None:
        sharing = self._parts.sharing
        if sharing is not None and plan.prompt is not None:
            prompt = plan.prompt
            sharing.routed(plan.pool, ticket.worker, prompt.block_hashes, prompt.root)
