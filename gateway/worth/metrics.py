"""The worth of lower tiers as metrics, read at scrape time; pools and tenants are bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.worth.rule import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.worth.account import WorthAccount

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
        """Yield all families."""
        verdict = GaugeMetricFamily(
            "warmlane_worth_verdict",
            "1 for the verdict that holds: whether a lower tier is worth it",
            labels=(*LABELS, "verdict"),
        )
        gain = _gauge("reuse_gain_seconds", "What one restore gains; negative where it loses time")
        saved = _gauge("saved_seconds", "What an hour's reuses save by restores")
        cost = _gauge("cost_seconds", "What storing costs in an hour, evictions included")
        reuses = _gauge("reuses", "Requests an hour that began with a prefix computed before")
        lost = _gauge("lost_tokens", "Tokens an hour that were to be reused and held by nobody")
        for pool, tenant, group, worth in self._account.tenants():
            labels = (pool, tenant)
            for name in Verdict:
                verdict.add_metric((*labels, name.value), float(name is worth.verdict))
            reuses.add_metric(labels, group.reuses)
            lost.add_metric(labels, group.lost_tokens)
            if worth.verdict is not Verdict.UNKNOWN:
                gain.add_metric(labels, worth.reuse_gain_s)
                saved.add_metric(labels, worth.saved_s)
                cost.add_metric(labels, worth.cost_s)
        yield from (verdict, gain, saved, cost, reuses, lost)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"warmlane_worth_{name}", text, labels=LABELS)
