"""One worker's KV events into the pool's index, and when they are not to be believed.

A worker that computes new blocks must announce them, in words that are understood. As long as it
does not, it is modelled by our own routing and shown as ``approximate``, with the reason; what
makes up for the reason brings its events back, from the first one on.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from math import gcd
from typing import TYPE_CHECKING, Final

import structlog
import zmq
import zmq.asyncio

from gateway.fleet.event_health import (
    EFFECTS,
    MAX_BARREN_BATCHES,
    MAX_IMPLAUSIBLE,
    MAX_OVERCLAIMS,
    MAX_SILENCE_S,
    MAX_UNDECODABLE,
    MAX_UNSEEN_PROMPTS,
    ON_TRIAL,
    SHOW_ERROR_S,
    TRIAL_AFTER_S,
    EventHealth,
    cures,
)
from prefix_index.ingest import WorkerFeed
from prefix_index.receiver import TopicTakenError
from prefix_index.subscriber import EventSubscriber

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.routing.pool import Pool, Worker
    from prefix_index.blocks import BlockHash
    from prefix_index.events import EventBatch
    from prefix_index.index import Index
    from prefix_index.names import NameBudget, Names
    from prefix_index.receiver import Receiver

# Prompts that are looked for in what comes next. A sample is enough to see that all are missing.
_MAX_AWAITED: Final = 8
# An address that is taken may be free when another process has ended.
_TRY_AGAIN_S: Final = 5.0

log = structlog.get_logger("warmlane")


class Feed:
    """Follows one worker's publisher; used from the event loop only.

    Args:
        pool: Its pool; the worker's mode is set there.
        worker: Whose blocks they are.
        index: The pool's.
        events: Where the publisher sends.
        replay: Where its buffer answers; None = every gap clears.
        context: ZMQ context of the process.
        topic: Prefix of the topics that are the worker's.
        first_sequence: Batch to go on with, where those before it are in the index already.
        last_digest: Digest of the batch before that one.
        receiver: Socket shared with other workers of the address.
        budget: Memory for engine hashes, shared with the pool's other workers.
        names: Engine hashes that are known already.
        clock: Monotonic seconds.

    Attributes:
        subscriber: Sequence, gaps and decode errors are read there.
        ingest: Counters of stored and removed blocks.
        restarts: Times the worker's cache was found or declared to be new.
        misdirected: Batches of another data-parallel rank.
    """

    def __init__(
        self,
        pool: Pool,
        worker: Worker,
        index: Index,
        *,
        events: str,
        replay: str | None,
        context: zmq.asyncio.Context,
        topic: str = "",
        first_sequence: int = 0,
        last_digest: int = 0,
        receiver: Receiver | None = None,
        budget: NameBudget | None = None,
        names: Names | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.restarts = self.misdirected = 0
        self._pool = pool
        self._worker = worker
        self._index = index
        self._clock = clock
        self._has_buffer = replay is not None
        self._doubt: EventHealth | None = None
        self._doubted_s = 0.0
        # When a prompt was computed of which events must follow.
        self._owed_since_s: float | None = None
        # (when, first block, whether it is salted) of prompts that no event has shown yet.
        self._awaited: deque[tuple[float, BlockHash, bool]] = deque(maxlen=_MAX_AWAITED)
        self._num_unseen = self._num_overclaims = 0
        self._implausible_before = self._processes_before = self._restarts_before = 0
        # The block size that was last told to the operator.
        self._told_block_size = 0
        self.ingest = WorkerFeed(index, worker.id, pool.models[0], budget=budget, names=names)
        self.subscriber = EventSubscriber(
            events,
            replay,
            on_batch=self._apply,
            on_clear=self._clear,
            topic=topic,
            first_sequence=first_sequence,
            last_digest=last_digest,
            clock=clock,
            context=context,
            receiver=receiver,
        )

    @property
    def health(self) -> EventHealth:
        """Whether its events are believed, and if not, why."""
        if self._doubt is not None:
            return self._doubt
        error_s, size = self.subscriber.last_error_s, self.ingest.block_size
        if error_s is not None and self._clock() - error_s < SHOW_ERROR_S:
            return EventHealth.UNDECODABLE
        if size % self._index.block_size:
            return EventHealth.BLOCK_SIZE
        if self.subscriber.last_event_s is None:
            return EventHealth.WAITING
        return EventHealth.OK

    @property
    def lag_s(self) -> float:
        """How long events have been due that did not come; 0 when none are."""
        return 0.0 if self._owed_since_s is None else self._clock() - self._owed_since_s

    @property
    def announced_tokens(self) -> int:
        """Tokens of a prompt from which on its first block is announced: one block of each side."""
        return max(self._worker.block_size or 0, self._index.block_size)

    async def run(self) -> None:
        """Follow until cancelled."""
        if self._worker.mode != "text":
            self._pool.set_mode(self._worker, "exact")
        while True:
            try:
                await self.subscriber.run()
            except (zmq.ZMQError, TopicTakenError) as error:
                log.warning("kv_events_unreachable", worker=self._worker.id, error=str(error))
                self._stop_believing(EventHealth.UNREACHABLE)
            await asyncio.sleep(_TRY_AGAIN_S)

    def resume(self) -> None:
        """Believe the events of a worker whose tokens are ours again, from the first one on."""
        self._pool.set_mode(self._worker, "exact" if self._doubt is None else "approximate")
        self.subscriber.restart()

    def new_epoch(self) -> None:
        """The worker's process is a new one: forget the old cache, ask for the new one's events."""
        was_seen = self.subscriber.restarts > self._restarts_before
        self._restarts_before = self.subscriber.restarts
        # Without a buffer nothing of what it has said already could be had again.
        if self._has_buffer or not was_seen:
            self._believe()

    def forget(self) -> None:
        """The worker's cache was dropped at our request: forget it before its events say so."""
        self._clear("reset through the gateway")

    def saw_new_prompt(self, took_s: float) -> None:
        """The worker computed tokens it did not hold: it owes us events, if it sent none since.

        Not to be called for ``announced_tokens`` or fewer.

        Args:
            took_s: How long ago it was asked: an answer may end long after its prompt's events.
        """
        heard_s, now_s = self._worker.last_event_s, self._clock()
        if self._owed_since_s is None and (heard_s is None or heard_s < now_s - took_s):
            self._owed_since_s = now_s

    def saw_prompt(self, first_block: BlockHash, *, is_salted: bool) -> None:
        """The worker computed this beginning of a prompt: it must be among what it announces.

        Not to be called for a prompt of fewer than ``announced_tokens``.
        """
        if self._worker.mode == "exact" and not self._index.holds(self._worker.id, first_block):
            self._awaited.append((self._clock(), first_block, is_salted))

    def saw_hit(self, *, predicted_tokens: int, observed_tokens: int) -> None:
        """Compare what its events made us expect with the cached tokens that it reported."""
        if not predicted_tokens or self._worker.mode != "exact":
            return
        is_over = 2 * observed_tokens < predicted_tokens
        self._num_overclaims = self._num_overclaims + 1 if is_over else 0
        if self._num_overclaims >= MAX_OVERCLAIMS:
            self._stop_believing(EventHealth.OVERCLAIM)

    def check(self) -> None:
        """Stop believing a worker that should have spoken, or been understood; once a second."""
        now_s = self._clock()
        if self._owed_since_s is not None and now_s - self._owed_since_s >= MAX_SILENCE_S:
            self._owed_since_s = None
            self._stop_believing(EventHealth.SILENT)
        elif self.subscriber.num_undecodable >= MAX_UNDECODABLE:
            self._stop_believing(EventHealth.UNDECODABLE)
        while self._awaited and now_s - self._awaited[0][0] >= MAX_SILENCE_S:
            _, _, is_salted = self._awaited.popleft()
            self._num_unseen += 1
            if self._num_unseen >= MAX_UNSEEN_PROMPTS:
                self._stop_believing(
                    EventHealth.WITHOUT_SALT if is_salted else EventHealth.MISMATCH
                )
        if self._doubt in ON_TRIAL and now_s - self._doubted_s >= TRIAL_AFTER_S:
            self._believe()
        self.tell_block_size()

    def tell_block_size(self) -> None:
        """Let what events say about the block size win over what metrics say.

        A size that is not the pool's, or not what metrics say, is told to the operator.
        """
        reported, expected = self._worker.block_size, self._index.block_size
        size = self.ingest.block_size or reported or expected
        if self.ingest.block_size:
            self._worker.block_size = size
        is_as_told = size == expected and reported in (None, size)
        if is_as_told or size == self._told_block_size:
            return
        self._told_block_size = size
        effect = "its hits count in whole blocks of its own"
        if size % expected:
            divisor = gcd(size, expected)
            effect = f"it is routed by text; set pools[].block_size to {divisor} to read it"
        log.warning(
            "kv_events_block_size",
            worker=self._worker.id,
            block_size=size,
            expected=expected,
            reported=reported,
            effect=effect,
        )

    def _apply(self, _sequence: int, batch: EventBatch) -> None:
        self._owed_since_s = None
        self._worker.last_event_s = self._clock()
        if self._worker.mode == "text":
            return  # its tokens are not ours, so its blocks mean nothing here
        if batch.dp_rank is not None and self._worker.rank not in (None, batch.dp_rank):
            self.misdirected += 1
            self._stop_believing(EventHealth.WRONG_RANK)
            return
        if self._doubt is not None and not cures(self._doubt, batch, self._index.block_size):
            return
        if self._worker.mode != "exact":
            self._believe()
            if self._has_buffer:
                return  # all of it comes again, this batch as well
        self.ingest.apply(batch)
        self._judge()

    def _judge(self) -> None:
        """Look at what became of a batch."""
        holds, worker = self._index.holds, self._worker.id
        for prompt in [prompt for prompt in self._awaited if holds(worker, prompt[1])]:
            self._awaited.remove(prompt)
            self._num_unseen = 0
        if self.ingest.implausible - self._implausible_before >= MAX_IMPLAUSIBLE:
            self._stop_believing(EventHealth.IMPLAUSIBLE)
        elif self.ingest.barren >= MAX_BARREN_BATCHES:
            self._stop_believing(EventHealth.USELESS)
        self.tell_block_size()

    def _stop_believing(self, why: EventHealth) -> None:
        if self._doubt is not None or self._worker.mode == "text":
            return
        self._doubt, self._doubted_s = why, self._clock()
        self._awaited.clear()
        log.warning(
            why.value,
            worker=self._worker.id,
            reason=EFFECTS[why],
            effect="its cache is modelled by what is sent to it",
        )
        self.ingest.clear()
        self._pool.set_mode(self._worker, "approximate")

    def _believe(self) -> None:
        """Drop what was modelled; the whole truth comes again from the first batch on."""
        self._trust_again()
        if self._worker.mode != "text":
            self._pool.set_mode(self._worker, "exact")
        if self._has_buffer:
            self.subscriber.restart()
        else:
            self._clear("nothing of before can be had")

    def _trust_again(self) -> None:
        self._doubt = None
        self._num_unseen = self._num_overclaims = 0
        self._awaited.clear()
        self._implausible_before = self.ingest.implausible
        self.ingest.barren = 0

    def _clear(self, reason: str) -> None:
        self.restarts += 1
        if self.subscriber.restarts != self._processes_before:
            # Another process: what the old one said is no reason to doubt it.
            self._processes_before = self.subscriber.restarts
            self._trust_again()
        self.ingest.clear()
        self._pool.forget(self._worker)
        log.info("worker_cache_cleared", worker=self._worker.id, reason=reason)
