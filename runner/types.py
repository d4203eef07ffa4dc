"""What crosses the engine's border: requests in, tokens and figures out.

Plain dataclasses without torch, so that the HTTP side can build and read them cheaply. Whoever
makes one may fill it; once it is handed over, the receiver owns it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.tiers.types import PeerSource, TierStats

FinishReason = Literal["stop", "length", "abort", "error"]

HitSource = Literal["gpu", "cpu", "disk", "remote", "peer"]
"""Where a prompt's KV was: the pool, or the tier it was loaded from."""

MissReason = Literal["cold", "evicted", "below_block", "gated", "failed"]
"""Why prompt tokens had to be computed: never seen; held once and given up; less than a block, or
the last token; held by a tier, but recomputing was cheaper or a cap forbade it; a load failed."""

# OpenAI's upper bound for `n` is 128; a CPU pool shares its rows among all samples, so a prompt
# may take at most this many of them.
MAX_SAMPLES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        max_tokens: Most completion tokens of each sample, at least 1.
        temperature: 0 is greedy.
        top_p: Nucleus mass in (0, 1].
        top_k: Keep the k likeliest tokens; 0 keeps all.
        seed: Makes the samples reproducible whatever shares the batch.
        n: Samples of the same prompt, 1 to ``MAX_SAMPLES``.
        logprobs: None for none, else how many likeliest alternatives come with each token.
        ignore_eos: Go on after an end-of-sequence token.
        stop_token_ids: More tokens that end a sample.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values no sampler can follow.

        Raises:
            ValueError: With the name, the value and the allowed range.
        """
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, got {self.top_k}")
        if not 1 <= self.n <= MAX_SAMPLES:
            raise ValueError(f"n must be between 1 and {MAX_SAMPLES}, got {self.n}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError(f"logprobs must be 0 or more, got {self.logprobs}")


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token, or the end of one sample.

    Attributes:
        request_id: As submitted.
        index: Which sample, 0 to n-1.
        token_id: The token; None when a sample ends without one (abort, error).
        logprob: Natural logarithm of the token's probability before temperature and cuts; None
            unless the request asked for log probabilities.
        top_logprobs: Likeliest (token, logprob) pairs, best first; None unless asked for.
        finish_reason: Set on the last output of a sample. With "stop" ``token_id`` is the token
            that ended it, which is no part of the text.
        cached_tokens: Prompt tokens whose KV came from the prefix cache (whole blocks).
        error: Why, when the reason is "error".
        hit_source: The lowest tier that KV came from; None for none of it.
    """

    request_id: str
    index: int
    token_id: int | None
    logprob: float | None
    top_logprobs: list[tuple[int, float]] | None
    finish_reason: FinishReason | None
    cached_tokens: int
    error: str | None
    hit_source: HitSource | None = None


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to complete.

    Attributes:
        id: Unique among the requests in the engine.
        prompt_ids: Prompt tokens, at least one.
        params: How to sample.
        sink: Gets every output, called from the engine thread: it must return at once.
        salt: Isolation key; requests with different salts never share KV.
        adapter: LoRA adapter to run with; empty for the base model. KV is not shared across.
        max_offload_tokens: Most leading tokens whose KV may go to lower tiers; None for no cap.
        max_load_tokens: Most leading tokens whose KV may come from there; None for no cap.
        source: Another runner that is said to hold the prefix.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    sink: Callable[[TokenOutput], None]
    salt: str = ""
    adapter: str = ""
    max_offload_tokens: int | None = None
    max_load_tokens: int | None = None
    source: PeerSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of one engine.

    Attributes:
        block_size: Tokens of one KV block.
        pool_tokens: Capacity of the KV pool, rounded down to whole blocks.
        max_batched_tokens: Most tokens one step computes: bounds the time between two tokens of
            a running sample while prompts are prefilled.
        max_seqs: Most samples running at once.
        max_model_len: Most tokens of prompt and completion; None takes the model's context.
        debug_checks: Verify every pool invariant after each step (slow).
    """

    block_size: int = 16
    pool_tokens: int = 65_536
    max_batched_tokens: int = 512
    max_seqs: int = 64
    max_model_len: int | None = None
    debug_checks: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of an engine at one moment; the ``_total`` ones only grow.

    Attributes:
        num_running: Samples holding blocks.
        num_waiting: Requests not yet admitted.
        pool_blocks: Blocks of the pool = free + cached + active + loading + pinned.
        free_blocks: Blocks without content.
        cached_blocks: Blocks kept for reuse by nobody's request.
        active_blocks: Blocks in use by running requests.
        block_size: Tokens of a block.
        block_bytes: Bytes of a block, all layers, keys and values.
        hit_tokens_total: Prompt tokens taken from the prefix cache.
        query_tokens_total: Prompt tokens looked up in it.
        evictions_total: Cached blocks given up for room.
        preemptions_total: Running requests sent back to waiting for room.
        prompt_tokens_total: Prompt tokens of admitted requests.
        generation_tokens_total: Tokens sampled.
        num_loading: Requests whose KV is on its way from a lower tier.
        loading_blocks: Blocks that a load may be writing.
        pinned_blocks: Blocks nobody references that are read for a store or a peer.
        stall_s_total: Seconds with requests and nothing to compute, since all of them waited for
            KV, and seconds within steps whose layers waited for theirs.
        hit_tokens: ``hit_tokens_total`` by where they were.
        miss_tokens: The other queried tokens by reason.
        orphans_total: Leases on pool blocks freed at their deadline.
        tiers: Figures of the lower tiers.
    """

    num_running: int
    num_waiting: int
    pool_blocks: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    block_size: int
    block_bytes: int
    hit_tokens_total: int
    query_tokens_total: int
    evictions_total: int
    preemptions_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    num_loading: int = 0
    loading_blocks: int = 0
    pinned_blocks: int = 0
    stall_s_total: float = 0.0
    hit_tokens: dict[HitSource, int] = field(default_factory=dict)
    miss_tokens: dict[MissReason, int] = field(default_factory=dict)
    orphans_total: int = 0
    tiers: tuple[TierStats, ...] = ()
