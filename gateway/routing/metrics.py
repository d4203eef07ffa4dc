"""Those who wait, what is routed by the rule, and who is apart, read at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.routing.dispatch import Dispatcher
    from gateway.routing.gate import Gate
    from gateway.routing.rollout import RollOut


class DispatchCollector(Collector):
    """Reads a dispatcher; labels are pools, workers and bounded words."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: names here are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        pools = self._dispatcher.pools
        yield from _gate(self._dispatcher.gate, list(pools))
        yield _rollout(self._dispatcher.rollout)
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


def _rollout(rollout: RollOut) -> Metric:
    routed = CounterMetricFamily(
        "warmlane_routed_requests", "Requests by what routed them", labels=("pool", "policy")
    )
    for (pool, policy), count in rollout.num_routed.items():
        routed.add_metric((pool, policy), count)
    return routed
