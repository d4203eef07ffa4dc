"""Read the state of a pool's workers into the plain numbers that ``choose()`` compares."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gateway.cost import EVICTION_FILL, OUTPUT_ALLOWANCE_TOKENS, Candidate
from gateway.routing import RouteInput

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gateway.cost import CostModel
    from gateway.pool import Pool, Worker
    from prefix_index.blocks import BlockHash
    from prefix_index.index import Hit


def route_input(
    pool: Pool,
    *,
    now_s: float,
    prompt_tokens: int,
    hashes: Sequence[BlockHash] | None,
    ring_key: str,
    exclude: Collection[str] = (),
) -> RouteInput:
    """Collect what a choice depends on. Reads only, except for lazily forgotten LRU entries.

    Args:
        pool: The pool.
        now_s: Decision time (monotonic).
        prompt_tokens: Prompt length, exact or estimated.
        hashes: Block hashes of the part that can be a hit; None when the prompt is unreadable.
        ring_key: Affinity key on the ring.
        exclude: Workers that may not be chosen, because an attempt failed there.
    """
    hits = pool.index.match(hashes) if pool.index is not None and hashes else {}
    credit = pool.pending.credit(hashes) if hashes else {}
    models = pool.cost_models()
    candidates = [
        _candidate(
            pool,
            worker,
            now_s,
            prompt_tokens,
            hashes or (),
            hits.get(worker.id),
            credit.get(worker.id, 0),
            models.get(worker.id),
        )
        for worker in pool.workers.values()
    ]
    _mark_eligible(pool, candidates, now_s, exclude)
    request = RouteInput(now_s, prompt_tokens, candidates)
    request.output_tokens = pool.output_length.mean_tokens
    if pool.is_strict:
        request.mode = "strict"
    elif hashes is None or pool.index is None:
        request.mode = "text"
    if request.mode != "cost":
        request.ring = pool.ring.order(ring_key)
    # A home matters only while nobody holds a quarter of the prompt; choose() tests it exactly.
    elif all(4 * c.hit_tokens < prompt_tokens for c in candidates):
        request.home = pool.ring.home(ring_key, pool.set_size)
    return request


def _candidate(
    pool: Pool,
    worker: Worker,
    now_s: float,
    prompt_tokens: int,
    hashes: Sequence[BlockHash],
    hit: Hit | None,
    pending_blocks: int,
    model: CostModel | None,
) -> Candidate:
    books = worker.books
    c = Candidate(
        worker.id,
        in_flight=books.in_flight,
        queued_tokens=books.queued_tokens,
        queued_s=books.queued_s,
        context_tokens=books.context_tokens,
        progress_at_s=books.progress_at_s,
        active_tokens=books.active_tokens,
        new_tokens=books.new_tokens(hashes),
        restore_until_s=books.restore_until_s,
        max_batched_tokens=worker.max_batched_tokens,
        capacity_tokens=worker.capacity_tokens,
        cpu_capacity_tokens=worker.cpu_capacity_tokens,
        bias=worker.health.bias(now_s),
        overdue_s=books.overdue_s(now_s),
        model=model,
    )
    if not pool.is_readable(worker):
        c.source = "text"
        return c
    c.source = worker.mode
    c.pending_tokens = pending_blocks * pool.block_size
    if hit is not None:
        c.hit_gpu, c.hit_cpu, c.hit_disk, c.hit_remote = hit.gpu, hit.cpu, hit.disk, hit.remote
    if worker.capacity_tokens and pool.index is not None:
        _read_cache(pool, worker, c, now_s, prompt_tokens)
    return c


def _read_cache(pool: Pool, worker: Worker, c: Candidate, now_s: float, prompt_tokens: int) -> None:
    """Fill in what is held; the age only where this request makes the engine evict."""
    index = pool.index
    if index is None:
        return
    held = index.blocks_by_tier(worker.id)
    c.held_tokens = held.get("gpu", 0) * pool.block_size
    c.cpu_held_tokens = held.get("cpu", 0) * pool.block_size
    demand = max(1, prompt_tokens - c.hit_tokens) + OUTPUT_ALLOWANCE_TOKENS
    if c.held_tokens + c.queued_tokens + demand > EVICTION_FILL * c.capacity_tokens:
        c.lru_age_s = worker.mirror.oldest_age_s(now_s, partial(index.holds, worker.id, tier="gpu"))
        # The CPU tier's own order is not told; its oldest block is at least as old.
        c.cpu_age_s = c.lru_age_s


def _mark_eligible(
    pool: Pool, candidates: list[Candidate], now_s: float, exclude: Collection[str]
) -> None:
    """Say who may be chosen. Health ejects nobody when nobody else would be left."""
    left = False
    for c in candidates:
        worker = pool.workers[c.worker]
        if worker.draining:
            c.why = "draining"
        elif c.worker in exclude:
            c.why = "excluded"
        elif not worker.health.ready:
            c.why = "not_ready"
        elif not worker.health.may_route(now_s):
            c.why = "ejected"
        c.eligible = c.why == "ok"
        left = left or c.eligible
    if not left:
        for c in candidates:
            if c.why in ("not_ready", "ejected"):
                c.eligible, c.why = True, "panic"
