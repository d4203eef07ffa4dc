"""One engine step: schedule, compute, sample, hand out tokens. No threads here.

A failing step ends the requests it was computing and nothing else; a sink that raises ends its
own request.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from runner.kvkeys import BlockChain, namespace_key
from runner.leases import LeaseBook
from runner.lending import Lender
from runner.namespace import kv_facts
from runner.outputs import end_output, failure_message, token_output
from runner.plan import resolve_limits
from runner.pool.blocks import BlockPool
from runner.pool.states import InvariantError
from runner.sampling import Draw, draw_tokens, new_generator
from runner.scheduler import Scheduler
from runner.stepping import CALIBRATION_TOKENS, Stepper
from runner.types import EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Run
    from contextlib import AbstractContextManager

    from prefix_index.events import Event
    from runner.kvkeys import KvKey
    from runner.leases import Loan
    from runner.model import Model
    from runner.plan import Plan
    from runner.sampling import Drawn
    from runner.sequence import Sequence
    from runner.tiers.interface import BuildTiers, Tiers
    from runner.tiers.peer import PeerStore
    from runner.types import EngineConfig, EngineRequest, FinishReason, TokenOutput

_log = logging.getLogger(__name__)

# A turn polls the transfers; one that was not woken, through whatever fault, must not hang the
# requests that wait for it.
_MAX_STALL_S = 0.1

# Nobody may make the engine thread spin.
_MIN_SLEEP_S = 0.001


class EngineCore:
    """Model, pool and scheduler of one engine; used by one thread.

    Attributes:
        limits: Resolved against the model and the pool.
        namespace: Root of all keys of the base model.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        on_events: Callable[[list[Event]], None] | None,
        build_tiers: BuildTiers | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Allocate the pool; see ``Engine``.

        ``computing`` is entered while the model computes: no book is read or changed then, so that
        others may.
        """
        num_blocks = config.pool_tokens // config.block_size
        self.limits = resolve_limits(model, config, num_blocks)
        self._model = model
        self._config = config
        self._on_events = on_events
        self._clock = clock
        self._computing = computing
        self._kv = model.new_pool(num_blocks, config.block_size)
        self._pool = BlockPool(num_blocks, config.block_size)
        self._leases = LeaseBook(self._pool.pin, self._pool.unpin)
        facts = kv_facts(model, config.block_size)
        self.namespace = namespace_key(facts)
        mover = self._kv.new_mover()
        self._tiers: Tiers | None = None
        if build_tiers is not None:
            self._tiers = build_tiers(
                pool=self._pool,
                leases=self._leases,
                mover=mover,
                namespace=self.namespace,
                facts=facts,
                chunk_tokens=self.limits.max_batched_tokens,
                wake=wake,
                clock=clock,
            )
        self._stepper = Stepper(model, self._kv, self._tiers, clock)
        self._lender = Lender(self._pool, self._leases, mover, self._tiers)
        generations = {name: adapter.digest for name, adapter in model.adapters.items()}
        self._scheduler = Scheduler(
            self._pool, self.namespace, self.limits, generations, self._tiers
        )
        self._generation_tokens_total = 0
        self._stall_s_total = 0.0
        self._is_stalled = False

    @property
    def puller(self) -> PeerStore | None:
        """What pulls KV from other runners."""
        return self._tiers.peers if self._tiers is not None else None

    def calibrate(self) -> None:
        """Time a step for the tiers; before the first request."""
        if self._tiers is None:
            return
        size, longest = self._pool.block_size, self.limits.max_model_len
        num_blocks = min(-(-CALIBRATION_TOKENS // size), longest // size, self._pool.num_blocks)
        if blocks := self._pool.allocate(num_blocks):
            self._stepper.calibrate(blocks, num_blocks * size)
            self._pool.release(blocks, BlockChain(self.namespace, size))

    @property
    def has_work(self) -> bool:
        """Whether any request is in the engine."""
        return self._scheduler.has_work

    @property
    def needs_turns(self) -> bool:
        """Whether ``step`` has something to do even without a request."""
        return self._tiers is not None or bool(self._leases)

    def sleep_s(self) -> float | None:
        """Return how long the thread may sleep unless it is woken; None for as long as it likes.

        0 means that there is something to compute.
        """
        has_work = self._scheduler.has_work
        if has_work and not self._is_stalled:
            return 0.0
        now_s = self._clock()
        limits_s = [_MAX_STALL_S] if has_work else []
        if (deadline_s := self._leases.next_deadline_s()) is not None:
            limits_s.append(deadline_s - now_s)
        if self._tiers is not None and (wake_s := self._tiers.next_wake_s(now_s)) is not None:
            limits_s.append(wake_s)
        return max(min(limits_s), _MIN_SLEEP_S) if limits_s else None

    def note_sleep(self, elapsed_s: float) -> None:
        """Count time slept as a stall if every request waited for the tiers all the while."""
        if self._scheduler.waits_for_tiers:
            self._stall_s_total += elapsed_s

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
                self._deliver(request, end_output(request, index, "error", 0, reason))

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
        for sequence in self._scheduler.live():
            self._scheduler.remove(sequence)
            self._end_samples(sequence, sequence.indexes, "abort")

    def close(self) -> None:
        """End all requests, loans and tiers; the core is of no use afterwards."""
        self.abort_all()
        self._leases.release_all()
        if self._tiers is not None:
            self._tiers.close()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks on every tier; False while requests or loads hold blocks."""
        # The load of an aborted request may still be writing: its blocks are soon free.
        cleared = not self._pool.num_loading and self._pool.clear()
        if cleared and self._tiers is not None:
            self._tiers.clear()
        self._publish_events()
        return cleared

    def lend(self, keys: Run[KvKey], owner: str, deadline_s: float) -> Loan:
        """See ``Engine.lend``."""
        return self._lender.lend(keys, owner, deadline_s)

    def give_back(self, owner: str) -> None:
        """See ``Engine.give_back``."""
        self._lender.give_back(owner)

    def decisions(self) -> list[dict[str, object]]:
        """Return the last decisions about loads, oldest first."""
        return self._tiers.decisions() if self._tiers is not None else []

    def step(self) -> None:
        """Poll the tiers, compute one batch and hand out its tokens; never raises."""
        try:
            self._step()
        except Exception as error:
            # The books may be half written: nothing in the pool can be trusted.
            _log.exception("bookkeeping failed, all requests end")
            self.start_over(error)
        self._publish_events()

    def _step(self) -> None:
        now_s = self._clock()
        self._poll(now_s)
        plan = self._scheduler.schedule(now_s)
        self._is_stalled = not plan.work
        if plan.work:
            try:
                self._compute(plan)
            except InvariantError:
                raise
            except Exception as error:
                _log.exception("a step failed, %d requests end", len(plan.work))
                self._fail((work.sequence for work in plan.work), error)
        self._scheduler.flush_offers(now_s)
        if self._config.debug_checks:
            self.check()

    def _poll(self, now_s: float) -> None:
        if self._tiers is not None:
            for done in self._tiers.poll(now_s):
                self._scheduler.end_load(done)
            self._scheduler.flush_offers(now_s)
        if self._leases:
            for lease in self._leases.sweep(now_s):
                _log.warning("%s of %s was not ended by its owner", lease.reason, lease.owner)

    def start_over(self, error: Exception) -> None:
        """Forget every block of every tier and end all requests.

        Blocks that a transfer thread still reads or writes stay out of use until it is done.
        """
        self._pool.forget_all()
        sequences = self._scheduler.forget_all()
        if self._tiers is not None:
            self._tiers.clear()
        for sequence in sequences:
            self._end_samples(sequence, sequence.indexes, "error", failure_message(error))

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
            hit_tokens_total=scheduler.reuse.hit_tokens_total,
            query_tokens_total=scheduler.reuse.query_tokens_total,
            evictions_total=pool.evictions_total,
            preemptions_total=scheduler.preemptions_total,
            prompt_tokens_total=scheduler.reuse.query_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            num_loading=len(scheduler.loading),
            loading_blocks=pool.num_loading,
            pinned_blocks=pool.num_pinned,
            stall_s_total=self._stall_s_total + self._stepper.stalled_s,
            hit_tokens=scheduler.reuse.hit_tokens.copy(),
            miss_tokens=scheduler.reuse.miss_tokens.copy(),
            orphans_total=self._leases.orphans_total,
            tiers=tuple(self._tiers.stats()) if self._tiers is not None else (),
        )

    def cached_hashes(self) -> list[int]:
        """Return the event hashes of all findable blocks."""
        return self._pool.cached_hashes()

    def check(self) -> None:
        """Verify the pool's invariants; raises InvariantError."""
        scheduler = self._scheduler
        tables = (at.blocks for at in (*scheduler.running, *scheduler.loading))
        self._pool.check(tables, scheduler.loading_blocks)

    def _compute(self, plan: Plan) -> None:
        for source, target in plan.copies:
            self._kv.copy_block(source, target)
        chunks = [work.chunk for work in plan.work]
        with self._computing():
            logits, order = self._stepper.forward(chunks)
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

    def _samples_of(self, sequence: Sequence) -> list[Sequence]:
        return self._scheduler.fork(sequence) if len(sequence.indexes) > 1 else [sequence]

    def _append(self, sample: Sequence, drawn: Drawn) -> None:
        sample.tokens.append(drawn.token_id)
        self._generation_tokens_total += 1
        reason = self._finish_reason(sample)
        if reason:
            self._scheduler.remove(sample)
        self._deliver(sample.request, token_output(sample, drawn, reason))

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
            self._deliver(
                sequence.request, end_output(sequence.request, index, reason, cached, error)
            )

    def _fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """End the whole requests of ``sequences`` as far as they still run."""
        for request_id in dict.fromkeys(sequence.request.id for sequence in sequences):
            for sequence in self._scheduler.find(request_id):
                self._scheduler.remove(sequence)
                self._end_samples(sequence, sequence.indexes, "error", failure_message(error))

    def _deliver(self, request: EngineRequest, output: TokenOutput) -> None:
        try:
            request.sink(output)
        except Exception:
            _log.exception("the receiver of request %s failed, the request ends", request.id)
            for sequence in self._scheduler.find(request.id):
                self._scheduler.remove(sequence)

    def _publish_events(self) -> None:
        events = self._pool.drain_events()
        if self._tiers is not None:
            events += self._tiers.drain_events()
        if not events or self._on_events is None:
            return
        try:
            self._on_events(events)
        except Exception:
            _log.exception("%d KV events were not published", len(events))
