"""What serving a prompt on one worker costs, in seconds: pure arithmetic, no I/O, no clock.

The cost is an estimated TTFT (queue, own prefill, steps shared with decodes, restore) plus what the
request does to others (decode interference, KV memory that is not there, evicted blocks). Every
term is reproduced against recorded decisions in ``tests/gateway/test_golden.py``.

Source: the routing simulation behind the design, section 5 ("ours*").
"""

from __future__ import annotations

from math import exp2
from typing import Final

from gateway.routing.numbers import (
    MAX_BATCHED_TOKENS,
    STORE,
    Candidate,
    CostModel,
    Estimate,
    Source,
)

__all__ = [
    "MAX_BATCHED_TOKENS",
    "STORE",
    "Candidate",
    "CostModel",
    "Estimate",
    "Source",
]

# Share of the own prefill that each running decode loses to it. Worth 6 points of goodput; x0.2 to
# x4 is flat.
DECODE_INTERFERENCE: Final = 0.05
# Weight of the own decode speed on a busy worker: a safety net, x0.3 to x3 is flat.
OWN_DECODE: Final = 0.1
# Fill above which a request will wait for KV memory. Weight 1: x10 makes it 5 times worse.
MEMORY_FILL: Final = 0.98
# Fill above which the engine evicts cached blocks to make room.
EVICTION_FILL: Final = 0.97
# Tokens of KV that a completion is assumed to take, where its request allows so many.
OUTPUT_ALLOWANCE_TOKENS: Final = 200
# An evicted block is less likely to be asked for again the older it is. Flat from 60 to 1500 s.
HALF_LIFE_S: Final = 300.0
# Share of a restore that still counts when it overlaps with the queue.
RESTORE_OVERLAP: Final = 0.3


def prefill_s(model: CostModel, uncached_tokens: int, prompt_tokens: int) -> float:
    """Return ``P``: attention makes the tokens at the end of a long prompt dearer."""
    linear = model.token_s * uncached_tokens
    depth = prompt_tokens - uncached_tokens / 2
    return linear + model.attention_s * uncached_tokens * depth


def queue_s(c: Candidate, now_s: float) -> float:
    """Return ``W``: routed work without a first token, minus the progress since the last one."""
    queued = c.queued_s
    if not queued:
        return 0.0
    progress = now_s - c.progress_at_s
    return queued - min(progress, queued) if progress > 0.0 else queued


def work_s(
    c: Candidate,
    model: CostModel,
    uncached_tokens: int,
    prompt_tokens: int,
    output_tokens: float,
) -> tuple[float, float, float]:
    """Return ``P, I, G``: the own prefill, what decodes add to it, and what it does to them.

    Each step of the queued prefills also carries the running decodes; the prefill delays these,
    and they slow the own decode. In one function since all three are needed for every candidate.
    """
    token_s = model.token_s
    n = c.in_flight
    own = token_s * uncached_tokens + model.attention_s * uncached_tokens * (
        prompt_tokens - uncached_tokens / 2
    )
    step = model.context_s * c.context_tokens + token_s * n
    # Whole steps, rounded up.
    steps = -(-(c.queued_tokens + uncached_tokens) // c.max_batched_tokens)
    own_decode = OWN_DECODE * output_tokens * step
    return own, steps * (model.step_s + step), DECODE_INTERFERENCE * n * own + own_decode


def restore_link_s(model: CostModel, c: Candidate) -> float:
    """Return the seconds that bringing back the lower-tier part of the hit takes on the link."""
    return (
        c.hit_cpu / model.restore_cpu_tokens_per_s
        + c.hit_disk / model.restore_disk_tokens_per_s
        + c.hit_remote / model.restore_remote_tokens_per_s
    )


def restore_s(c: Candidate, link_s: float, wait_s: float, now_s: float) -> float:
    """Return ``R`` of who restores: link and its backlog, less where the queue is longer."""
    total_s = link_s + max(0.0, c.restore_until_s - now_s)
    return total_s * RESTORE_OVERLAP if total_s < wait_s else total_s


def evicted_tokens(
    c: Candidate, uncached_tokens: int, allowance_tokens: int = OUTPUT_ALLOWANCE_TOKENS
) -> float:
    """Return how many cached tokens must leave the device for this request; may be negative."""
    demand = uncached_tokens + allowance_tokens
    free = EVICTION_FILL * c.capacity_tokens - c.held_tokens - c.queued_tokens
    return demand - free if free > 0 else demand


def eviction_s(
    model: CostModel,
    c: Candidate,
    uncached_tokens: int,
    allowance_tokens: int = OUTPUT_ALLOWANCE_TOKENS,
) -> float:
    """Return ``E``: recompute (or restore) of what is evicted, fading with its age."""
    need = evicted_tokens(c, uncached_tokens, allowance_tokens)
    if need <= 0:
        return 0.0
    fade = exp2(-c.lru_age_s / HALF_LIFE_S)
    if not c.cpu_capacity_tokens:
        return need * model.token_s * fade
    caught_s = need / model.restore_cpu_tokens_per_s * fade
    over = need - (c.cpu_capacity_tokens - c.cpu_held_tokens)
    if over <= 0:
        return caught_s
    return caught_s + over * model.token_s * exp2(-c.cpu_age_s / HALF_LIFE_S)


def estimate_s(
    c: Candidate,
    model: CostModel,
    now_s: float,
    prompt_tokens: int,
    hit_tokens: int,
    output_tokens: float,
    allowance_tokens: int = OUTPUT_ALLOWANCE_TOKENS,
) -> Estimate:
    """Price one candidate in seconds.

    Args:
        c: The candidate.
        model: Its constants.
        now_s: Decision time.
        prompt_tokens: Prompt length (``L``).
        hit_tokens: Tokens counted as held there (``d``), pending credit included.
        output_tokens: Mean completion length of the pool (``E_out``).
        allowance_tokens: Tokens of KV that the completion will need.
    """
    # At least one token is always computed: the engine needs its logits.
    uncached = prompt_tokens - hit_tokens if prompt_tokens > hit_tokens else 1
    own, shared, others = work_s(c, model, uncached, prompt_tokens, output_tokens)
    # What is 0 for most candidates is not called for: a call costs as much as a term.
    wait = queue_s(c, now_s) if c.queued_s else 0.0
    link = restore = memory = eviction = 0.0
    lower = c.hit_cpu + c.hit_disk + c.hit_remote
    if lower:
        link = restore_link_s(model, c)
        restore = restore_s(c, link, wait, now_s)
    capacity = c.capacity_tokens
    if capacity:
        demand = c.active_tokens + c.new_tokens + allowance_tokens
        if demand > MEMORY_FILL * capacity:
            memory = model.token_s * (demand - MEMORY_FILL * capacity)
        filled = c.held_tokens + c.queued_tokens + uncached + allowance_tokens
        if filled > EVICTION_FILL * capacity:
            eviction = eviction_s(model, c, uncached, allowance_tokens)
    cost = wait + own + shared + restore + others + memory + eviction
    # By position, in the order of the fields: names would be a third of the time spent here.
    return Estimate(
        c.worker, hit_tokens, uncached, cost * c.bias + c.overdue_s,
        wait, own, shared, restore, others, memory, eviction, link,
        "own" if lower or c.hit_gpu else "recompute",
    )  # fmt: skip


def token_requests(c: Candidate, prompt_tokens: int, hit_tokens: int) -> float:
    """Return the cost of one candidate without any constant: ``(u + Qtok) * (n + 1)``.

    Source: LMetric on an event-fed index and queued tokens, the best parameter-free rule found.
    """
    uncached = prompt_tokens - hit_tokens if prompt_tokens > hit_tokens else 1
    return float((uncached + c.queued_tokens) * (c.in_flight + 1)) * c.bias


def estimate_token_requests(c: Candidate, prompt_tokens: int, hit_tokens: int) -> Estimate:
    """Price one candidate without any constant; see ``token_requests``."""
    uncached = prompt_tokens - hit_tokens if prompt_tokens > hit_tokens else 1
    cost = token_requests(c, prompt_tokens, hit_tokens)
    estimate = Estimate(c.worker, hit_tokens, uncached, cost)
    if c.hit_tokens:
        estimate.source = "own"
    return estimate
