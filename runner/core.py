"""One engine step: schedule, compute, sample, hand out tokens. No threads here.

A failing step ends the requests it was computing and nothing else; a sink that raises ends its
own request.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from runner.kvkeys import namespace_key
from runner.pool.blocks import BlockPool
from runner.pool.states import InvariantError
from runner.sampling import Draw, draw_tokens, new_generator
from runner.scheduler import Limits, Scheduler
from runner.types import EngineStats, TokenOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prefix_index.events import Event
    from runner.kvkeys import KvKey
    from runner.model import Model
    from runner.sampling import Drawn
    from runner.scheduler import Plan
    from runner.sequence import Sequence
    from runner.types import EngineConfig, EngineRequest, FinishReason

_log = logging.getLogger(__name__)

# Part of every KV key: raise it when the bytes of a block change their meaning.
_LAYOUT_VERSION = 1


class EngineCore:
    """Model, pool and scheduler of one engine; used by one thread.

    Attributes:
        limits: Resolved against the model and the pool.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        on_events: Callable[[list[Event]], None] | None,
    ) -> None:
        """Allocate the pool; see ``Engine``."""
        num_blocks = config.pool_tokens // config.block_size
        self.limits = _resolve_limits(model, config, num_blocks)
        self._model = model
        self._config = config
        self._on_events = on_events
        self._kv = model.new_pool(num_blocks, config.block_size)
        self._pool = BlockPool(num_blocks, config.block_size)
        generations = {name: adapter.digest for name, adapter in model.adapters.items()}
        self._scheduler = Scheduler(self._pool, _namespace(model, config), self.limits, generations)
        self._generation_tokens_total = 0

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would compute anything."""
        return self._scheduler.has_work

    def accept(self, request: EngineRequest) -> None:
        """Queue a request, or tell its sink why not."""
        try:
            reason = self._refusal(request)
            if reason is None:
                self._scheduler.add(request)
        except Exception as error:
            _log.exception("request %s could not be queued", request.id)
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            for index in range(request.params.n):
                self._deliver(request, _end(request, index, "error", 0, reason))

    def _refusal(self, request: EngineRequest) -> str | None:
        if self._scheduler.find(request.id):
            return f"a request with id {request.id} is running"
        return self._scheduler.refusal(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it; its blocks are free when this returns."""
        for sequence in self._scheduler.find(request_id):
            ended = [at for at in sequence.indexes if index in (None, at)]
            if len(ended) == len(sequence.indexes):
                self._scheduler.remove(sequence)
            else:
                sequence.indexes = [at for at in sequence.indexes if at not in ended]
            self._end_samples(sequence, ended, "abort")

    def abort_all(self) -> None:
        """End every request."""
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            self._scheduler.remove(sequence)
            self._end_samples(sequence, sequence.indexes, "abort")

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while requests hold blocks."""
        cleared = self._pool.clear()
        self._publish_events()
        return cleared

    def step(self) -> None:
        """Compute one batch and hand out its tokens; never raises."""
        try:
            self._step()
        except Exception as error:
            # The books may be half written: nothing in the pool can be trusted.
            _log.exception("bookkeeping failed, all requests end")
            self._pool.forget_all()
            for sequence in self._scheduler.forget_all():
                self._end_samples(sequence, sequence.indexes, "error", _message(error))
        self._publish_events()

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        try:
            self._compute(plan)
        except InvariantError:
            raise
        except Exception as error:
            _log.exception("a step failed, %d requests end", len(plan.work))
            self._fail((work.sequence for work in plan.work), error)

    def stats(self) -> EngineStats:
        """Return the figures of this moment."""
        pool, scheduler = self._pool, self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            pool_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            active_blocks=pool.num_active,
            block_size=pool.block_size,
            block_bytes=self._kv.block_bytes,
            hit_tokens_total=scheduler.hit_tokens_total,
            query_tokens_total=scheduler.query_tokens_total,
            evictions_total=pool.evictions_total,
            preemptions_total=scheduler.preemptions_total,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
        )

    def cached_hashes(self) -> list[int]:
        """Return the event hashes of all findable blocks."""
        return self._pool.cached_hashes()

    def check(self) -> None:
        """Verify the pool's invariants; raises InvariantError."""
        self._pool.check(sequence.blocks for sequence in self._scheduler.running)

    def _compute(self, plan: Plan) -> None:
        for source, target in plan.copies:
            self._kv.copy_block(source, target)
        logits, order = self._model.forward([work.chunk for work in plan.work], self._kv)
        self._scheduler.retire(plan)
        samples: list[Sequence] = []
        draws: list[Draw] = []
        for row, at in enumerate(order):
            for sample in self._samples_of(plan.work[at].sequence):
                if sample.rng is None:
                    sample.rng = new_generator(sample.request.params, sample.indexes[0])
                samples.append(sample)
                draws.append(Draw(row, sample.request.params, sample.rng))
        if draws:
            for sample, drawn in zip(samples, draw_tokens(logits, draws), strict=True):
                self._append(sample, drawn)
        if self._config.debug_checks:
            self.check()

    def _samples_of(self, sequence: Sequence) -> list[Sequence]:
        return self._scheduler.fork(sequence) if len(sequence.indexes) > 1 else [sequence]

    def _append(self, sample: Sequence, drawn: Drawn) -> None:
        sample.tokens.append(drawn.token_id)
        self._generation_tokens_total += 1
        reason = self._finish_reason(sample)
        if reason:
            self._scheduler.remove(sample)
        self._deliver(
            sample.request,
            TokenOutput(
                request_id=sample.request.id,
                index=sample.indexes[0],
                token_id=drawn.token_id,
                logprob=drawn.logprob,
                top_logprobs=drawn.top_logprobs,
                finish_reason=reason,
                cached_tokens=sample.cached_tokens or 0,
                error=None,
            ),
        )

    def _finish_reason(self, sample: Sequence) -> FinishReason | None:
        params, token = sample.request.params, sample.tokens[-1]
        if token in params.stop_token_ids:
            return "stop"
        if token in self._model.config.eos_token_ids and not params.ignore_eos:
            return "stop"
        return "length" if len(sample.tokens) >= sample.max_tokens else None

    def _end_samples(
        self, sequence: Sequence, indexes: list[int], reason: FinishReason, error: str | None = None
    ) -> None:
        """Tell the receiver that samples of a sequence have ended without a token."""
        for index in indexes:
            cached = sequence.cached_tokens or 0
            self._deliver(sequence.request, _end(sequence.request, index, reason, cached, error))

    def _fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """End the whole requests of ``sequences`` as far as they still run."""
        for request_id in dict.fromkeys(sequence.request.id for sequence in sequences):
            for sequence in self._scheduler.find(request_id):
                self._scheduler.remove(sequence)
                self._end_samples(sequence, sequence.indexes, "error", _message(error))

    def _deliver(self, request: EngineRequest, output: TokenOutput) -> None:
        try:
            request.sink(output)
        except Exception:
            _log.exception("the receiver of request %s failed, the request ends", request.id)
            for sequence in self._scheduler.find(request.id):
                self._scheduler.remove(sequence)

    def _publish_events(self) -> None:
        events = self._pool.drain_events()
        if not events or self._on_events is None:
            return
        try:
            self._on_events(events)
        except Exception:
            _log.exception("%d KV events were not published", len(events))


def _end(
    request: EngineRequest, index: int, reason: FinishReason, cached: int, error: str | None
) -> TokenOutput:
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


def _message(error: Exception) -> str:
    return f"the engine failed: {type(error).__name__}: {error}"


def _resolve_limits(model: Model, config: EngineConfig, num_blocks: int) -> Limits:
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


def _namespace(model: Model, config: EngineConfig) -> KvKey:
    return namespace_key(
        {
            "layout": _LAYOUT_VERSION,
            # Over all sizes, rope and window, and over every weight.
            "model": model.fingerprint,
            "dtype": str(model.dtype),
            "device": "cpu",
            "block_size": config.block_size,
        }
    )
