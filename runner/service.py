"""What the HTTP handlers share: the engine, the prompt reader, the model's facts, the books."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefix_index.chat import ChatTemplate, TemplateRefusedError
from prefix_index.prompts import PromptReader
from prefix_index.tokens import PromptTokenizer
from runner.errors import ApiError, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tokenizers import Tokenizer

    from prefix_index.prompts import Draft
    from runner.detokenizer import TokenTexts
    from runner.metrics import RunnerMetrics
    from runner.openai import GenerationRequest, TextOrIds
    from runner.peers import BlockServer
    from runner.publisher import EventPublisher
    from runner.selftest import SelfTest
    from runner.streams import EngineLike
    from runner.tiers.peer import PeerStore
    from runner.tokenizer import TokenizerFiles

# Below this a tokenization is shorter than handing it to a thread (about 0.1 ms).
INLINE_CHARS = 2_000

# What a client should wait while this process drains or has to be replaced: another worker is free
# sooner.
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is said about the served model.

    Attributes:
        name: Served model name.
        root: Where its files are.
        max_model_len: Most tokens of prompt and completion.
        vocab_size: Token ids are below this.
        block_size: Tokens per KV block.
        adapters: Where each LoRA adapter's files are, by the name clients ask for.
    """

    name: str
    root: str
    max_model_len: int
    vocab_size: int
    block_size: int
    adapters: Mapping[str, str] = field(default_factory=dict)


class PromptPipeline:
    """Turns requests into token ids, by the same code the gateway predicts with."""

    def __init__(self, files: TokenizerFiles, facts: ModelFacts) -> None:
        self.tokenizer = PromptTokenizer.from_parts(files.tokenizer_json, files.config)
        source = self.tokenizer.template_source
        template = source and ChatTemplate(source, special_tokens=self.tokenizer.special_tokens)
        self._reader = PromptReader(
            self.tokenizer,
            template or None,
            model=facts.name,
            block_size=facts.block_size,
            engine="runner",
        )
        self._vocab_size = facts.vocab_size

    async def chat(self, body: dict[str, object], salt: str = "") -> list[int]:
        """Render and tokenize a chat body.

        Raises:
            ApiError: 400 if it cannot be rendered, by this model's template or at all.
        """
        try:
            return await self._complete(self._reader.chat(body, salt=salt))
        except TemplateRefusedError as error:
            raise invalid(f"the messages cannot be rendered: {error}", "messages") from error

    async def completion(self, prompt: TextOrIds, salt: str = "") -> list[int]:
        """Tokenize a legacy prompt, or check its token ids.

        Raises:
            ApiError: 400 if it has no token, or one the model does not know.
        """
        ids = await self._complete(self._reader.completion(prompt, salt=salt))
        if not ids:
            raise invalid("`prompt` must contain at least one token", "prompt")
        if (highest := max(ids)) >= self._vocab_size:
            raise invalid(
                f"`prompt` has token id {highest}, but this model's ids are below "
                f"{self._vocab_size}",
                "prompt",
            )
        return ids

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """Return ``ids`` between what the tokenizer puts around a whole text."""
        return [*self.tokenizer.prefix_ids, *ids, *self.tokenizer.suffix_ids]

    async def of(self, wanted: GenerationRequest) -> list[list[int]]:
        """Return the token ids of every prompt of a request."""
        if wanted.surface == "chat":
            return [await self.chat(wanted.body, wanted.cache_salt)]
        return [await self.completion(prompt, wanted.cache_salt) for prompt in wanted.prompts]

    @staticmethod
    async def _complete(draft: Draft) -> list[int]:
        if draft.unknown_chars > INLINE_CHARS:
            return list((await asyncio.to_thread(draft.complete)).token_ids)
        return list(draft.complete().token_ids)


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class Service:
    """Everything one runner serves with; used from the event loop only.

    Attributes:
        peers: Hands KV to other runners; None where that is not switched on.
        puller: Pulls KV from them; None where there are none.
        selftest: Stress-tests the disk tier; None where there is none.
    """

    facts: ModelFacts
    engine: EngineLike
    prompts: PromptPipeline
    detokenizer: Tokenizer
    texts: TokenTexts
    files: TokenizerFiles
    metrics: RunnerMetrics
    publisher: EventPublisher | None = None
    peers: BlockServer | None = None
    puller: PeerStore | None = None
    selftest: SelfTest | None = None
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    started_at_s: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    _num_in_flight: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        """Start without a request in flight."""
        self.is_idle.set()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request as in flight while the block runs; refused as by ``check_open``.

        Raises:
            ApiError: 503.
        """
        self.check_open()
        self._num_in_flight += 1
        self.is_idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self.is_idle.set()

    def next_id(self) -> str:
        """Return an engine request id; a client's own request ids may repeat."""
        return f"r{next(self._numbers)}"

    def check_open(self) -> None:
        """Refuse new work while draining, and when the engine cannot do it any more.

        Raises:
            ApiError: 503.
        """
        if (fault := self.engine.fault()) is not None:
            raise ApiError(503, fault, code="engine_unavailable", retry_after_s=RETRY_AFTER_S)
        if self.is_draining:
            raise ApiError(
                503,
                "this runner is shutting down",
                code="shutting_down",
                retry_after_s=RETRY_AFTER_S,
            )

    def adapter_of(self, name: str | None) -> str:
        """Return the LoRA adapter that a served name stands for; empty for the base model."""
        return name if name is not None and name in self.facts.adapters else ""

    def check_model(self, name: str | None) -> None:
        """Refuse a name this runner does not serve; no name means the served one.

        Raises:
            ApiError: 404.
        """
        served = (self.facts.name, *self.facts.adapters)
        if name is not None and name not in served:
            raise ApiError(
                404,
                f"The model `{name}` does not exist; this runner serves "
                f"{', '.join(f'`{one}`' for one in served)}.",
                param="model",
                code="model_not_found",
            )
