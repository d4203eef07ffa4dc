"""Those who wait, and the rule beside what is served instead of it, read at scrape time."""

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
        yield from _rollout(self._dispatcher.rollout)
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
    waited = CounterMetricFamily(
        "warmlane_gate_waited", "Requests that had to wait in the gateway", labels=("pool",)
    )
    seconds = CounterMetricFamily(
        "warmlane_gate_wait_seconds", "Seconds that requests waited", labels=("pool",)
    )
    refused = CounterMetricFamily(
        "warmlane_gate_refused",
        "Requests refused because too many waited, or none got a worker in time",
        labels=("pool", "why"),
    )
    for pool in pools:
        waiting.add_metric((pool,), gate.num_waiting(pool))
        waited.add_metric((pool,), gate.num_waited.get(pool, 0))
        seconds.add_metric((pool,), gate.waited_s.get(pool, 0.0))
        refused.add_metric((pool, "full"), gate.num_full.get(pool, 0))
        refused.add_metric((pool, "timeout"), gate.num_timeouts.get(pool, 0))
    yield from (waiting, waited, seconds, refused)


def _rollout(rollout: RollOut) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "warmlane_routed_requests", "Requests by what routed them", labels=("pool", "policy")
    )
    observed = CounterMetricFamily(
        "warmlane_observed_requests",
        "Requests routed by least load of which the rule's choice is known",
        labels=("pool", "agreed"),
    )
    tokens = CounterMetricFamily(
        "warmlane_observed_hit_tokens",
        "Predicted hit tokens of those: where the rule would have sent them, and where they went",
        labels=("pool", "policy"),
    )
    seconds = CounterMetricFamily(
        "warmlane_observed_ttft_seconds",
        "Predicted TTFT of those, summed: where the rule would have sent them, and where they went",
        labels=("pool", "policy"),
    )
    for pool, tally in rollout.tallies.items():
        requests.add_metric((pool, "cost"), tally.num_by_cost)
        requests.add_metric((pool, "least_load"), tally.num_by_least_load)
        observed.add_metric((pool, "true"), tally.num_agreed)
        observed.add_metric((pool, "false"), tally.num_observed - tally.num_agreed)
        tokens.add_metric((pool, "cost"), tally.rule_hit_tokens)
        tokens.add_metric((pool, "least_load"), tally.served_hit_tokens)
        seconds.add_metric((pool, "cost"), tally.rule_ttft_s)
        seconds.add_metric((pool, "least_load"), tally.served_ttft_s)
    yield from (requests, observed, tokens, seconds)
