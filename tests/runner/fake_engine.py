"""An engine whose faults can be scripted, for what a real one cannot be made to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runner.types import EngineRequest, EngineStats, FinishReason, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class ScriptedEngine:
    """Says ``tokens`` for every sample when a test calls ``say``; submits and aborts are noted."""

    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    refusal: Exception | None = None
    failure: str | None = None

    def submit(self, request: EngineRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def reset_prefix_cache(self) -> bool:
        return True

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 4, 4, 0, 0, 16, 100, 0, 0, 0, 0, 0, 0)

    def fault(self) -> str | None:
        return self.failure

    def decisions(self) -> list[dict[str, object]]:
        return []

    def say(
        self,
        tokens: Sequence[int],
        finish: FinishReason | None = None,
        *,
        index: int = 0,
        error: str | None = None,
        logprob: float | None = None,
    ) -> None:
        """Put out tokens for the newest request; ``finish`` comes with the last one."""
        request = self.requests[-1]
        if not tokens:
            request.sink(TokenOutput(request.id, index, None, None, None, finish, 0, error))
        for at, token_id in enumerate(tokens, start=1):
            ending = finish if at == len(tokens) else None
            request.sink(TokenOutput(request.id, index, token_id, logprob, None, ending, 0, None))
