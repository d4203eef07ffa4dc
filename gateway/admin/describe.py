"""Workers and the index as plain values, for operators and their programs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.fleet.fingerprints import differences
from gateway.fleet.worker_state import worker_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.fleet.fleet import Fleet
    from gateway.routing.pool import Pool, Worker

# What a worker's row tells of its events; a worker that is not followed here has none of it.
EVENT_FIELDS = ("gaps", "losses", "replays", "decode_errors", "rejected", "orphans")


def worker_row(fleet: Fleet, pool: Pool, worker: Worker, now_s: float) -> dict[str, Any]:
    """Describe a worker; a value nobody has is None, never 0.

    Args:
        fleet: Knows its events and its parity.
        pool: The worker's pool.
        worker: Of it.
        now_s: Monotonic seconds.
    """
    events, model = fleet.index_state(worker), worker.learner.model
    return {
        "id": worker.id,
        "url": worker.url,
        "pool": pool.name,
        "mode": events["mode"],
        "state": worker_state(worker, now_s),
        # The part of the requests it may take while its cache is filled; 1 = all of them.
        "share": 1.0 if worker.slow_start is None else worker.slow_start.share(now_s),
        "ready": worker.health.ready and fleet.watches[worker.id].checked.is_set(),
        "in_flight": worker.books.in_flight,
        "queued_tokens": worker.books.queued_tokens,
        "blocks": events["blocks"],
        "capacity_tokens": worker.capacity_tokens or None,
        "cpu_capacity_tokens": worker.cpu_capacity_tokens or None,
        "block_size": worker.block_size,
        "epoch": worker.epoch,
        "rank": worker.rank,
        "parity": fleet.parity_of(worker),
        "divergence": fleet.divergence_of(worker),
        "cost": None if model is None else msgspec.to_builtins(model),
        "can_pull": worker.can_pull,
        "pull_style": worker.pull_style or None,
        "adapters": sorted(worker.adapters),
        "fingerprint": worker.fingerprint or None,
        "is_apart": worker.is_apart,
        "differences": [str(d) for d in differences(pool) if d.worker == worker.id]
        if worker.is_apart
        else [],
        "has_events": fleet.has_events(worker),
        "pool_block_size": pool.block_size if pool.index is not None else None,
        "event_age_s": events["event_age_s"],
        "event_health": events["health"],
        "event_why": events["why"],
        "lag_s": events.get("lag_s"),
        **{name: events.get(name) for name in EVENT_FIELDS},
    }


def pool_row(fleet: Fleet, pool: Pool, shared: dict[str, Any] | None) -> dict[str, Any]:
    """Describe a pool's index and what it knows of each worker.

    Args:
        fleet: Knows the workers' events and parity.
        pool: The pool.
        shared: What the shared index says of the pool, with ``workers``; None if it is not shared.
    """
    index = pool.index
    states = {
        worker.id: fleet.index_state(worker) | {"parity": fleet.parity_of(worker)}
        for worker in pool.workers.values()
    }
    told = dict(shared or {})
    for worker_id, held in told.pop("workers", {}).items():
        if worker_id in states:
            states[worker_id]["shared"] = held
    return {
        "pool": pool.name,
        "models": list(pool.models),
        "engine": pool.engine,
        "backend": "memory" if shared is None else "redis",
        "shared": None if shared is None else told,
        "reads_prompts": pool.reader is not None,
        # Of tokenizer, chat template and engine kind: all that turns a body into tokens.
        "prompt_fingerprint": None if pool.reader is None else pool.reader.fingerprint,
        "block_size": None if index is None else index.block_size,
        "blocks": 0 if index is None else index.num_blocks,
        "max_blocks": None if index is None else index.max_blocks,
        "by_tier": _by_tier(state["blocks"] for state in states.values()),
        "age_s": _age_s(states.values()),
        "unread_prompts": dict(pool.unread_prompts),
        "workers": states,
    }


def _by_tier(blocks: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up who holds how many blocks; one that two workers hold counts twice."""
    total: Counter[str] = Counter()
    for held in blocks:
        total.update(held)
    return dict(total)


def _age_s(states: Iterable[dict[str, Any]]) -> float | None:
    """Return the age of the newest event, as ``explain`` tells it; None when there are none."""
    ages = [state["event_age_s"] for state in states if state["mode"] == "exact"]
    return min((age for age in ages if age is not None), default=None)
