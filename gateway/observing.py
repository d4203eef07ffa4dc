"""Everything that looks on: what is fed with requests that are over, and what is read by scrapes.

``gateway/serve.py`` makes one and calls it; whoever wants to be scraped is added here, in one line,
whoever wants to see requests in ``gateway/onlookers.py``.
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
from gateway.onlookers import Onlookers
from gateway.parts import make_decision_log
from gateway.replicas.metrics import LoadCollector
from gateway.routing.decision_line import DecisionLogger
from gateway.routing.metrics import DispatchCollector
from gateway.routing.outcome import Outcome
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

    from prometheus_client.registry import Collector

    from gateway.config import Settings
    from gateway.console.parts import Parts
    from gateway.routing.pool import Worker


class Observing:
    """The onlookers of one process; event loop only.

    Args:
        settings: Validated configuration.
        parts: What is looked at; read after ``watch``, when all of it exists.

    Attributes:
        telemetry: Counts, and owns the registry.
        usage: What tenants used, and what workers' caches save.
        console: The operator's page.
        onlookers: Those who hear of what is over.
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
        self.onlookers = Onlookers(
            parts,
            self.telemetry,
            self.usage,
            self.console.decisions,
            self.request_log,
            None if self.decision_log is None else DecisionLogger(self.decision_log),
        )
        self.telemetry.settle = self.usage.settle = self.onlookers.settle

    def watch(self) -> None:
        """Let scrapes read the parts; once, when all of them are made."""
        self._parts.misses.settle = self.onlookers.settle
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

    def forget_worker(self, worker: Worker) -> None:
        """Drop the series of a worker that is no more; a second call does nothing more."""
        # What it did last must not bring them back.
        self.onlookers.settle()
        self.telemetry.forget_worker(worker.id)

    def close(self) -> None:
        """Write what waits to be written."""
        self.onlookers.settle()
        if self.decision_log is not None:
            self.decision_log.close()

    def _spans_lost(self) -> int:
        export = None if self.tracing is None else self.tracing.export
        return 0 if export is None else export.dropped + export.failed
