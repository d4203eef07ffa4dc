"""``GET /console/data``: everything the page shows, built in slices that never hold the loop up.

What changes with every request is made anew for every answer; reports over thousands of documents
are made every few seconds, however many pages are open.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from gateway.console.workers import observed_row, pool_rows, worker_rows
from gateway.telemetry.build import installed_version
from gateway.telemetry.slices import in_slices
from gateway.telemetry.window import WINDOW_S
from gateway.warm.documents import hot_row
from gateway.worth.advice import separate_pools
from gateway.worth.group import WINDOW_S as WORTH_WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.console.alerts import Alerts
    from gateway.console.decisions import Decisions
    from gateway.console.parts import Parts
    from gateway.telemetry.requests import Telemetry
    from gateway.usage.usage import Usage

# Of a format that only the page of the same version reads.
VERSION = 1
# Reports over an hour's requests change slowly, and take milliseconds.
REPORTS_EVERY_S = 5.0
# Rows of each table: what a person reads, the rest is behind the admin endpoints.
MAX_DOCUMENTS = 15
MAX_CAUSES = 8
MAX_TENANTS = 8


class Snapshots:
    """Builds answers; event loop only.

    Args:
        parts: The gateway's.
        telemetry: What was observed of workers.
        usage: What workers' caches save.
        decisions: The last ones.
        alerts: Judged by somebody else every few seconds.
        clock: Monotonic seconds.
        clock_unix: Seconds since 1970.
    """

    def __init__(
        self,
        parts: Parts,
        telemetry: Telemetry,
        usage: Usage,
        decisions: Decisions,
        alerts: Alerts,
        *,
        clock: Callable[[], float] = time.monotonic,
        clock_unix: Callable[[], float] = time.time,
    ) -> None:
        self._parts = parts
        self._telemetry = telemetry
        self._usage = usage
        self._decisions = decisions
        self._alerts = alerts
        self._clock = clock
        self._clock_unix = clock_unix
        self._version = installed_version()
        self._reports: dict[str, Any] = {}
        self._reported_s = float("-inf")
        self._reporting = asyncio.Lock()

    async def make(self, after_unix_s: float) -> dict[str, Any]:
        """Return an answer, with the decisions later than ``after_unix_s``."""
        reports = await self._slow()
        self._telemetry.settle()
        workers = await in_slices(worker_rows(self._parts, self._telemetry, self._clock()))
        # Before the decisions are read: what is added later is told the next time.
        now_s, now_unix_s = self._clock(), self._clock_unix()
        self._telemetry.settle()  # what ended meanwhile is before it
        return {
            "v": VERSION,
            "version": self._version,
            "now_unix_s": now_unix_s,
            "decided_until_s": now_unix_s,
            "window_s": WINDOW_S,
            "processes": 1,
            "fleet": observed_row(self._telemetry.fleet, now_s),
            "pools": pool_rows(
                self._parts, self._decisions, lambda pool: self._alerts.recent(pool, now_s)
            ),
            "workers": workers,
            "decisions": self._decisions.rows(after_unix_s),
            "alerts": self._alerts.report(now_s),
            **reports,
        }

    async def _slow(self) -> dict[str, Any]:
        """Return the reports, made anew when they are old."""
        async with self._reporting:
            if self._clock() - self._reported_s >= REPORTS_EVERY_S:
                misses = self._parts.misses.report()
                misses["causes"] = misses["causes"][:MAX_CAUSES]
                documents, worth = await self._documents(), await self._worth()
                self._reports = {"documents": documents, "misses": misses, "worth": worth}
                self._reported_s = self._clock()
        return self._reports

    async def _documents(self) -> dict[str, Any]:
        """Return the hottest documents, in the shape of ``GET /admin/v1/documents``."""
        parts = self._parts
        pools = {pool.name: pool for pool in parts.fleet.pools}
        hot = await in_slices(parts.worth.account.documents())
        hot.sort(key=lambda row: -row[2].recompute_s)
        store, warmed = parts.warmer.store, parts.warmer.warmed
        return {
            "documents": [
                hot_row(pools.get(pool), pool, key, group, store)
                for pool, key, group in hot[:MAX_DOCUMENTS]
            ],
            "warmed": [],
            "tenants": [],
            "total": {
                "documents": len(hot),
                "warmed": len(warmed),
                "stored": len(store),
                "stored_bytes": store.num_bytes,
            },
        }

    async def _worth(self) -> dict[str, Any]:
        """Return what lower tiers are worth, in the shape of ``GET /admin/v1/worth``."""
        account = self._parts.worth.account
        tenants = await in_slices(account.tenant_rows())
        # Compares each tenant with all others: too long for the loop, and only of numbers.
        advice = await asyncio.to_thread(separate_pools, tenants)
        tenants.sort(key=lambda row: -row["saved_s"])
        return {
            "window_s": WORTH_WINDOW_S,
            "pools": account.pool_rows(),
            "tenants": tenants[:MAX_TENANTS],
            "documents": [],
            "advice": advice,
            **self._usage.worth(),
        }
