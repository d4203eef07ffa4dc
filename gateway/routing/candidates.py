"""Read the state of a pool's workers into the plain numbers that ``choose()`` compares."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gateway.routing.choose import RouteInput
from gateway.routing.cost import EVICTION_FILL, MEMORY_FILL, OUTPUT_ALLOWANCE_TOKENS, Candidate
from gateway.routing.learner import slowest
from prefix_index.blocks import usable_blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gateway.routing.plan import Plan
    from gateway.routing.pool import Worker
    from prefix_index.blocks import BlockHash
    from prefix_index.index import Hit, Index


def route_input(plan: Plan, now_s: float, exclude: Collection[str] = ()) -> RouteInput:
    """Collect what a choice depends on. Reads only, except for lazily forgotten LRU entries.

    Args:
        plan: The request.
        now_s: Decision time (monotonic).
        exclude: Workers that may not be chosen, because an attempt failed there.
    """
    pool, hashes, prompt_tokens = plan.pool, plan.hashes, plan.num_tokens
    index = pool.index
    hits: dict[str, Hit] = {}
    credit: dict[str, int] | None = None
    # Equal to the blocks in ``hashes`` where all of them are known.
    num_blocks = 0 if hashes is None else usable_blocks(prompt_tokens, pool.block_size)
    candidates = []
    longest = 0
    for worker_id, worker in pool.workers.items():
        c = _candidate(worker, now_s, hashes or (), num_blocks)
        if pool.is_readable(worker):
            c.source = worker.mode
            if credit is None:  # looked up once, and only if somebody's blocks mean anything
                credit = _credit(plan)
                hits = index.match(hashes) if index is not None and hashes else hits
            if credit:
                c.pending_tokens = credit.get(worker_id, 0)
            hit = hits.get(worker_id)
            if hit is not None:
                c.hit_gpu, c.hit_cpu, c.hit_disk, c.hit_remote = hit
                longest = max(longest, c.hit_tokens)
            if c.capacity_tokens and index is not None:
                _read_cache(index, worker, c, now_s, prompt_tokens)
        if exclude or worker.draining or worker.health.is_suspect:
            c.why = _why(worker, now_s, exclude)
            c.eligible = c.why == "ok"
        candidates.append(c)
    _lend_models(candidates)
    _panic(candidates)
    request = RouteInput(now_s, prompt_tokens, candidates)
    request.output_tokens = pool.output_length.mean_tokens
    if pool.is_strict or hashes is None or index is None:
        request.mode = "strict" if pool.is_strict else "text"
        request.ring = pool.ring.order(plan.key.ring_key)
    # A home matters only for blocks that can be cached, while nobody holds a quarter of the
    # prompt; choose() tests the latter again.
    elif num_blocks and 4 * longest < prompt_tokens:
        request.home = plan.home
    return request


def _credit(plan: Plan) -> dict[str, int]:
    """Return worker -> leading tokens of the prompt that a cold sibling there is computing."""
    pool, hashes, chain = plan.pool, plan.hashes, plan.text_chain
    if not pool.pending or not hashes:
        tokens = {}
    else:
        blocks = pool.pending.credit(hashes)
        tokens = {worker: count * pool.block_size for worker, count in blocks.items()}
    if chain and pool.pending_texts:
        # A link stands for its share of the prompt, the rest behind the last one for nothing.
        link_tokens = plan.num_tokens / (len(chain) + 1)
        for worker, links in pool.pending_texts.credit(chain).items():
            tokens[worker] = max(tokens.get(worker, 0), int(links * link_tokens))
    return tokens


def _candidate(
    worker: Worker, now_s: float, hashes: Sequence[BlockHash], num_blocks: int
) -> Candidate:
    """Read the books and the health of one worker."""
    books, health = worker.books, worker.health
    capacity_tokens, active_tokens = worker.capacity_tokens, books.active_tokens
    # Blocks shared with requests in flight matter only where memory is short.
    new_tokens = num_blocks * books.block_size
    if (
        capacity_tokens
        and active_tokens + new_tokens + OUTPUT_ALLOWANCE_TOKENS > MEMORY_FILL * capacity_tokens
    ):
        new_tokens -= books.common_tokens(hashes)
    # By position, in the order of the fields: names would be half of the time spent here.
    return Candidate(
        worker.id, True, "ok", "text", 0, 0, 0, 0, 0,
        books.in_flight, books.queued_tokens, books.queued_s, books.context_tokens,
        books.progress_at_s, active_tokens, new_tokens, books.restore_until_s,
        worker.max_batched_tokens, capacity_tokens, 0, 0.0, worker.cpu_capacity_tokens, 0, 0.0,
        health.bias(now_s) if health.failures else 1.0,
        books.overdue_s(now_s) if books.awaited else 0.0,
        worker.learner.model,
    )  # fmt: skip


def _lend_models(candidates: list[Candidate]) -> None:
    """Let a worker nobody measured borrow its pool's highest constants."""
    models = [c.model for c in candidates]
    if None not in models:
        return
    borrowed = slowest([model for model in models if model is not None])
    if borrowed is not None:
        for c in candidates:
            c.model = c.model or borrowed


def _read_cache(
    index: Index, worker: Worker, c: Candidate, now_s: float, prompt_tokens: int
) -> None:
    """Fill in what is held; the age only where this request makes the engine evict."""
    c.held_tokens = index.held_blocks(worker.id) * index.block_size
    if c.cpu_capacity_tokens:
        c.cpu_held_tokens = index.held_blocks(worker.id, "cpu") * index.block_size
    # At most this much is needed; choose() computes it exactly.
    demand = prompt_tokens + OUTPUT_ALLOWANCE_TOKENS + c.queued_tokens
    if c.held_tokens + demand > EVICTION_FILL * c.capacity_tokens:
        c.lru_age_s = worker.mirror.oldest_age_s(now_s, partial(index.holds, worker.id, tier="gpu"))
        # The CPU tier's own order is not told; its oldest block is at least as old.
        c.cpu_age_s = c.lru_age_s


def _why(worker: Worker, now_s: float, exclude: Collection[str]) -> str:
    """Say whether a worker may be chosen, and why not."""
    if worker.draining:
        return "draining"
    if worker.id in exclude:
        return "excluded"
    if not worker.health.ready:
        return "not_ready"
    return "ok" if worker.health.may_route(now_s) else "ejected"


def _panic(candidates: list[Candidate]) -> None:
    """Health ejects nobody when nobody else would be left."""
    for c in candidates:
        if c.eligible:
            return
    for c in candidates:
        if c.why in ("not_ready", "ejected"):
            c.eligible, c.why = True, "panic"
