"""Pools and workers as the console shows them: what is known now and in the last five minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.fleet.figures import filled_share
from gateway.fleet.worker_state import worker_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway.console.decisions import Decisions
    from gateway.console.parts import Parts
    from gateway.routing.pool import Pool, Worker
    from gateway.telemetry.observed import Observed
    from gateway.telemetry.requests import Telemetry
    from gateway.telemetry.window import Window

# What of a worker's own figures is shown, by the contract's names.
_REPORTED = (
    ("gpu_bytes", "kv_cache_gpu_usage_bytes"),
    ("cpu_bytes", "kv_cache_cpu_usage_bytes"),
    ("evictions", "kv_cache_eviction_count"),
    ("restore_stall_s", "gpu_stall_due_to_kv_restore"),
)


def pool_rows(
    parts: Parts, decisions: Decisions, recent: Callable[[str], tuple[int, int]]
) -> list[dict[str, Any]]:
    """Return a row for each pool.

    Args:
        parts: The gateway's.
        decisions: Counts the requests since the start.
        recent: Pool name -> its requests of the last five minutes, and the failed ones.
    """
    return [_pool_row(parts, pool, decisions, recent(pool.name)) for pool in parts.fleet.pools]


def worker_rows(parts: Parts, telemetry: Telemetry, now_s: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each worker; a value that nobody has is None, never 0.

    Workers may come and go meanwhile.
    """
    for pool in list(parts.fleet.pools):
        for worker in list(pool.workers.values()):
            if worker.id in pool.workers:
                row = _worker_row(parts, pool, worker, now_s)
                yield row | observed_row(telemetry.workers.get(worker.id), now_s)


def observed_row(observed: Observed | None, now_s: float) -> dict[str, Any]:
    """Return what was observed of a worker or the fleet in the last five minutes.

    Sums and counts, so that several processes' rows can be added up.
    """
    if observed is None:
        return {"hit_tokens": None, "miss_tokens": None, "ttft": _EMPTY}
    hits, misses = observed.hits.total(now_s), observed.misses.total(now_s)
    is_told = bool(hits + misses)
    return {
        "hit_tokens": round(hits) if is_told else None,
        "miss_tokens": round(misses) if is_told else None,
        "ttft": _spread(observed.ttft_s, now_s),
    }


_EMPTY: dict[str, Any] = {"count": 0, "total_s": 0.0, "buckets": []}


def _spread(window: Window, now_s: float) -> dict[str, Any]:
    """Return count, sum and histogram of a window; buckets as ``Summary`` has them."""
    summary = window.summary(now_s)
    buckets = list(summary.buckets.items())
    return {"count": summary.count, "total_s": summary.total, "buckets": buckets}


def _pool_row(
    parts: Parts, pool: Pool, decisions: Decisions, recent: tuple[int, int]
) -> dict[str, Any]:
    index = pool.index
    return {
        "pool": pool.name,
        "engine": pool.engine,
        "models": list(pool.models),
        "waiting": parts.dispatcher.gate.num_waiting(pool.name),
        "requests": decisions.requests.get(pool.name, 0),
        "recent_requests": recent[0],
        "recent_errors": recent[1],
        "reads_prompts": pool.reader is not None,
        "block_size": None if index is None else index.block_size,
        "blocks": None if index is None else index.num_blocks,
        "max_blocks": None if index is None else index.max_blocks,
    }


def _worker_row(parts: Parts, pool: Pool, worker: Worker, now_s: float) -> dict[str, Any]:
    fleet, events = parts.fleet, parts.fleet.index_state(worker)
    watch = fleet.watches.get(worker.id)
    scrape = None if watch is None else watch.scrape
    values = {} if scrape is None else scrape.values
    return {
        "id": worker.id,
        "pool": pool.name,
        "url": worker.url,
        "state": worker_state(worker, now_s),
        "ready": worker.health.ready and watch is not None and watch.checked.is_set(),
        "mode": events["mode"],
        "parity": fleet.parity_of(worker),
        "is_apart": worker.is_apart,
        "event_health": events["health"],
        "event_why": events["why"],
        "event_age_s": events["event_age_s"],
        "lag_s": events.get("lag_s"),
        "losses": events.get("losses"),
        "in_flight": worker.books.in_flight,
        "decoding": worker.books.num_decoding,
        "queued_tokens": worker.books.queued_tokens,
        "running": None if scrape is None else scrape.of_rank("running", worker.rank),
        "waiting": None if scrape is None else scrape.of_rank("waiting", worker.rank),
        "kv_usage": None if scrape is None else scrape.of_rank("kv_usage", worker.rank),
        "kv_filled": filled_share(pool, worker),
        "capacity_tokens": worker.capacity_tokens or None,
        "block_size": worker.block_size or pool.block_size,
        "blocks": events["blocks"],
        "reported": {short: values.get(name) for short, name in _REPORTED},
    }
