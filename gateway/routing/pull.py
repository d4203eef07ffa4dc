"""What a candidate saves by fetching KV from a peer or the shared store: arithmetic, no I/O.

A pull runs while the request waits in the queue, so only what outlasts the queue is waited for:
``max(W, latency + tokens/rate + link backlogs) + prefill(what is still missing)``. It is priced
before the choice: the same transfer decided after routing gains a third of it.

Source: the simulation of moving KV behind the design, section 5 ("moving KV is part of the price").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.routing.cost import STORE, Estimate, prefill_s, work_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.routing.cost import Candidate, CostModel, Source

# Shorter pulls are not worth asking for: the floor costs nothing and removes a quarter of them.
MIN_PULL_TOKENS = 2048
# Fixed seconds of a pull: look-up, connection, first bytes. 100 ms would cost a hundredth of TTFT.
PULL_LATENCY_S = 0.020
# What a pull is believed to bring per token computed, until one was measured. For an 8B model on an
# H100 that is 46k tokens/s, half of a 100 GbE link: 2 times too low costs a hundredth of TTFT, 4
# times too high a quarter on a slow link. Much lower, and nobody would ever measure one.
PULL_START = 1.5


def pull_rate(c: Candidate, model: CostModel, source: str) -> float:
    """Return the tokens/s at which a candidate is believed to fetch from a source."""
    rates = c.pull_rates
    if rates:
        rate = rates.get(source) or rates.get("")
        if rate:
            return rate
    return PULL_START / model.token_s


def source_name(source: str) -> str:
    """Return how a source is written in decisions."""
    return "store" if source == STORE else f"peer:{source}"


def source_id(name: str) -> str:
    """Return whose name it is: a worker id, or ``STORE``."""
    return STORE if name == "store" else name.removeprefix("peer:")


def with_sources(
    own: Estimate,
    c: Candidate,
    model: CostModel,
    now_s: float,
    prompt_tokens: int,
    output_tokens: float,
    sources: Sequence[Source],
) -> Estimate:
    """Return the quickest way for a candidate to get what it lacks.

    Args:
        own: What it costs with its own tiers alone (``estimate_s``).
        c: The candidate; it must be able to pull.
        model: Its constants.
        now_s: Decision time.
        prompt_tokens: Prompt length (``L``).
        output_tokens: Mean completion length of the pool.
        sources: Who could hand over more.
    """
    wait_s = own.queue_s
    quickest_s = wait_s + own.restore_s + own.prefill_s
    best: Source | None = None
    tokens, pull_s, link_s = own.hit_tokens, 0.0, 0.0
    is_recomputed = False
    # All of its own restore, backlog included; both transfers run side by side.
    restore_s = 0.0
    if own.restore_link_s:
        restore_s = own.restore_link_s + max(0.0, c.restore_until_s - now_s)
        if own.hit_tokens == c.hit_tokens:
            total_s = wait_s + prefill_s(model, max(1, prompt_tokens - c.hit_gpu), prompt_tokens)
            if total_s < quickest_s:
                quickest_s, is_recomputed, tokens = total_s, True, c.hit_gpu
    for source in sources:
        reached = min(source.tokens, prompt_tokens - 1)
        pulled = reached - own.hit_tokens
        if pulled < MIN_PULL_TOKENS or source.worker == c.worker:
            continue
        this_link_s = pulled / pull_rate(c, model, source.worker)
        this_pull_s = PULL_LATENCY_S + this_link_s
        busy_until_s = max(source.busy_until_s, c.in_busy_until_s)
        if busy_until_s > now_s:
            this_pull_s += busy_until_s - now_s
        total_s = max(wait_s, this_pull_s, restore_s)
        total_s += prefill_s(model, prompt_tokens - reached, prompt_tokens)
        if total_s < quickest_s:
            quickest_s, best, tokens = total_s, source, reached
            pull_s, link_s = this_pull_s, this_link_s
    if best is not None:
        late_s = max(0.0, pull_s - wait_s, restore_s - wait_s)
        estimate = _priced(own, c, model, prompt_tokens, output_tokens, tokens, late_s)
        estimate.source = source_name(best.worker)
        estimate.pull_tokens, estimate.pull_link_s = tokens - own.hit_tokens, link_s
        return estimate
    if is_recomputed:
        estimate = _priced(own, c, model, prompt_tokens, output_tokens, tokens, 0.0)
        estimate.source, estimate.restore_link_s = "recompute", 0.0
        return estimate
    return own


def _priced(
    own: Estimate,
    c: Candidate,
    model: CostModel,
    prompt_tokens: int,
    output_tokens: float,
    hit_tokens: int,
    restore_s: float,
) -> Estimate:
    """Price a candidate with other hit tokens; memory and eviction stay: blocks need room."""
    uncached = max(1, prompt_tokens - hit_tokens)
    own_s, shared_s, others_s = work_s(c, model, uncached, prompt_tokens, output_tokens)
    cost = own.queue_s + own_s + shared_s + restore_s + others_s + own.memory_s + own.eviction_s
    return Estimate(
        c.worker, hit_tokens, uncached, cost * c.bias + c.overdue_s,
        own.queue_s, own_s, shared_s, restore_s, others_s, own.memory_s, own.eviction_s,
        own.restore_link_s,
    )  # fmt: skip


def least_s(
    prefill_s: Callable[[int], float],
    hit_tokens: int,
    sources: Sequence[Source],
    rate: float,
) -> tuple[float, float]:
    """Bound what it takes to serve a prompt with these own hits, whoever pulls the rest.

    Args:
        prefill_s: Least seconds of prefill with so many hit tokens.
        hit_tokens: Tokens held.
        sources: Who could hand over more.
        rate: No source is believed to be faster, in tokens/s.

    Returns:
        Least seconds of prefill with what may come before it, and least seconds of prefill alone.
    """
    least = alone = prefill_s(hit_tokens)
    for source in sources:
        pulled = source.tokens - hit_tokens
        if pulled >= MIN_PULL_TOKENS:
            computed = prefill_s(source.tokens)
            alone = min(alone, computed)
            least = min(least, computed + PULL_LATENCY_S + (pulled - 1) / rate)
    return least, alone
