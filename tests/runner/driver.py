"""Drives an engine core step by step, without its thread, and watches it after every step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from prefix_index.events import AllBlocksCleared, BlockRemoved, BlockStored
from runner.core import EngineCore
from runner.types import EngineConfig, EngineRequest, SamplingParams, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.events import Event
    from runner.model import Model


class Driver:
    """An engine core whose every step is checked: invariants, and events against the pool."""

    def __init__(self, model: Model, **sizes: Any) -> None:
        settings: dict[str, Any] = {"pool_tokens": 4096, "max_seqs": 16} | sizes
        self.core = EngineCore(model, EngineConfig(**settings), self._note)
        self.outputs: list[TokenOutput] = []
        self.events: list[Event] = []
        self.announced: Counter[int | bytes] = Counter()
        self._num_requests = 0

    def submit(
        self, prompt: Sequence[int], *, salt: str = "", adapter: str = "", **params: Any
    ) -> str:
        """Queue a prompt, greedy unless said otherwise; returns the request's id."""
        settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        self.core.accept(
            EngineRequest(
                request_id,
                list(prompt),
                SamplingParams(**settings),
                self.outputs.append,
                salt,
                adapter,
            )
        )
        return request_id

    def step(self) -> None:
        self.core.step()
        self.check()

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def check(self) -> None:
        self.core.check()
        stats = self.core.stats()
        assert stats.free_blocks + stats.cached_blocks + stats.active_blocks == stats.pool_blocks
        assert +self.announced == Counter(self.core.cached_hashes())

    def complete(self, prompt: Sequence[int], **params: Any) -> list[int]:
        """Run one greedy prompt to its end and return its tokens."""
        request_id = self.submit(prompt, **params)
        self.run()
        return self.tokens(request_id)

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [
            output.token_id
            for output in self.outputs
            if (output.request_id, output.index) == (request_id, index)
            and output.token_id is not None
        ]

    def last(self, request_id: str, index: int = 0) -> TokenOutput:
        return [
            output
            for output in self.outputs
            if (output.request_id, output.index) == (request_id, index)
        ][-1]

    def cached_tokens(self, request_id: str) -> int:
        return self.last(request_id).cached_tokens

    def _note(self, events: list[Event]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, BlockStored):
                self.announced.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.announced.subtract(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.announced.clear()
