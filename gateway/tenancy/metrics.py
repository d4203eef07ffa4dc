"""Refused keys, budgets and key files, read at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.telemetry import parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.tenancy.exchange import BudgetExchange
    from gateway.tenancy.tenancy import Tenancy


class TenancyCollector(Collector):
    """Reads a tenancy; labels are configured tenants and bounded words.

    Args:
        tenancy: The one.
        exchange: Of its budgets with other gateways; None = it has them alone.
    """

    def __init__(self, tenancy: Tenancy, exchange: BudgetExchange | None = None) -> None:
        self._tenancy = tenancy
        self._exchange = exchange

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: names here are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        tenancy = self._tenancy
        refused = CounterMetricFamily(
            "warmlane_unauthorized_requests",
            "Requests refused with 401, by whether a key was missing or unknown",
            labels=("reason",),
        )
        for reason in ("missing", "unknown"):
            refused.add_metric((reason,), tenancy.num_unauthorized[reason])
        yield refused
        yield from self._budgets()
        yield from self._files()
        if self._exchange is not None:
            yield from _exchange(self._exchange)

    def _budgets(self) -> Iterator[Metric]:
        """Yield in parts: there may be a thousand tenants."""
        budgets = self._tenancy.budgets
        # A reload may change them in between.
        keys = [
            (b, (b.tenant, name), bucket) for b in budgets for name, bucket in b.buckets.items()
        ]
        labels = ("tenant", "resource")
        yield from parts.counter(
            "warmlane_rate_limited_requests",
            "Requests refused since their tenant had used up its budget",
            labels,
            ((key, budgets.num_refused[key]) for _, key, _ in keys),
        )
        yield from parts.counter(
            "warmlane_budget_spent",
            "What tenants with a budget used here: requests, or tokens as workers reported them",
            labels,
            ((key, max(0.0, bucket.spent)) for _, key, bucket in keys),
        )
        yield from parts.gauge(
            "warmlane_budget_remaining",
            "What is left of a tenant's budget",
            labels,
            ((key, budgets.remaining(budget)[key[1]]) for budget, key, _ in keys),
        )

    def _files(self) -> Iterator[Metric]:
        keyring = self._tenancy.keyring
        errors = CounterMetricFamily(
            "warmlane_tenant_keys_errors",
            "Times a tenant's key file could not be used, so that its keys stayed as they were",
            labels=("tenant",),
        )
        reloads = CounterMetricFamily(
            "warmlane_tenant_keys_reloads", "Times a tenant's keys changed", labels=("tenant",)
        )
        for tenant in keyring.tenants_with_files:
            errors.add_metric((tenant,), keyring.num_errors[tenant])
            reloads.add_metric((tenant,), keyring.num_reloads[tenant])
        yield from (errors, reloads)


def _exchange(exchange: BudgetExchange) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "warmlane_budget_gateways",
        "Gateways that share the tenants' budgets, this one among them",
        exchange.num_gateways,
    )
    yield GaugeMetricFamily(
        "warmlane_budget_connected",
        "1 = other gateways' spending is heard, 0 = this one keeps to its share",
        float(exchange.is_connected),
    )
    errors = CounterMetricFamily(
        "warmlane_budget_exchange_errors",
        "Reports of spending that were broken or could not be sent or heard",
        labels=("kind",),
    )
    for kind, count in sorted(exchange.errors.items()):
        errors.add_metric((kind,), count)
    yield errors
