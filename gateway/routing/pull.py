"""What a candidate saves by fetching KV from a peer or the shared store: arithmetic, no I/O.

A pull runs while the request waits in the queue, so only what outlasts the queue is waited for:
``max(W, latency + tokens/rate + link backlogs) + prefill(what is still missing)``. It is priced
before the choice: the same transfer decided after routing gains a third of it.

Source: the simulation of moving KV behind the design, section 5 ("moving KV is part of the price").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.routing.cost import STORE, Estimate, work_s

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
    """Return the cheapest way for a candidate to get what it lacks.

    Args:
        own: What it costs with its own tiers alone (``estimate_s``).
        c: The candidate; it must be able to pull.
        model: Its constants.
        now_s: Decision time.
        prompt_tokens: Prompt length (``L``).
        output_tokens: Mean completion length of the pool.
        sources: Who could hand over more.
    """
    best = own
    if own.restore_s > 0.0 and own.hit_tokens == c.hit_tokens:
        other = _priced(own, c, model, prompt_tokens, output_tokens, c.hit_gpu, 0.0)
        if other.cost < best.cost:
            best = other
            best.source, best.restore_link_s = "recompute", 0.0
    # All of its own restore, backlog included; both transfers run side by side.
    own_restore_s = 0.0
    if own.restore_link_s:
        own_restore_s = own.restore_link_s + max(0.0, c.restore_until_s - now_s)
    for source in sources:
        tokens = min(source.tokens, prompt_tokens - 1)
        pulled = tokens - own.hit_tokens
        if pulled < MIN_PULL_TOKENS or source.worker == c.worker:
            continue
        link_s = pulled / pull_rate(c, model, source.worker)
        backlog_s = max(source.busy_until_s, c.in_busy_until_s) - now_s
        pull_s = PULL_LATENCY_S + link_s + (backlog_s if backlog_s > 0.0 else 0.0)
        late_s = max(pull_s, own_restore_s) - own.queue_s
        other = _priced(
            own, c, model, prompt_tokens, output_tokens, tokens, late_s if late_s > 0.0 else 0.0
        )
        if other.cost < best.cost:
            best = other
            best.source = source_name(source.worker)
            best.pull_tokens, best.pull_link_s = pulled, link_s
    return best


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
    prefill, shared, others = work_s(c, model, uncached, prompt_tokens, output_tokens)
    cost = own.queue_s + prefill + shared + restore_s + others + own.memory_s + own.eviction_s
    return Estimate(
        c.worker, hit_tokens, uncached, cost * c.bias + c.overdue_s,
        own.queue_s, prefill, shared, restore_s, others, own.memory_s, own.eviction_s,
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
