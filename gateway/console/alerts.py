"""The alerts that a gateway can judge itself, by the names and numbers of the Prometheus rules.

A page at three in the morning must not depend on Prometheus being up. What needs hours of history,
or figures that only workers have, stays Prometheus's and is named as such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.console import thresholds
from gateway.console.facts import Count, Fact, counts, states
from gateway.console.history import History

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gateway.console.decisions import Decisions
    from gateway.console.parts import Parts
    from gateway.console.thresholds import Threshold

    Key = tuple[str, str, str]

# In the order in which they are shown: what clients feel first.
JUDGED: dict[str, Threshold] = {
    "WarmlanePoolUnavailable": thresholds.POOL_UNAVAILABLE,
    "WarmlaneErrorRatioHigh": thresholds.ERROR_RATIO_HIGH,
    "WarmlaneQueueRefusing": thresholds.QUEUE_REFUSING,
    "WarmlaneWorkerEjected": thresholds.WORKER_EJECTED,
    "WarmlaneEventLoopLag": thresholds.EVENT_LOOP_LAG,
    "WarmlaneRedisAway": thresholds.REDIS_AWAY,
    "WarmlaneParityDiverged": thresholds.PARITY_DIVERGED,
    "WarmlaneIndexGap": thresholds.INDEX_GAP,
    "WarmlaneIndexStale": thresholds.INDEX_STALE,
    "WarmlaneCacheFull": thresholds.CACHE_FULL,
    "WarmlaneConfigReloadFailed": thresholds.CONFIG_RELOAD_FAILED,
    "WarmlaneDiscoveryStale": thresholds.DISCOVERY_STALE,
    "WarmlaneTracesLost": thresholds.TRACES_LOST,
}
# What only Prometheus can say: it sees all gateways, workers and hours.
ELSEWHERE = (
    "WarmlaneTtftBudgetBurn",
    "WarmlaneEvictionsFrequent",
    "WarmlaneHitRateFalling",
    "WarmlaneTtftRising",
    "WarmlaneCacheThrashing",
    "WarmlaneRestoreSlowerThanRecompute",
    "WarmlaneGpuStallByRestore",
    "WarmlaneTargetDown",
)
RELOAD_FAILED = Fact(
    "WarmlaneConfigReloadFailed",
    1.0,
    why="the file cannot be used; the configuration before it holds",
)
RUNBOOK = "docs/runbooks/{}.md"


class Alerts:
    """Which alerts hold, and since when; event loop only.

    Args:
        parts: The gateway's.
        decisions: Counts requests and errors.
        lag_p99_s: 99th percentile of the event loop's lag in the window; None = not measured yet.
        spans_lost: Spans so far that were not delivered.
        is_reloaded: Whether the configuration that was read last holds.

    Call ``look`` every few seconds: what holds for a while is noticed only by looking.
    """

    def __init__(
        self,
        parts: Parts,
        decisions: Decisions,
        *,
        lag_p99_s: Callable[[float], float | None],
        spans_lost: Callable[[], int],
        is_reloaded: Callable[[], bool],
    ) -> None:
        self._parts = parts
        self._decisions = decisions
        self._lag_p99_s = lag_p99_s
        self._spans_lost = spans_lost
        self._is_reloaded = is_reloaded
        self._history = History()
        self._since_s: dict[Key, float] = {}
        self._facts: dict[Key, Fact] = {}

    def look(self, now_s: float) -> None:
        """Compare everything with its threshold; ``now_s`` is monotonic."""
        found: dict[Key, Fact] = {}
        for fact in self._compared(now_s):
            if fact.value > JUDGED[fact.alert].limit:
                found[fact.alert, fact.pool, fact.worker] = fact
        self._since_s = {key: self._since_s.get(key, now_s) for key in found}
        self._facts = found
        if self._history.is_due(now_s):
            self._history.add(now_s, self._counted())

    def report(self, now_s: float) -> dict[str, Any]:
        """Return what holds, as plain values: firing first, then what may become so."""
        rows = [alert_row(fact, now_s - self._since_s[key]) for key, fact in self._facts.items()]
        return {"active": in_order(rows), "judged": list(JUDGED), "elsewhere": list(ELSEWHERE)}

    def _compared(self, now_s: float) -> Iterator[Fact]:
        """Yield every fact with the value that is compared."""
        yield from states(self._parts, now_s)
        for count in self._counts():
            yield self._grown(count, now_s)
        yield from self._error_ratios(now_s)
        lag_s = self._lag_p99_s(now_s)
        if lag_s is not None:
            why = f"timers fire {lag_s * 1e3:.0f} ms late (99th percentile)"
            yield Fact("WarmlaneEventLoopLag", lag_s, why=why)
        if not self._is_reloaded():
            yield RELOAD_FAILED

    def _counts(self) -> Iterator[Count]:
        yield from counts(self._parts)
        yield Count("WarmlaneTracesLost", (self._spans_lost(),), why="spans were not delivered")

    def _grown(self, count: Count, now_s: float) -> Fact:
        window_s = JUDGED[count.alert].window_s
        grown = min(
            self._history.increase(_key(count, number), value, window_s, now_s)
            for number, value in enumerate(count.values)
        )
        why = f"{grown:.0f} in {window_s / 60:.0f} min: {count.why}"
        return Fact(count.alert, grown, count.pool, count.worker, why)

    def _error_ratios(self, now_s: float) -> Iterator[Fact]:
        window_s = thresholds.ERROR_RATIO_HIGH.window_s
        for pool in self._decisions.requests:
            requests, errors = self.recent(pool, now_s)
            if requests >= thresholds.ERROR_RATIO_MIN_REQUESTS:
                why = f"{errors} of {requests} requests failed in {window_s / 60:.0f} min"
                yield Fact("WarmlaneErrorRatioHigh", errors / requests, pool, why=why)

    def recent(self, pool: str, now_s: float) -> tuple[int, int]:
        """Return the requests of a pool in the window of the error ratio, and the failed ones."""
        window_s = thresholds.ERROR_RATIO_HIGH.window_s
        grown = (
            self._history.increase((name, pool, ""), totals.get(pool, 0), window_s, now_s)
            for name, totals in self._totals()
        )
        requests, errors = grown
        return round(requests), round(errors)

    def _totals(self) -> tuple[tuple[str, dict[str, int]], ...]:
        return ("requests", self._decisions.requests), ("errors", self._decisions.errors)

    def _counted(self) -> dict[Key, float]:
        found: dict[Key, float] = {
            _key(count, number): value
            for count in self._counts()
            for number, value in enumerate(count.values)
        }
        for name, totals in self._totals():
            found |= {(name, pool, ""): num for pool, num in totals.items()}
        return found


def alert_row(fact: Fact, held_s: float) -> dict[str, Any]:
    """Return what is shown of a fact that is beyond its threshold since ``held_s`` seconds."""
    threshold = JUDGED[fact.alert]
    return {
        "alert": fact.alert,
        "state": "firing" if held_s >= threshold.for_s else "pending",
        "severity": threshold.severity,
        "pool": fact.pool,
        "worker": fact.worker,
        "why": fact.why,
        "held_s": held_s,
        "for_s": threshold.for_s,
        "runbook": RUNBOOK.format(fact.alert),
    }


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort rows of alerts: firing ones first, then what clients feel first."""
    order = {name: number for number, name in enumerate(JUDGED)}
    return sorted(rows, key=lambda row: (row["state"] != "firing", order[row["alert"]]))


def _key(count: Count, number: int) -> Key:
    return f"{count.alert}.{number}", count.pool, count.worker
