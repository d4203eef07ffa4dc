"""What workers tell of themselves, as metrics: the contract's bare names and their typed twins.

A value that a worker does not report is absent, never 0, and goes when the worker goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UntypedMetricFamily

from gateway.fleet.scrape import WORKER_VALUES
from gateway.telemetry import parts
from gateway.telemetry.observed import FLEET, SCOPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from gateway.fleet.fleet import Fleet
    from gateway.fleet.watch import Watch
    from gateway.routing.pool import Pool, Worker

WORKER = ("pool", "worker")
REPORTED = {
    "kv_cache_gpu_usage_bytes": "Bytes of device memory that hold KV",
    "kv_cache_cpu_usage_bytes": "Bytes of host memory that hold KV",
    "kv_cache_offload_read_latency": "Mean seconds of a transfer from lower tiers",
    "kv_cache_offload_write_latency": "Mean seconds of a transfer to lower tiers",
    "kv_cache_eviction_count": "Cached blocks given up for room",
    "gpu_stall_due_to_kv_restore": "Seconds that engines stood still for KV on its way",
}
CUMULATIVE = {"kv_cache_eviction_count", "gpu_stall_due_to_kv_restore"}
# Adding means over workers would be no latency of anything; these have no fleet sample.
MEANS = {"kv_cache_offload_read_latency", "kv_cache_offload_write_latency"}


def reported(fleet: Fleet) -> Iterator[Metric]:
    """Yield the contract's names that only workers can know, as they reported them."""
    watches = _watches(fleet)
    for name in WORKER_VALUES:
        text = f"{REPORTED[name]}, as the workers report it"
        family = (
            UntypedMetricFamily(name, text, labels=SCOPE)
            if name in CUMULATIVE
            else GaugeMetricFamily(name, text, labels=SCOPE)
        )
        values = {
            watch.name: watch.scrape.values[name]
            for watch in watches
            if name in watch.scrape.values
        }
        if values and name not in MEANS:
            family.add_metric(FLEET, sum(values.values()))
        for worker, value in values.items():
            family.add_metric(("worker", worker), value)
        yield family


def twins(fleet: Fleet) -> Iterator[Metric]:
    """Yield the typed twins of the same."""
    held = GaugeMetricFamily(
        "warmlane_worker_kv_bytes",
        "Bytes that hold KV, by tier, as the worker reports them",
        labels=(*WORKER, "tier"),
    )
    evictions = CounterMetricFamily(
        "warmlane_worker_evictions",
        "Cached blocks given up for room, as the worker reports them",
        labels=WORKER,
    )
    stalls = CounterMetricFamily(
        "warmlane_worker_restore_stall_seconds",
        "Time the worker's engine stood still for KV on its way, as it reports it",
        labels=WORKER,
    )
    offload = GaugeMetricFamily(
        "warmlane_worker_offload_seconds",
        "Mean time of a transfer from (read) or to (write) lower tiers, as the worker reports it",
        labels=(*WORKER, "direction"),
    )
    places = (
        (held, ("gpu",), "kv_cache_gpu_usage_bytes"),
        (held, ("cpu",), "kv_cache_cpu_usage_bytes"),
        (offload, ("read",), "kv_cache_offload_read_latency"),
        (offload, ("write",), "kv_cache_offload_write_latency"),
        (evictions, (), "kv_cache_eviction_count"),
        (stalls, (), "gpu_stall_due_to_kv_restore"),
    )
    for watch, pool in _watches(fleet).items():
        for family, labels, name in places:
            value = watch.scrape.values.get(name)
            if value is not None:
                family.add_metric((pool, watch.name, *labels), value)
    yield from (held, evictions, stalls, offload)


def engine_state(fleet: Fleet, request_tokens: Mapping[str, float]) -> Iterator[Metric]:
    """Yield what engines say of their queues and KV memory, and what still fits into it.

    Args:
        fleet: Whose workers.
        request_tokens: Pool -> tokens of a request there, as far as any was seen.
    """
    told = [
        (pool.name, worker, fleet.watches[worker.id].scrape)
        for pool in fleet.pools
        for worker in pool.workers.values()
        if worker.id in fleet.watches
    ]
    for name, figure, text in (
        ("running_requests", "running", "Requests being computed, as the engine says"),
        ("waiting_requests", "waiting", "Requests queued in the engine, as it says"),
        ("kv_usage_ratio", "kv_usage", "Share of KV memory that requests use, as the engine says"),
    ):
        rows = (
            ((pool, worker.id), value)
            for pool, worker, scrape in told
            if (value := scrape.of_rank(figure, worker.rank)) is not None
        )
        yield from parts.gauge(f"warmlane_worker_{name}", text, WORKER, rows)
    yield from parts.gauge(
        "warmlane_batch_headroom_requests",
        "Requests of mean length for which KV memory is free or can be freed: how much larger a "
        "batch the memory supports",
        WORKER,
        (
            # What requests do not use is free, or cached and can be given up.
            ((pool, worker.id), (1.0 - used) * worker.capacity_tokens / request_tokens[pool])
            for pool, worker, scrape in told
            if (used := scrape.of_rank("kv_usage", worker.rank)) is not None
            and worker.capacity_tokens
            and request_tokens.get(pool)
        ),
    )
    yield from parts.gauge(
        "warmlane_worker_kv_filled_ratio",
        "Share of the device's KV memory that holds something, cached prefixes included, as far as "
        "the index knows",
        WORKER,
        (
            ((pool.name, worker.id), share)
            for pool in fleet.pools
            for worker in list(pool.workers.values())
            if (share := filled_share(pool, worker)) is not None
        ),
    )


def filled_share(pool: Pool, worker: Worker) -> float | None:
    """Return what share of a worker's device KV holds something; None if nobody knows.

    Engines count cached blocks as free, so their own usage never says that a cache is full.
    """
    if pool.index is None or not worker.capacity_tokens or worker.mode == "text":
        return None
    held_tokens = pool.index.held_blocks(worker.id) * pool.index.block_size
    return min(1.0, held_tokens / worker.capacity_tokens)


def _watches(fleet: Fleet) -> dict[Watch, str]:
    """Return every address's watch once, with its pool: ranks share one."""
    watches: dict[Watch, str] = {}
    for pool in fleet.pools:
        for worker_id in pool.workers:
            watch = fleet.watches.get(worker_id)
            if watch is not None:
                watches[watch] = pool.name
    return watches
