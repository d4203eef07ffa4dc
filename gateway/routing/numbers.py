"""What the choice reads and returns about one worker, as plain numbers.

Apart from ``gateway/routing/cost.py`` because that is compiled in compiled wheels, and classes of
msgspec cannot be.
"""

from __future__ import annotations

import msgspec

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
