"""Those who wait, what the rule routes, and who is ill or apart, read at scrape time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.routing.health import Breaker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.routing.dispatch import Dispatcher
    from gateway.routing.gate import Gate
    from gateway.routing.pool import Pool
    from gateway.routing.rollout import RollOut


class DispatchCollector(Collector):
    """Reads a dispatcher; labels are pools, workers and bounded words.

    Args:
        dispatcher: What is read.
        clock: Monotonic seconds, the dispatcher's.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float] = time.monotonic) -> None:
        self._dispatcher = dispatcher
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: names here are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        pools = self._dispatcher.pools
        yield from _gate(self._dispatcher.gate, list(pools))
        yield _rollout(self._dispatcher.rollout)
        yield from _resilience(pools.values(), self._clock())
        apart = GaugeMetricFamily(
            "warmlane_worker_apart",
            "1 = differs from its pool in weights, tokenizer or KV format, used as a last resort",
            labels=("pool", "worker"),
        )
        for pool in pools.values():
            for worker in pool.workers.values():
                apart.add_metric((pool.name, worker.id), float(worker.is_apart))
        yield apart


def _gate(gate: Gate, pools: list[str]) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "warmlane_gate_waiting", "Requests that wait in the gateway for a worker", labels=("pool",)
    )
    refused = CounterMetricFamily(
        "warmlane_gate_refused",
        "Requests refused because too many waited, or none got a worker in time",
        labels=("pool", "why"),
    )
    for pool in pools:
        waiting.add_metric((pool,), gate.num_waiting(pool))
        refused.add_metric((pool, "full"), gate.num_full[pool])
        refused.add_metric((pool, "timeout"), gate.num_timeouts[pool])
    yield from (waiting, refused)


def _resilience(pools: Iterable[Pool], now_s: float) -> Iterator[Metric]:
    labels = ("pool", "worker")
    refused = CounterMetricFamily(
        "warmlane_retries_refused",
        "Failed attempts that were not tried again since the retry budget was spent",
        labels=("pool",),
    )
    ejections = CounterMetricFamily(
        "warmlane_worker_ejections", "Times a worker was taken out after failures", labels=labels
    )
    ejected = GaugeMetricFamily(
        "warmlane_worker_ejected", "1 while it is out, or on trial", labels=labels
    )
    bias = GaugeMetricFamily(
        "warmlane_worker_bias", "Factor on its cost after failures; 1 = none", labels=labels
    )
    for pool in pools:
        refused.add_metric((pool.name,), pool.num_retries_refused)
        for worker in pool.workers.values():
            at, health = (pool.name, worker.id), worker.health
            ejections.add_metric(at, health.num_ejections)
            ejected.add_metric(at, float(health.breaker(now_s) is not Breaker.CLOSED))
            bias.add_metric(at, health.bias(now_s))
    yield from (refused, ejections, ejected, bias)


def _rollout(rollout: RollOut) -> Metric:
    routed = CounterMetricFamily(
        "warmlane_routed_requests", "Requests by what routed them", labels=("pool", "policy")
    )
    for (pool, policy), count in rollout.num_routed.items():
        routed.add_metric((pool, policy), count)
    return routed
