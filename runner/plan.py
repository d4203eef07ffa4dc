"""What one step computes, and the bounds that hold for all steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runner.batch import Chunk

if TYPE_CHECKING:
    from runner.model import Model
    from runner.sequence import Sequence
    from runner.types import EngineConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds the scheduler keeps; see ``EngineConfig``.

    Attributes:
        max_batched_tokens: Most tokens per step.
        max_seqs: Most samples running.
        max_model_len: Most tokens of prompt and completion.
        vocab_size: Token ids are below.
    """

    max_batched_tokens: int
    max_seqs: int
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens of one sequence to compute in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def chunk(self) -> Chunk:
        """The same for the model; logits are wanted if no token is left after it."""
        sequence = self.sequence
        start, end = sequence.num_computed, sequence.num_computed + self.num_tokens
        samples = end == len(sequence.tokens)
        return Chunk(
            sequence.tokens[start:end],
            start,
            sequence.blocks,
            samples,
            sequence,
            sequence.request.adapter,
        )


@dataclass(slots=True)
class Plan:
    """One step.

    Attributes:
        work: In any order, one entry per sequence.
        copies: (source, target) blocks to copy, in this order, before anything is computed.
    """

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


def resolve_limits(model: Model, config: EngineConfig, num_blocks: int) -> Limits:
    """Return the bounds that a configuration means for a model and a pool.

    Raises:
        ValueError: If the sizes contradict each other or the model.
    """
    context = model.config.context_tokens
    max_model_len = context if config.max_model_len is None else config.max_model_len
    if not 1 < max_model_len <= context:
        raise ValueError(f"max_model_len {max_model_len}: must be 2 to {context}, the context")
    if num_blocks < 2:
        raise ValueError(f"pool_tokens {config.pool_tokens}: needs two blocks at least")
    if config.max_batched_tokens < max(config.block_size, config.max_seqs):
        raise ValueError(
            f"max_batched_tokens {config.max_batched_tokens}: must be at least the block size "
            f"({config.block_size}) and max_seqs ({config.max_seqs})"
        )
    return Limits(
        max_batched_tokens=config.max_batched_tokens,
        max_seqs=config.max_seqs,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
    )
