"""Usage, the autoscaling signal and the value of caches as metrics, read at scrape time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.routing.cost import queue_s
from gateway.telemetry import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.routing.dispatch import Dispatcher
    from gateway.routing.pool import Pool
    from gateway.usage.usage import Usage


class UsageCollector(Collector):
    """Labels are configured tenants, pools and workers; what is not known is absent, never 0.

    Args:
        usage: What is read.
        dispatcher: Its pools and those who wait for them.
        clock: Monotonic seconds, the dispatcher's.
    """

    def __init__(
        self, usage: Usage, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._usage = usage
        self._dispatcher = dispatcher
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: names here are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        yield from self._tenants()
        yield self._queued()
        value = GaugeMetricFamily(
            "warmlane_worker_cache_value_seconds",
            "Prefill seconds that the worker's cache saved in the last hour, older ones fading",
            labels=("pool", "worker"),
        )
        for found in self._usage.values.read(self._clock()):
            value.add_metric((found.pool, found.worker), found.saved_s)
        yield value

    def _tenants(self) -> Iterator[Metric]:
        """Yield in parts: there may be a thousand tenants."""
        tenants = list(self._usage.account.items())
        yield from parts.counter(
            "warmlane_tenant_requests",
            "Finished requests of configured tenants; other = everybody else's",
            ("tenant",),
            (((tenant,), usage.requests) for tenant, usage in tenants),
        )
        yield from parts.counter(
            "warmlane_tenant_tokens",
            "Tokens by tenant: of prompts, those of them that were cached, and of completions",
            ("tenant", "kind"),
            (
                ((tenant, kind), tokens)
                for tenant, usage in tenants
                for kind, tokens in (
                    ("prompt", usage.prompt_tokens),
                    ("cached", usage.cached_tokens),
                    ("output", usage.output_tokens),
                )
            ),
        )
        yield from parts.counter(
            "warmlane_tenant_saved_seconds",
            "Prefill seconds that hits made unnecessary, by tenant, restores taken off",
            ("tenant",),
            (((tenant,), usage.saved_s) for tenant, usage in tenants),
        )

    def _queued(self) -> Metric:
        queued = GaugeMetricFamily(
            "warmlane_queued_prefill_seconds",
            "Prefill seconds of uncached prompt tokens that wait, in the gateway or at a worker",
            labels=("pool",),
        )
        now_s, gate = self._clock(), self._dispatcher.gate
        for pool in self._dispatcher.pools.values():
            if any(worker.learner.model is not None for worker in pool.workers.values()):
                waiting_s = gate.waiting_prefill_s(pool.name)
                queued.add_metric((pool.name,), waiting_s + _at_workers_s(pool, now_s))
        return queued


def _at_workers_s(pool: Pool, now_s: float) -> float:
    return sum(queue_s(worker.books.load, now_s) for worker in pool.workers.values())
