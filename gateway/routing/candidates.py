"""Read the state of a pool's workers into the plain numbers that ``choose()`` compares."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.routing.choose import RouteInput
from gateway.routing.cost import EVICTION_FILL, MEMORY_FILL, OUTPUT_ALLOWANCE_TOKENS, Candidate
from gateway.routing.sources import can_pull, find_sources, reaches
from prefix_index.blocks import usable_blocks
from prefix_index.view_hits import Hit, Match

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from random import Random

    from gateway.routing.others import OthersLoad
    from gateway.routing.plan import Plan
    from gateway.routing.pool import Pool, Worker
    from gateway.routing.slow_start import SlowStart
    from prefix_index.index import Index

# Older news of the other gateways' load than this sends them all to the same idle worker. Fresher
# than this, sampling costs 7 to 10 % of TTFT.
MAX_LOAD_AGE_S: Final = 0.150
# Share of the workers that are drawn at random while the load view is old.
DRAWN_SHARE: Final = 3
# A third of the time of ``copy.copy``; msgspec's stubs do not know it.
_copy: Final[Callable[[Candidate], Candidate]] = Candidate.__copy__  # type: ignore[attr-defined]
# Factor on the cost of a worker that is let back in since too many are out: it is tried when those
# that are well have queues, and not before.
READMITTED_BIAS: Final = 8.0
# Members of a body that bound its answer.
_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
# A worker that is out for one of these reasons is used when nobody else is left.
_PANIC: Final = ("not_ready", "ejected")


def route_input(
    plan: Plan, now_s: float, exclude: Collection[str] = (), rng: Random | None = None
) -> RouteInput:
    """Collect what a choice depends on. Reads only, except for lazily forgotten LRU entries.

    Args:
        plan: The request.
        now_s: Decision time (monotonic).
        exclude: Workers that may not be chosen, because an attempt failed there.
        rng: Draws the sample that is compared while the other gateways' load is old news; None =
            all are compared however old it is.
    """
    pool, hashes, prompt_tokens = plan.pool, plan.hashes, plan.num_tokens
    index = pool.index
    # Equal to the blocks in ``hashes`` where all of them are known.
    num_blocks = 0 if hashes is None else usable_blocks(prompt_tokens, pool.block_size)
    hits = _match(index, plan) if index is not None and hashes else {}
    if hits:
        hits = _in_whole_blocks(hits, pool)
    allowance = _allowance_tokens(plan)
    candidates = _candidates(plan, now_s, num_blocks, exclude, hits, allowance)
    request = RouteInput(now_s, prompt_tokens, candidates)
    request.allowance_tokens = allowance
    request.output_tokens = pool.output_length.mean_tokens
    if hits and pool.peer_pull != "off":
        _take_sources(request, pool, hits)
    credit = _credit(plan)
    if credit:
        for c in candidates:
            if c.mode != "text" and c.worker in credit:
                c.pending_tokens = _whole(credit[c.worker], pool, c.worker)
    others = pool.others
    if others is not None:
        _add_others(candidates, others)
        if rng is not None and others.age_s(now_s) > MAX_LOAD_AGE_S:
            num_drawn = max(1, len(candidates) // DRAWN_SHARE)
            request.draws = [rng.randrange(len(candidates)) for _ in range(num_drawn)]
    if plan.inbound.surface == "none":
        pass  # nothing to come home to: its load decides alone
    elif pool.is_strict or hashes is None or index is None:
        request.mode = "strict" if pool.is_strict else "text"
        request.ring = pool.ring.order(plan.key.ring_key)
    # A home matters only for blocks that can be cached, while nobody holds a quarter of the
    # prompt; choose() tests the latter again. A sample always has the home in it.
    elif num_blocks and (request.draws or not _is_held(candidates, hits, prompt_tokens)):
        request.home = plan.home
    return request


def _match(index: Index, plan: Plan) -> dict[str, Hit]:
    """Look up who holds what of a prompt, or remember it; the caller does not change it."""
    prompt, hashes = plan.prompt, plan.hashes or ()
    if prompt is None:
        return index.match(hashes)
    match = prompt.last_match
    if match is None or match.version != index.version:
        probes = [] if match is None else match.lengths(index.block_size)
        match = prompt.last_match = Match(index.match(hashes, probes), index.version)
    return match.hits


def _candidates(
    plan: Plan,
    now_s: float,
    num_blocks: int,
    exclude: Collection[str],
    hits: dict[str, Hit],
    allowance_tokens: int,
) -> list[Candidate]:
    """Copy each worker's row and fill in what depends on the request or on the time."""
    pool, hashes = plan.pool, plan.hashes or ()
    index, adapter = pool.index, plan.adapter
    block_size = pool.block_size
    new_tokens = num_blocks * block_size
    demand = plan.num_tokens + allowance_tokens
    all_pull = pool.peer_pull == "llm-d"
    # What workers of whom little was seen borrow from their pool included.
    models = pool.lender.models([worker.learner for worker in pool.workers.values()])
    candidates: list[Candidate] = []
    ejected: list[Candidate] = []
    for position, worker in enumerate(pool.workers.values()):
        books, health, worker_id = worker.books, worker.health, worker.id
        mode, capacity = worker.mode, worker.capacity_tokens
        # The pool is asked only about workers that have something wrong with them.
        if worker.num_diverged or worker.block_size is not None or worker.is_apart:
            mode = mode if pool.is_readable(worker) else "text"
        load = books.load
        if load.model is not models[position]:
            load.model = models[position]
        if load.mode != mode or load.capacity_tokens != capacity:
            load.mode, load.capacity_tokens = mode, capacity
        c = _copy(load)
        c.new_tokens = new_tokens
        hit = hits.get(worker_id)
        if hit is not None and mode != "text":
            c.hit_gpu, c.hit_cpu, c.hit_disk, c.hit_remote = hit
        if (worker.can_pull or all_pull) and can_pull(pool, worker):
            c.can_pull, c.pull_rates = True, worker.learner.pull_rates
        if capacity:
            # Blocks shared with requests in flight matter only where memory is short.
            needed = c.active_tokens + new_tokens + allowance_tokens
            if needed > MEMORY_FILL * capacity:
                c.new_tokens -= books.common_tokens(hashes)
            if index is not None and mode != "text":
                c.held_tokens = held = index.held_blocks(worker_id) * block_size
                if worker.cpu_capacity_tokens:
                    c.cpu_capacity_tokens = worker.cpu_capacity_tokens
                    c.cpu_held_tokens = index.held_blocks(worker_id, "cpu") * block_size
                # At most this much is needed; choose() computes it exactly.
                if held + demand + c.queued_tokens > EVICTION_FILL * capacity:
                    _read_ages(index, worker, c, now_s)
        if health.is_dear:
            c.bias = health.bias(now_s)
        if books.due_s < now_s:
            c.overdue_s = now_s - books.due_s
        if (
            exclude
            or worker.draining
            or health.is_suspect
            or worker.is_apart
            or adapter
            or worker.slow_start is not None
        ):
            c.why = _why(worker, now_s, exclude, adapter)
            if c.why == "ejected" and health.seems_alive(now_s):
                ejected.append(c)
            if c.why == "ok" and worker.slow_start is not None:
                c.why = _why_slow(worker.slow_start, c, plan.num_tokens, now_s)
            c.eligible = c.why == "ok"
        candidates.append(c)
    if ejected and 2 * len(ejected) > len(candidates):
        _readmit(ejected)
    _relent(candidates)
    return candidates


def _allowance_tokens(plan: Plan) -> int:
    """Return the tokens of KV to expect of an answer: no more than its request lets it have.

    A short document's hit must not be given up on a full worker for room that a one-word answer
    never takes.
    """
    body = plan.inbound.body
    for name in _LIMITS:
        limit = body.get(name)
        if type(limit) is int and limit >= 0:
            num_samples = body.get("n")
            if type(num_samples) is int and num_samples > 1:
                limit *= num_samples
            return min(limit, OUTPUT_ALLOWANCE_TOKENS)
    return OUTPUT_ALLOWANCE_TOKENS


def _in_whole_blocks(hits: dict[str, Hit], pool: Pool) -> dict[str, Hit]:
    """Cut the hits of workers with larger blocks than the pool's to whole blocks of theirs."""
    cut: dict[str, Hit] = {}
    for worker_id, hit in hits.items():
        worker = pool.workers.get(worker_id)
        block_size = None if worker is None else worker.block_size
        if block_size is not None and block_size != pool.block_size:
            cut[worker_id] = _cut(hit, block_size)
    return {**hits, **cut} if cut else hits


def _cut(hit: Hit, block_size: int) -> Hit:
    """Cut a hit to whole blocks; what is slowest to restore is given up first."""
    tokens = hit.total // block_size * block_size
    kept = []
    for held in hit:
        kept.append(min(held, tokens))
        tokens -= kept[-1]
    return Hit(*kept)


def _whole(tokens: int, pool: Pool, worker_id: str) -> int:
    """Cut tokens that a worker is computing to whole blocks, if its blocks are not the pool's."""
    block_size = pool.workers[worker_id].block_size
    if block_size is None or block_size == pool.block_size:
        return tokens
    return tokens // block_size * block_size


def _is_held(candidates: list[Candidate], hits: Mapping[str, Hit], prompt_tokens: int) -> bool:
    """Whether anybody holds a quarter of the prompt."""
    if hits:
        for c in candidates:
            if 4 * (c.hit_gpu + c.hit_cpu + c.hit_disk + c.hit_remote) >= prompt_tokens:
                return True
    return False


def _take_sources(request: RouteInput, pool: Pool, hits: Mapping[str, Hit]) -> None:
    """Let those pull that can, from holders whose KV has their format."""
    pulling = [c for c in request.candidates if c.can_pull]
    if not pulling:
        return
    request.sources, fingerprint = find_sources(pool, hits)
    for c in pulling:
        worker = pool.workers[c.worker]
        # Of a few sources with about as many tokens any may turn out the cheapest.
        is_barred = not all(reaches(worker, pool, source) for source in request.sources)
        if worker.fingerprint != fingerprint or is_barred:
            c.can_pull = False


def _add_others(candidates: list[Candidate], others: OthersLoad) -> None:
    """Add what other gateways have in flight; whose blocks are shared nobody tells."""
    for c in candidates:
        load = others.of(c.worker)
        if load is not None:
            c.in_flight += load.in_flight
            c.queued_tokens += load.queued_tokens
            c.queued_s += load.queued_s
            c.context_tokens += load.context_tokens
            c.active_tokens += load.context_tokens
            c.progress_at_s = max(c.progress_at_s, load.progress_at_s)
            c.restore_until_s = max(c.restore_until_s, load.restore_until_s)


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


def _read_ages(index: Index, worker: Worker, c: Candidate, now_s: float) -> None:
    """Fill in the age of what the engine would evict; only for whom it has to."""
    c.lru_age_s = worker.mirror.oldest_age_s(now_s, partial(index.holds, worker.id, tier="gpu"))
    # The CPU tier's own order is not told; its oldest block is at least as old.
    c.cpu_age_s = c.lru_age_s


def _why(worker: Worker, now_s: float, exclude: Collection[str], adapter: str) -> str:
    """Say whether a worker may be chosen, and why not."""
    if worker.draining:
        return "draining"
    if worker.id in exclude:
        return "excluded"
    if adapter and adapter not in worker.adapters:
        return "adapter"
    if not worker.health.ready:
        return "not_ready"
    if not worker.health.may_route(now_s):
        return "ejected"
    return "fingerprint" if worker.is_apart else "ok"


def _why_slow(start: SlowStart, c: Candidate, prompt_tokens: int, now_s: float) -> str:
    """Say whether a worker whose cache is being filled may take this request.

    What it holds half of already it may: that is what it was filled for.
    """
    if 2 * c.hit_tokens >= prompt_tokens or start.is_over(now_s) or start.lets_in(now_s):
        return "ok"
    return "warming"


def _readmit(ejected: list[Candidate]) -> None:
    """Let those back in that are out for failed requests only, dearer than any who are well.

    What fails at more than half of a pool's workers, while they say that they are well, is more
    likely the requests' fault, and the rest of the pool could not do all the work.
    """
    for c in ejected:
        c.eligible, c.why, c.bias = True, "panic", max(c.bias, READMITTED_BIAS)


def _relent(candidates: list[Candidate]) -> None:
    """Nobody is left out for a doubt when nobody else would be left.

    First those come back whose cache is being filled, then those that only differ from the pool's
    other workers, then those that seem ill.
    """
    for c in candidates:
        if c.eligible:
            return
    for whys, relented in (
        (("warming",), "only_warming"),
        (("fingerprint",), "apart"),
        (_PANIC, "panic"),
    ):
        doubtful = [c for c in candidates if c.why in whys]
        for c in doubtful:
            c.eligible, c.why = True, relented
        if doubtful:
            return
