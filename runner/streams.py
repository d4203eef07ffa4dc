"""From engine outputs to the pieces of an answer: one running generation per client request.

The engine thread only appends to a queue; detokenizing, stop strings and log probabilities are
done on the event loop. A generation left early (client gone, error, stop string) aborts its
sequences at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runner.detokenizer import Detokenizer
from runner.errors import GenerationFailedError
from runner.kv_transfer import NO_CAPS, OffloadCaps
from runner.types import EngineRequest, FinishReason, SamplingParams, TokenOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from tokenizers import Tokenizer

    from runner.deadline import Deadline
    from runner.types import EngineStats, HitSource


class EngineLike(Protocol):
    """What the server needs of an engine; all calls are thread safe and return quickly."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; its sink gets every output."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples; unknown ids are ignored."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False if some are in use and stay."""

    def stats(self) -> EngineStats:
        """Return the figures of this moment."""

    def fault(self) -> str | None:
        """Return why no request can be answered any more; None while it is well."""

    def decisions(self) -> list[dict[str, object]]:
        """Return the last decisions about loads; may wait for a step."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token and of the likeliest ones at its place."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Piece:
    """What one engine output adds to one choice.

    Attributes:
        index: The choice.
        text: Final text, possibly empty.
        token_ids: The tokens behind it; text may lag behind them.
        stop_reason: The stop string or stop token that ended the choice.
    """

    index: int
    text: str
    token_ids: list[int]
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of a request, over all its prompts and samples."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class OutputQueue:
    """Carries outputs from the engine thread to one coroutine, with one wake-up per burst."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[TokenOutput] = deque()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._is_woken = False

    def put(self, output: TokenOutput | None) -> None:
        """Append an output, or none to have ``take`` return; from any thread."""
        with self._lock:
            if output is not None:
                self._waiting.append(output)
            if self._is_woken:
                return
            self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:
            # The loop is closed: the server is gone, and with it whoever waited.
            return

    async def take(self) -> list[TokenOutput]:
        """Return all outputs that wait; none only after ``put(None)``."""
        await self._ready.wait()
        with self._lock:
            self._ready.clear()
            self._is_woken = False
            taken = list(self._waiting)
            self._waiting.clear()
        return taken


@dataclass(slots=True)
class _Sample:
    """One choice while it runs."""

    request_id: str
    sample_index: int
    detokenizer: Detokenizer
    is_finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a generation runs: prompts with equal parameters but their own lengths.

    Attributes:
        id: Unique; the engine's request ids begin with it.
        prompts: Token ids and parameters of each prompt.
        adapter: See ``EngineRequest``, as ``salt``.
        caps: How far its KV may travel, and where its prefix may be.
        stop: Stop strings.
    """

    id: str
    prompts: Sequence[tuple[list[int], SamplingParams]]
    salt: str = ""
    adapter: str = ""
    caps: OffloadCaps = NO_CAPS
    stop: tuple[str, ...] = ()


class Generation:
    """All choices of one client request. Choice index = prompt index * n + sample index.

    ``on_first_token(prompt_tokens, cached_tokens, hit_source)`` is called once per prompt.

    Use as an async context manager: leaving it aborts whatever still runs, and so does the end of
    ``deadline``, whatever its reader does then.

    Attributes:
        usage: Token counts so far.
        num_choices: Choices in all.
        num_unfinished: Choices without a finish reason.
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer,
        plan: Plan,
        on_first_token: Callable[[int, int, HitSource | None], None],
        deadline: Deadline,
    ) -> None:
        self.usage = Usage()
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._engine = engine
        self._plan = plan
        self._queue = OutputQueue()
        self._on_first_token = on_first_token
        self._request_ids = [f"{plan.id}-{at}" for at in range(len(plan.prompts))]
        # Prompt length of each request that has given no output yet.
        self._silent = {
            request_id: len(ids)
            for request_id, (ids, _) in zip(self._request_ids, plan.prompts, strict=True)
        }
        self._samples = {
            (request_id, index): _Sample(request_id, index, Detokenizer(tokenizer, plan.stop))
            for request_id, (_, params) in zip(self._request_ids, plan.prompts, strict=True)
            for index in range(params.n)
        }
        self._choices = {key: at for at, key in enumerate(self._samples)}
        self.num_choices = self.num_unfinished = len(self._samples)

    async def __aenter__(self) -> Generation:
        """Submit every prompt.

        Raises:
            DeadlineExceededError: If its time is over; nothing is submitted then.
        """
        self._deadline.check()
        if (left_s := self._deadline.left_s()) is not None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)
        try:
            for request_id, (ids, params) in zip(
                self._request_ids, self._plan.prompts, strict=True
            ):
                self.usage.prompt_tokens += len(ids)
                self._engine.submit(
                    EngineRequest(
                        id=request_id,
                        prompt_ids=ids,
                        params=params,
                        sink=self._queue.put,
                        salt=self._plan.salt,
                        adapter=self._plan.adapter,
                        max_offload_tokens=self._plan.caps.max_offload_tokens,
                        max_load_tokens=self._plan.caps.max_load_tokens,
                        source=self._plan.caps.source,
                    )
                )
        except BaseException:
            self._abort_unfinished()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Abort what still runs."""
        if self._timer is not None:
            self._timer.cancel()
        self._abort_unfinished()

    def _expire(self) -> None:
        self._is_over = True
        self._abort_unfinished()
        self._queue.put(None)

    def _abort_unfinished(self) -> None:
        running = {sample.request_id for sample in self._samples.values() if not sample.is_finished}
        for request_id in running:
            self._engine.abort(request_id)

    async def bursts(self) -> AsyncGenerator[list[Piece], None]:
        """Yield the pieces as they come until every choice is finished.

        Raises:
            GenerationFailedError: If the engine reports an error for any choice.
            DeadlineExceededError: When the deadline is over.
        """
        while self.num_unfinished:
            outputs = await self._queue.take()
            if self._is_over:
                raise self._deadline.error()
            pieces = [piece for output in outputs if (piece := self._piece(output)) is not None]
            if pieces:
                yield pieces

    def _piece(self, output: TokenOutput) -> Piece | None:
        key = output.request_id, output.index
        sample = self._samples[key]
        if sample.is_finished:
            # Tokens of a sample that a stop string ended may still have been under way.
            return None
        if output.finish_reason == "error":
            raise GenerationFailedError(output.error or "unknown engine error")
        self._note_first(output)
        piece = Piece(self._choices[key], "", [], _logprob(output), output.finish_reason)
        if output.token_id is not None:
            piece.token_ids.append(output.token_id)
            self.usage.completion_tokens += 1
        self._add_text(sample, output, piece)
        if piece.finish_reason is not None:
            sample.is_finished = True
            self.num_unfinished -= 1
        return piece

    def _add_text(self, sample: _Sample, output: TokenOutput, piece: Piece) -> None:
        detokenizer = sample.detokenizer
        # The token that ended a sample is no part of its text.
        if output.token_id is not None and output.finish_reason != "stop":
            piece.text = detokenizer.push(output.token_id)
        if output.finish_reason is not None and detokenizer.stopped_by is None:
            piece.text += detokenizer.finish()
        if detokenizer.stopped_by is not None:
            if output.finish_reason is None:
                self._engine.abort(sample.request_id, sample.sample_index)
            piece.finish_reason = "stop"
            piece.stop_reason = detokenizer.stopped_by
        elif output.finish_reason == "stop":
            params = self._plan.prompts[0][1]
            is_named = output.token_id in params.stop_token_ids
            piece.stop_reason = output.token_id if is_named else None

    def _note_first(self, output: TokenOutput) -> None:
        prompt_tokens = self._silent.pop(output.request_id, None)
        if prompt_tokens is None:
            return
        self.usage.cached_tokens += output.cached_tokens
        if output.token_id is not None:
            self._on_first_token(prompt_tokens, output.cached_tokens, output.hit_source)


def _logprob(output: TokenOutput) -> TokenLogprob | None:
    if output.token_id is None or output.logprob is None:
        return None
    return TokenLogprob(output.token_id, output.logprob, output.top_logprobs or [])
