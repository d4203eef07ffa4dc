"""How long the engine's steps take, learned from every step: what recomputing a prefix costs."""

from __future__ import annotations

from runner.tiers.fit import RelativeFit

# 20,000 tokens a second: quicker than any CPU, so that the price of recomputing is not overrated
# before the first step has been seen. Replaced by what the first step shows.
START_TOKEN_S = 50e-6

# A step costs as much as 64 more tokens (weights read, kernels launched): 20 for a small model on
# a CPU, some 200 for 8B on a GPU.
_STEP_TOKENS = 64.0

# Attention to 10,000 tokens costs as much as the rest of a token's work. It is 30,000 for 8B and
# 1,000 for a model of 135M, whose deep prefixes are underrated until one was computed.
_ATTENDED_TOKENS = 1e-4

# A decoded row costs at most as much again as a prefilled token, until measured.
_DECODE_TOKENS = 1.0

# In steps: minutes of prefill on a CPU, seconds on a GPU.
_MEMORY = 64.0

_PREFILL, _DECODE = 0, 1


class StepModel:
    """``seconds = a + b * tokens + c * sum(q_len * kv_len) + d * decode_rows``, all >= 0.

    Owned by the engine thread.

    Args:
        start_token_s: Seconds per prefilled token, believed until the first step.
    """

    def __init__(self, start_token_s: float = START_TOKEN_S) -> None:
        shape = (_STEP_TOKENS, 1.0, _ATTENDED_TOKENS, _DECODE_TOKENS)
        # Decode steps outnumber prefills a hundredfold and say nothing about them.
        self._fit = RelativeFit([start_token_s * part for part in shape], memory=_MEMORY, groups=2)

    @property
    def count(self) -> int:
        """Steps seen."""
        return self._fit.count

    def observe(
        self, num_tokens: int, attended_tokens: int, decode_rows: int, elapsed_s: float
    ) -> None:
        """Learn from one step.

        Args:
            num_tokens: Tokens computed, decoded ones included.
            attended_tokens: Sum over the sequences of q_len * kv_len, kv_len after the step.
            decode_rows: How many of the tokens were decoded.
            elapsed_s: Wall time of the step.
        """
        if num_tokens < 1:
            return
        group = _PREFILL if num_tokens > decode_rows else _DECODE
        self._fit.observe(
            (1.0, float(num_tokens), float(attended_tokens), float(decode_rows)), elapsed_s, group
        )

    def expect_s(self, num_tokens: int, attended_tokens: int, decode_rows: int) -> float:
        """Return what one such step should take."""
        return self._fit.expect_s(
            (1.0, float(num_tokens), float(attended_tokens), float(decode_rows))
        )

    def recompute_s(self, start_tokens: int, num_tokens: int, chunk_tokens: int) -> float:
        """Return what prefilling costs that a restore would save.

        Whole chunks save a step each; a part of one shares its step with the tokens after it.

        Args:
            start_tokens: Tokens before them, whose KV is there.
            num_tokens: Tokens to compute.
            chunk_tokens: Most tokens of a step.
        """
        if num_tokens < 1:
            return 0.0
        chunks = num_tokens // max(1, chunk_tokens)
        # Each chunk's queries are counted against all keys up to the chunk's end.
        per_query = start_tokens + (num_tokens + min(num_tokens, chunk_tokens)) / 2
        per_step, per_token, per_attended, _ = self._fit.solved()
        return per_step * chunks + num_tokens * (per_token + per_attended * per_query)
