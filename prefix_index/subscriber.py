"""Follow the KV-cache events of one publisher over ZMQ, without a hole.

A SUB socket brings live batches, numbered from 0 per publisher process; a DEALER socket asks the
publisher's bounded buffer for what was missed. Every repair starts at the last batch that is
already known: if it comes back unchanged the publisher is the same process and nothing is missing
in between; if it differs, a new process answers, and the worker's blocks are cleared.

Source: vLLM 0.32 ``distributed/kv_events.py`` (captured); three-part replay answers: vLLM before
#45177, SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from prefix_index.events import EventDecodeError, decode_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefix_index.events import EventBatch

_END_OF_REPLAY: Final = 0xFFFF_FFFF_FFFF_FFFF
_SEQUENCE_BYTES: Final = 8
# Live batches that may queue while a replay runs; the publishers' own default bound.
_QUEUE_BATCHES: Final = 100_000
# A publisher answers between two batches, within 0.1 s when idle.
_REPLAY_TIMEOUT_S: Final = 2.0
# With nothing heard for this long, ask the buffer: a batch may have been lost before the
# subscription was in force, or the publisher may have restarted in silence.
_IDLE_CHECK_S: Final = 10.0
# Batches handled before other tasks get their turn.
_YIELD_EVERY_BATCHES: Final = 64


class EventSubscriber:
    """Delivers every batch once and in order, or says that some were lost.

    Args:
        endpoint: Where the publisher sends; connected to, never bound.
        replay_endpoint: Where its buffer answers; without one every gap clears.
        on_batch: Called with (sequence, batch) from the event loop.
        on_clear: Called with a reason when what was delivered so far no longer holds.
        topic: Prefix of the topics to take.
        first_sequence: Batch to go on with, where those before it are known already.
        last_digest: Digest of the batch before that one; if the publisher has another one there,
            or none any more, everything is cleared and taken from the start.
        clock: Monotonic seconds.
        context: Shared ZMQ context; without one the subscriber has its own and ends it.

    Attributes:
        last_event_s: When it came, on ``clock``; None before the first.
        gaps: Times that batches were missing.
        decode_errors: Messages that were no batch.
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
    ) -> None:
        self.gaps = 0
        self.decode_errors = 0
        self.last_event_s: float | None = None
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._on_batch = on_batch
        self._on_clear = on_clear
        self._topic = topic
        self._clock = clock
        self._context = context
        self._next = first_sequence
        self._last_digest = last_digest
        # Sequence -> payload digest of what came by replay and may still come live.
        self._replayed: dict[int, int] = {}
        self._check = asyncio.Event()
        self._epoch = 0

    @property
    def last_sequence(self) -> int | None:
        """Sequence of the last batch, None before the first."""
        return self._next - 1 if self._next else None

    @property
    def last_digest(self) -> int:
        """Digest of the payload of the last batch; with its sequence, where to go on."""
        return self._last_digest

    def restart(self) -> None:
        """Begin a new epoch: clear, then replay from 0. From the event loop only."""
        self._epoch += 1
        self._clear("new epoch")
        self._check.set()

    async def run(self) -> None:
        """Follow the publisher until cancelled; it may appear, vanish and return meanwhile."""
        context = self._context or zmq.asyncio.Context()
        socket = _connect(context, zmq.SUB, self._endpoint)
        try:
            socket.subscribe(self._topic)
            # After the subscription: what is published meanwhile queues and is recognised.
            await self._repair(context)
            await self._follow(context, socket)
        finally:
            socket.close()
            if self._context is None:
                context.term()

    async def _follow(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
        received = 0
        while True:
            message = asyncio.ensure_future(socket.recv_multipart())
            try:
                while not message.done():
                    await self._wait_for(message, context)
            finally:
                message.cancel()
            await self._take_live(message.result(), context)
            received += 1
            if received % _YIELD_EVERY_BATCHES == 0:
                await asyncio.sleep(0)

    async def _wait_for(
        self, message: asyncio.Future[list[bytes]], context: zmq.asyncio.Context
    ) -> None:
        """Wait for the message, for ``restart`` or until it is time to ask."""
        check = asyncio.ensure_future(self._check.wait())
        try:
            done, _ = await asyncio.wait(
                (message, check), timeout=_IDLE_CHECK_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            check.cancel()
        if message not in done:
            self._check.clear()
            await self._repair(context)

    async def _take_live(self, parts: list[bytes], context: zmq.asyncio.Context) -> None:
        frame = _parse(parts)
        if frame is None:
            self.decode_errors += 1
            return
        sequence, payload = frame
        if sequence < self._next:
            if self._replayed.get(sequence) == xxh3_64_intdigest(payload):
                return  # came by replay already
            self._clear("sequence started again")
        if sequence > self._next:
            if self._next:
                self.gaps += 1
            epoch = self._epoch
            await self._repair(context)
            if sequence < self._next or epoch != self._epoch:
                return  # the replay brought it, or it is of an epoch that is over
            if sequence > self._next:
                self._clear(f"batches {self._next} to {sequence - 1} are lost")
        self._replayed.clear()
        self._deliver(sequence, payload)

    async def _repair(self, context: zmq.asyncio.Context) -> None:
        """Ask for everything from the last known batch on, and deliver what is new."""
        if self._replay_endpoint is None:
            return
        answer = await self._ask(context, self._replay_endpoint)
        if answer is None:
            return  # nobody there
        if self._next and not self._continues(answer):
            self._clear("publisher restarted or its buffer moved on")
            answer = await self._ask(context, self._replay_endpoint) or []
        for at, (sequence, payload) in enumerate(answer, start=1):
            if sequence > self._next:
                # The buffer no longer reaches back to where we are.
                self._clear(f"batches {self._next} to {sequence - 1} are lost")
            if sequence >= self._next:
                self._deliver(sequence, payload)
                self._replayed[sequence] = self._last_digest
            if at % _YIELD_EVERY_BATCHES == 0:
                await asyncio.sleep(0)
                if self._check.is_set():
                    return  # a new epoch was declared: this answer is of the old one

    async def _ask(
        self, context: zmq.asyncio.Context, endpoint: str
    ) -> list[tuple[int, bytes]] | None:
        while True:
            self._check.clear()
            answer = await _replay(context, endpoint, max(self._next - 1, 0))
            if not self._check.is_set():
                return answer
            # A new epoch was declared meanwhile: the question was about the old one.

    def _continues(self, answer: list[tuple[int, bytes]]) -> bool:
        """Say whether an answer begins with the last known batch."""
        if not answer:
            return False
        sequence, payload = answer[0]
        return sequence == self._next - 1 and xxh3_64_intdigest(payload) == self._last_digest

    def _deliver(self, sequence: int, payload: bytes) -> None:
        self._next = sequence + 1
        self._last_digest = xxh3_64_intdigest(payload)
        self.last_event_s = self._clock()
        try:
            batch = decode_batch(payload)
        except EventDecodeError:
            self.decode_errors += 1
        else:
            self._on_batch(sequence, batch)

    def _clear(self, reason: str) -> None:
        self._next = 0
        self._replayed.clear()
        self._on_clear(reason)


def _connect(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.rcvhwm = _QUEUE_BATCHES
    socket.connect(endpoint)
    return socket


def _parse(parts: list[bytes]) -> tuple[int, bytes] | None:
    """Return sequence and payload, the last two of three or four parts."""
    if len(parts) not in (3, 4) or len(parts[-2]) != _SEQUENCE_BYTES:
        return None
    return int.from_bytes(parts[-2], "big"), parts[-1]


async def _replay(
    context: zmq.asyncio.Context, endpoint: str, first: int
) -> list[tuple[int, bytes]] | None:
    """Return what the buffer holds from ``first`` on, up to where it stopped answering.

    None if nothing came at all. A fresh socket each time, so that late answers to an earlier
    question are never taken for answers to this one.
    """
    socket = _connect(context, zmq.DEALER, endpoint)
    try:
        await socket.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")])
        answer: list[tuple[int, bytes]] = []
        while await socket.poll(_REPLAY_TIMEOUT_S * 1000):
            frame = _parse(await socket.recv_multipart())
            if frame is None:
                continue
            if frame[0] == _END_OF_REPLAY:
                return answer
            answer.append(frame)
        return answer or None
    finally:
        socket.close()
