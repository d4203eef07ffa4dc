"""Follow the KV-cache events of one publisher over ZMQ, without a hole.

A SUB socket brings live batches, numbered from 0 per publisher process; a DEALER socket asks the
publisher's bounded buffer for what was missed. Every repair starts at the last batch that is
already known: if it comes back unchanged the publisher is the same process and nothing is missing
in between; if it differs, a new process answers, and the worker's blocks are cleared.

Source: vLLM 0.32 ``distributed/kv_events.py`` (captured); three-part replay answers: vLLM before
#45177, SGLang before 0.5.23.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import zmq.asyncio
from xxhash import xxh3_64_intdigest

from prefix_index.events import EventDecodeError, decode_batch
from prefix_index.receiver import QUEUE_BATCHES, Inbox, Receiver
from prefix_index.replay import Replay, parse_frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from prefix_index.events import EventBatch

# With nothing heard for this long, ask the buffer: a batch may have been lost before the
# subscription was in force, or the publisher may have restarted in silence.
_IDLE_CHECK_S: Final = 10.0
# Batches handled before other tasks get their turn.
_YIELD_EVERY_BATCHES: Final = 64


class EventSubscriber:
    """Delivers every batch once and in order, or says that some were lost.

    Args:
        endpoint: Where the publisher sends; bound if it stands for any host, else connected to.
        replay_endpoint: Where its buffer answers; without one every gap clears.
        on_batch: Called with (sequence, batch) from the event loop.
        on_clear: Called with a reason when what was delivered so far no longer holds.
        topic: Prefix of the topics to take.
        first_sequence: Batch to go on with, where those before it are known already.
        last_digest: Digest of the batch before that one; if the publisher has another one there,
            or none any more, everything is cleared and taken from the start.
        clock: Monotonic seconds.
        context: Shared ZMQ context; without one the subscriber has its own and ends it.
        receiver: Socket shared with other subscribers of ``endpoint``.

    Attributes:
        last_event_s: When the last batch came, on ``clock``; None before the first.
        last_error_s: Likewise for the last message that was no batch, or not wholly.
        gaps: Times that batches were missing.
        replays: Times the buffer was asked and answered.
        losses: Times that missing batches could not be had any more.
        restarts: Times the publisher was found to be a new process.
        decode_errors: Messages that were no batch, and events in batches that were none.
        unknown_events: Events of a type from the future.
        num_undecodable: Messages in a row of which nothing could be used.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        on_batch: Callable[[int, EventBatch], None],
        on_clear: Callable[[str], None],
        topic: str = "",
        first_sequence: int = 0,
        last_digest: int = 0,
        clock: Callable[[], float] = time.monotonic,
        context: zmq.asyncio.Context | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        self.gaps = self.replays = self.losses = self.restarts = 0
        self.decode_errors = self.unknown_events = self.num_undecodable = 0
        self.last_event_s: float | None = None
        self.last_error_s: float | None = None
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._on_batch = on_batch
        self._on_clear = on_clear
        self._topic = topic
        self._clock = clock
        self._context = context
        self._receiver = receiver
        self._next = first_sequence
        self._last_digest = last_digest
        # Sequence -> payload digest of what came by replay and may still come live.
        self._replayed: dict[int, int] = {}
        self._newest_seen = -1
        self._wake = asyncio.Event()
        self._inbox = Inbox(self._wake.set)
        self._must_check = False
        self._epoch = 0

    @property
    def last_sequence(self) -> int | None:
        """Sequence of the last batch, None before the first."""
        return self._next - 1 if self._next else None

    @property
    def last_digest(self) -> int:
        """Digest of the payload of the last batch; with its sequence, where to go on."""
        return self._last_digest

    @property
    def behind_batches(self) -> int:
        """Batches that are known to exist and have not been delivered yet."""
        return max(len(self._inbox), self._newest_seen + 1 - self._next)

    def restart(self) -> None:
        """Begin a new epoch: clear, then replay from 0. From the event loop only."""
        self._epoch += 1
        self._clear("new epoch")
        self._must_check = True
        self._wake.set()

    async def run(self) -> None:
        """Follow the publisher until cancelled; it may appear, vanish and return meanwhile.

        Raises:
            zmq.ZMQError: If the endpoint cannot be bound or is none.
            TopicTakenError: If another subscriber of the receiver has the topic.
        """
        context = self._context or zmq.asyncio.Context()
        receiver = self._receiver or Receiver(context, self._endpoint)
        try:
            receiver.join(self._topic, self._inbox)
            try:
                # After the subscription: what is published meanwhile queues and is recognised.
                await self._repair(context)
                await self._follow(context)
            finally:
                receiver.leave(self._topic)
        finally:
            if self._context is None:
                context.term()

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        received = 0
        while True:
            if self._must_check:
                await self._repair(context)
            elif self._inbox:
                await self._take_live(self._inbox.take(), context)
                received += 1
                if received % _YIELD_EVERY_BATCHES == 0:
                    await asyncio.sleep(0)
            else:
                self._wake.clear()
                try:
                    async with asyncio.timeout(_IDLE_CHECK_S):
                        await self._wake.wait()
                except TimeoutError:
                    await self._repair(context)

    async def _take_live(self, parts: list[bytes], context: zmq.asyncio.Context) -> None:
        frame = parse_frame(parts)
        if frame is None:
            self._count_undecodable()
            return
        sequence, payload = frame
        self._newest_seen = sequence
        if sequence < self._next:
            digest = xxh3_64_intdigest(payload)
            if digest in (self._replayed.get(sequence), self._digest_of(sequence)):
                return  # came already
            self._restarted("sequence started again")
        if sequence > self._next:
            if self._next:
                self.gaps += 1
            epoch = self._epoch
            await self._repair(context)
            if sequence < self._next or epoch != self._epoch:
                return  # the replay brought it, or it is of an epoch that is over
            if sequence > self._next:
                self._lose(sequence)
        self._replayed.clear()
        self._deliver(sequence, payload)

    def _digest_of(self, sequence: int) -> int | None:
        """Return the digest of a batch that was delivered, where it is still known."""
        return self._last_digest if sequence == self._next - 1 else None

    async def _repair(self, context: zmq.asyncio.Context) -> None:
        """Ask for everything from the last known batch on, and deliver what is new."""
        while True:
            self._must_check = False
            if self._replay_endpoint is None:
                return
            question = Replay(context, self._replay_endpoint, max(self._next - 1, 0))
            batches = question.batches()
            try:
                must_ask_again = await self._take_answer(question, batches)
            finally:
                await batches.aclose()
            if not must_ask_again:
                return

    async def _take_answer(
        self, question: Replay, batches: AsyncGenerator[tuple[int, bytes], None]
    ) -> bool:
        """Deliver an answer, and say whether there is reason to ask again from where we are."""
        epoch, first, knows_last = self._epoch, self._next, self._next > 0
        received = 0
        async for sequence, payload in batches:
            if epoch != self._epoch:
                return True  # a new epoch was declared: this answer is of the old one
            if knows_last:
                knows_last = False
                if not self._is_last(sequence, payload):
                    return True
                continue
            if sequence > self._next:
                if self._next > first:
                    return True  # its own queue was too short for the answer
                self._lose(sequence)
            if sequence >= self._next:
                self._note_replayed(sequence, payload)
                self._deliver(sequence, payload)
            received += 1
            if received % _YIELD_EVERY_BATCHES == 0:
                await asyncio.sleep(0)
        if epoch != self._epoch:
            return True
        if not question.is_complete:
            return self._next > first
        self.replays += 1
        if knows_last:
            self._restarted("publisher restarted")
        return False

    def _is_last(self, sequence: int, payload: bytes) -> bool:
        """Say whether the first batch of an answer is the last one known here; else clear."""
        if xxh3_64_intdigest(payload) == self._digest_of(sequence):
            return True
        if sequence > self._next - 1:
            self._clear("publisher's buffer moved on")
        else:
            self._restarted("publisher restarted")
        return False

    def _note_replayed(self, sequence: int, payload: bytes) -> None:
        # Not more than can queue live meanwhile.
        if len(self._replayed) < QUEUE_BATCHES:
            self._replayed[sequence] = xxh3_64_intdigest(payload)

    def _deliver(self, sequence: int, payload: bytes) -> None:
        self._next = sequence + 1
        self._last_digest = xxh3_64_intdigest(payload)
        self.last_event_s = self._clock()
        try:
            batch = decode_batch(payload)
        except EventDecodeError:
            self._count_undecodable()
            return
        self.unknown_events += batch.unknown
        if batch.malformed:
            self.decode_errors += batch.malformed
            self.last_error_s = self._clock()
        if batch.malformed and not batch.events:
            self.num_undecodable += 1
        else:
            self.num_undecodable = 0
        self._on_batch(sequence, batch)

    def _count_undecodable(self) -> None:
        self.decode_errors += 1
        self.num_undecodable += 1
        self.last_error_s = self._clock()

    def _lose(self, sequence: int) -> None:
        self.losses += 1
        self._clear(f"batches {self._next} to {sequence - 1} are lost")

    def _restarted(self, reason: str) -> None:
        self.restarts += 1
        self._clear(reason)

    def _clear(self, reason: str) -> None:
        self._next = 0
        self._replayed.clear()
        self._on_clear(reason)
