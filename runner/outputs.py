"""Builds what the engine tells the receivers of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.types import TokenOutput

if TYPE_CHECKING:
    from runner.sampling import Drawn
    from runner.sequence import Sequence
    from runner.types import EngineRequest, FinishReason


def token_output(sample: Sequence, drawn: Drawn, reason: FinishReason | None) -> TokenOutput:
    """Return the output for a token that was just drawn."""
    return TokenOutput(
        request_id=sample.request.id,
        index=sample.indexes[0],
        token_id=drawn.token_id,
        logprob=drawn.logprob,
        top_logprobs=drawn.top_logprobs,
        finish_reason=reason,
        cached_tokens=sample.cached_tokens or 0,
        error=None,
        hit_source=sample.hit_source,
    )


def end_output(
    request: EngineRequest, index: int, reason: FinishReason, cached: int, error: str | None
) -> TokenOutput:
    """Return the output for a sample that has ended without a token."""
    return TokenOutput(
        request_id=request.id,
        index=index,
        token_id=None,
        logprob=None,
        top_logprobs=None,
        finish_reason=reason,
        cached_tokens=cached,
        error=error,
    )


def failure_message(error: Exception) -> str:
    """Return what a client is told of a failure inside the engine."""
    return f"the engine failed: {type(error).__name__}: {error}"
