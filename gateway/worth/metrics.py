"""The worth of lower tiers as metrics, read at scrape time; pools and tenants are bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from gateway.telemetry import parts
from gateway.worth.rule import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.telemetry.parts import Rows
    from gateway.worth.account import WorthAccount
    from gateway.worth.group import Group
    from gateway.worth.rule import Worth

# Empty tenant: the whole pool.
LABELS = ("pool", "tenant")


class WorthCollector(Collector):
    """Yields ``warmlane_worth_*``; what is not known yet is absent, never 0."""

    def __init__(self, account: WorthAccount) -> None:
        self._account = account

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the names are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families, in parts: hundreds of tenants may have series."""
        seen: list[tuple[tuple[str, str], Group, Worth]] = []
        yield from parts.gauge(
            "warmlane_worth_verdict",
            "1 for the verdict that holds: whether a lower tier is worth it",
            (*LABELS, "verdict"),
            self._verdicts(seen),
        )
        known = [row for row in seen if row[2].verdict is not Verdict.UNKNOWN]
        families: tuple[tuple[str, str, Rows], ...] = (
            (
                "reuse_gain_seconds",
                "What one restore gains; negative where it loses time",
                ((labels, worth.reuse_gain_s) for labels, _, worth in known),
            ),
            (
                "saved_seconds",
                "What an hour's reuses save by restores",
                ((labels, worth.saved_s) for labels, _, worth in known),
            ),
            (
                "cost_seconds",
                "What storing costs in an hour, evictions included",
                ((labels, worth.cost_s) for labels, _, worth in known),
            ),
            (
                "reuses",
                "Requests an hour that began with a prefix computed before",
                ((labels, group.reuses) for labels, group, _ in seen),
            ),
            (
                "lost_tokens",
                "Tokens an hour that were to be reused and held by nobody",
                ((labels, group.lost_tokens) for labels, group, _ in seen),
            ),
        )
        for name, text, rows in families:
            yield from parts.gauge(f"warmlane_worth_{name}", text, LABELS, rows)

    def _verdicts(
        self, seen: list[tuple[tuple[str, str], Group, Worth]]
    ) -> Iterator[tuple[tuple[str, ...], float]]:
        """Read one group after the other, and note what was read."""
        for pool, tenant, group, worth in self._account.tenants():
            seen.append(((pool, tenant), group, worth))
            for name in Verdict:
                yield (pool, tenant, name.value), float(name is worth.verdict)
