"""One worker's KV events into the pool's index, and when they are not to be believed.

A worker that computes new blocks must announce them. If it was given new prompts and stayed silent,
its address is wrong or its publisher broken: it is modelled by our own routing and shown as
``approximate`` until events come.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from prefix_index.ingest import WorkerFeed
from prefix_index.subscriber import EventSubscriber

if TYPE_CHECKING:
    from collections.abc import Callable

    import zmq.asyncio

    from gateway.routing.pool import Pool, Worker
    from prefix_index.events import EventBatch
    from prefix_index.index import Index

# Events leave at the end of an engine step; a step of a huge prefill takes a few seconds.
MAX_SILENCE_S = 10.0

log = structlog.get_logger("warmlane")


class Feed:
    """Follows one worker's publisher; used from the event loop only.

    Attributes:
        subscriber: Sequence, gaps and decode errors are read there.
        ingest: Counters of stored and removed blocks.
        restarts: Times the worker's cache was found or declared to be new.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._worker = worker
        self._clock = clock
        self._new_prompt_s: float | None = None
        self.restarts = 0
        self.ingest = WorkerFeed(index, worker.id, pool.models[0])
        self.subscriber = EventSubscriber(
            events, replay, on_batch=self._apply, on_clear=self._clear, clock=clock, context=context
        )

    async def run(self) -> None:
        """Follow until cancelled."""
        if self._worker.mode != "text":
            self._pool.set_mode(self._worker, "exact")
        await self.subscriber.run()

    def resume(self) -> None:
        """Believe the events of a worker whose tokens are ours again, from the first one on."""
        self._pool.set_mode(self._worker, "exact")
        self.subscriber.restart()

    def new_epoch(self) -> None:
        """The worker's process is a new one: forget the old cache, ask for the new one's events."""
        self.subscriber.restart()

    def saw_new_prompt(self) -> None:
        """The worker prefilled at least one block that it did not hold: events must follow."""
        if self._new_prompt_s is None:
            self._new_prompt_s = self._clock()

    def check_silence(self) -> None:
        """Stop believing a worker that should have spoken; called about once a second."""
        due_s = self._new_prompt_s
        if due_s is None or self._clock() - due_s < MAX_SILENCE_S:
            return
        self._new_prompt_s = None
        if self._worker.mode == "exact":
            log.warning(
                "kv_events_silent",
                worker=self._worker.id,
                silent_s=MAX_SILENCE_S,
                effect="its cache is modelled by what is sent to it",
            )
            self._pool.set_mode(self._worker, "approximate")

    def _apply(self, _sequence: int, batch: EventBatch) -> None:
        self._new_prompt_s = None
        self._worker.last_event_s = self._clock()
        if self._worker.mode == "text":
            return  # its tokens are not ours, so its blocks mean nothing here
        if self._worker.mode != "exact":
            # What was modelled is dropped; the whole truth comes again from the first batch on.
            self._pool.set_mode(self._worker, "exact")
            self.subscriber.restart()
            return
        self.ingest.apply(batch)

    def _clear(self, reason: str) -> None:
        self.restarts += 1
        self.ingest.clear()
        self._pool.forget(self._worker)
        log.info("worker_cache_cleared", worker=self._worker.id, reason=reason)
