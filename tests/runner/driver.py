"""Drives an engine core step by step, without its thread, and watches it after every step."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from prefix_index.events import AllBlocksCleared, BlockRemoved, BlockStored
from runner.core import EngineCore
from runner.pool.blocks import MEDIUM
from runner.types import EngineConfig, EngineRequest, SamplingParams, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prefix_index.events import Event
    from runner.model import Model
    from runner.tiers.interface import BuildTiers

REQUEST_FIELDS = {"salt", "adapter", "max_offload_tokens", "max_load_tokens", "source"}

# A request that has not ended by then never will.
RUN_TIMEOUT_S = 120.0


class Driver:
    """An engine core whose every step is checked: invariants, and events against the pool."""

    def __init__(
        self, model: Model, *, build_tiers: BuildTiers | None = None, **sizes: Any
    ) -> None:
        settings: dict[str, Any] = {"pool_tokens": 4096, "max_seqs": 16} | sizes
        config = EngineConfig(**settings)
        self.core = EngineCore(model, config, self._note, build_tiers, self._wake)
        self.is_woken = threading.Event()
        self.outputs: list[TokenOutput] = []
        self.events: list[Event] = []
        self.announced: Counter[int | bytes] = Counter()
        self._num_requests = 0

    def submit(self, prompt: Sequence[int], **params: Any) -> str:
        """Queue a prompt, greedy unless said otherwise; returns the request's id.

        Names of ``EngineRequest``'s fields go there, others into the sampling parameters.
        """
        asked = {name: params.pop(name) for name in REQUEST_FIELDS & params.keys()}
        settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        self.core.accept(
            EngineRequest(
                request_id,
                list(prompt),
                SamplingParams(**settings),
                self.outputs.append,
                **asked,
            )
        )
        return request_id

    def step(self) -> None:
        self.core.step()
        self.check()

    def run(self) -> None:
        """Step until every request has ended, sleeping as the engine's thread would."""
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        while self.core.has_work:
            self.step()
            if self.core.has_work and (sleep_s := self.core.sleep_s()) != 0:
                self.is_woken.wait(sleep_s)
                self.is_woken.clear()
            assert time.monotonic() < deadline_s, "requests do not end"

    def settle(self, is_done: Callable[[], bool]) -> None:
        """Take turns without a request until something has come about."""
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        while not is_done():
            self.is_woken.wait(0.01)
            self.is_woken.clear()
            self.step()
            assert time.monotonic() < deadline_s, "it does not come about"

    def _wake(self) -> None:
        self.is_woken.set()

    def check(self) -> None:
        self.core.check()
        stats = self.core.stats()
        used = stats.cached_blocks + stats.active_blocks + stats.loading_blocks
        assert stats.free_blocks + used + stats.pinned_blocks == stats.pool_blocks
        assert sum(stats.hit_tokens.values()) == stats.hit_tokens_total
        missed = stats.query_tokens_total - stats.hit_tokens_total
        assert sum(stats.miss_tokens.values()) == missed
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
            if getattr(event, "medium", MEDIUM) != MEDIUM:
                continue
            if isinstance(event, BlockStored):
                self.announced.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.announced.subtract(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self.announced.clear()
