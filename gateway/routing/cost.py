"""What serving a prompt on one worker costs, in seconds: pure arithmetic, no I/O, no clock.

The cost is an estimated TTFT (queue, own prefill, steps shared with decodes, restore) plus what the
request does to others (decode interference, KV memory that is not there, evicted blocks). Every
term is reproduced against recorded decisions in ``tests/gateway/test_golden.py``.

Source: the routing simulation behind the design, section 5 ("ours*").
"""

from __future__ import annotations

from math import exp2

import msgspec

# Share of the own prefill that each running decode loses to it. Worth 6 points of goodput; x0.2 to
# x4 is flat.
DECODE_INTERFERENCE = 0.05
# Weight of the own decode speed on a busy worker: a safety net, x0.3 to x3 is flat.
OWN_DECODE = 0.1
# Fill above which a request will wait for KV memory. Weight 1: x10 makes it 5 times worse.
MEMORY_FILL = 0.98
# Fill above which the engine evicts cached blocks to make room.
EVICTION_FILL = 0.97
# Tokens of KV that a completion is assumed to take, where its request allows so many.
OUTPUT_ALLOWANCE_TOKENS = 200
# An evicted block is less likely to be asked for again the older it is. Flat from 60 to 1500 s.
HALF_LIFE_S = 300.0
# Share of a restore that still counts when it overlaps with the queue.
RESTORE_OVERLAP = 0.3
# vLLM's token budget of one step on large GPUs; engines do not export it.
MAX_BATCHED_TOKENS = 8192
# Id of the shared store among the sources of a pull; no worker id starts so.
STORE = "@store"


class CostModel(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The constants of one worker, learned online or configured.

    Attributes:
        token_s: Seconds of prefill per prompt token (``c``).
        attention_s: Seconds of prefill per (token x context token) (``a``).
        step_s: Fixed seconds of one engine step (``o``).
        context_s: Seconds per context token and decode step (``v``).
        restore_cpu_tokens_per_s: Restore rate from the CPU tier.
        restore_disk_tokens_per_s: Restore rate from the disk tier.
        restore_remote_tokens_per_s: Restore rate from a remote tier.
    """

    token_s: float
    attention_s: float
    step_s: float
    context_s: float
    # Rates start low: an over-estimated link costs more than an unused one. A 135M model's KV
    # (46 KB a token) at 1 GB/s, an SSD at a quarter of it, a network store at a tenth.
    restore_cpu_tokens_per_s: float = 20_000.0
    restore_disk_tokens_per_s: float = 5_000.0
    restore_remote_tokens_per_s: float = 2_000.0


class Candidate(msgspec.Struct, gc=False, omit_defaults=True):
    """One worker as plain numbers: everything that the choice reads about it.

    Times are seconds on the clock of ``RouteInput.now_s``; everything else is tokens or counts.

    Attributes:
        worker: Worker id.
        eligible: Whether it may be chosen; ``why`` says why (not).
        why: Bounded: ok, panic, excluded, draining, ejected, not_ready, adapter, fingerprint,
            apart, warming (its cache is being filled, and this is not of its share), only_warming.
        mode: How its hits are known: exact (events), approximate (own routings), text (not at all).
        hit_gpu: Matched prefix tokens held on the device, and so on per tier.
        pending_tokens: Leading tokens that a cold sibling in flight there is computing.
        in_flight: Requests routed there and not finished (``n``).
        queued_tokens: Uncached prompt tokens routed there without a first token (``Qtok``).
        queued_s: Their prefill seconds as estimated when routed (``Qsec``).
        context_tokens: Prompt tokens + allowance of the in-flight requests (``ctx``).
        progress_at_s: Last first token, or the last routing that found no queue (``t1``).
        active_tokens: KV demand of the in-flight requests, shared blocks once (``act``).
        new_tokens: Full-block tokens of this prompt that are not among them (``new``); all of
            them where the memory is large enough anyway.
        restore_until_s: When the restores booked there end.
        max_batched_tokens: Token budget of one engine step (``T``).
        capacity_tokens: KV tokens on the device; 0 = unknown, no memory and eviction terms.
        held_tokens: Tokens of cached or active blocks on the device.
        lru_age_s: Age of the block that would be evicted next; read only when one must be.
        cpu_capacity_tokens: Size of the CPU tier; 0 = there is none.
        cpu_held_tokens: Tokens in it.
        cpu_age_s: Age of the block it would drop next.
        bias: Health factor on the cost; 1 = healthy, never less.
        overdue_s: How late the oldest first token there is against its prediction.
        model: Cost constants; None = nothing is known about this worker.
        can_pull: Whether it can fetch KV from the request's ``sources``.
        pull_rates: Measured tokens/s from each source; ``""`` is the mean over them. Shared with
            whoever measures, hence never changed in place.
        in_busy_until_s: When the pulls booked on its network link end.
    """

    worker: str
    eligible: bool = True
    why: str = "ok"
    mode: str = "exact"
    hit_gpu: int = 0
    hit_cpu: int = 0
    hit_disk: int = 0
    hit_remote: int = 0
    pending_tokens: int = 0
    in_flight: int = 0
    queued_tokens: int = 0
    queued_s: float = 0.0
    context_tokens: int = 0
    progress_at_s: float = 0.0
    active_tokens: int = 0
    new_tokens: int = 0
    restore_until_s: float = 0.0
    max_batched_tokens: int = MAX_BATCHED_TOKENS
    capacity_tokens: int = 0
    held_tokens: int = 0
    lru_age_s: float = 0.0
    cpu_capacity_tokens: int = 0
    cpu_held_tokens: int = 0
    cpu_age_s: float = 0.0
    bias: float = 1.0
    overdue_s: float = 0.0
    model: CostModel | None = None
    can_pull: bool = False
    pull_rates: dict[str, float] = {}
    in_busy_until_s: float = 0.0

    @property
    def hit_tokens(self) -> int:
        """Matched prefix tokens in any tier."""
        return self.hit_gpu + self.hit_cpu + self.hit_disk + self.hit_remote


class Source(msgspec.Struct, gc=False):
    """Who could hand over the KV of the leading tokens of a prompt.

    Attributes:
        worker: Worker id, or ``STORE``.
        tokens: Leading tokens it has where it can hand them over.
        busy_until_s: When the pulls booked on its network link end.
    """

    worker: str
    tokens: int
    busy_until_s: float = 0.0


class Estimate(msgspec.Struct, gc=False):
    """What one candidate would cost; the letters are the design's.

    In the unit ``seconds`` all terms are seconds. In the unit ``token_requests`` (nothing
    calibrated) the terms are 0 and only ``cost`` says something.

    Attributes:
        worker: Worker id.
        hit_tokens: Prompt tokens counted as held (matched, pending in a sibling, or pulled).
        uncached_tokens: Prompt tokens to prefill (``u``).
        queue_s: ``W``, wait for the work routed before.
        prefill_s: ``P``, own prefill.
        interleave_s: ``I``, decode steps that share the prefill's steps.
        restore_s: ``R``, restore or pull as far as it does not overlap with the queue.
        interference_s: ``G``, slowdown of running decodes and of the own decode.
        memory_s: ``M``, KV memory that is not there.
        eviction_s: ``E``, blocks evicted that others would reuse.
        cost: What is compared: the sum, times the health bias, plus the lateness.
        restore_link_s: Seconds that the restore keeps the worker's link busy.
        source: Where the tokens that are not on the device come from: ``own`` (its own tiers),
            ``recompute``, ``peer:ID``, ``store``.
        pull_tokens: Tokens fetched from a peer or the store.
        pull_link_s: Seconds that this keeps both network links busy.
    """

    worker: str
    hit_tokens: int
    uncached_tokens: int
    cost: float
    queue_s: float = 0.0
    prefill_s: float = 0.0
    interleave_s: float = 0.0
    restore_s: float = 0.0
    interference_s: float = 0.0
    memory_s: float = 0.0
    eviction_s: float = 0.0
    restore_link_s: float = 0.0
    source: str = "recompute"
    pull_tokens: int = 0
    pull_link_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Predicted TTFT: the terms that this request itself waits for."""
        return self.queue_s + self.prefill_s + self.interleave_s + self.restore_s


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
