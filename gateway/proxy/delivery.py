"""Give a worker's answer to the client: as one body, or piece by piece as it is generated.

The worker's body bytes are passed on as they are; only a content encoding is undone, and an event
stream that breaks off gets an error event at its end. Answers to a request that was translated are
translated back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    ShuttingDown,
    TotalTimeout,
    UpstreamError,
    WorkerFailed,
)
from gateway.protocols.errors import error_event
from gateway.protocols.events import parsed
from gateway.proxy.encoding import Inflater
from gateway.proxy.headers import RawPairs, to_client
from gateway.proxy.hearing import PLAIN
from gateway.proxy.sse import usage_in_body
from gateway.proxy.sse_typed import observer_for
from gateway.routing.dispatch import Outcome, Usage
from gateway.routing.outcome import OK

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.front.exchange import Exchange
    from gateway.proxy.forward import Proxy
    from gateway.proxy.hearing import Events, Hearing
    from gateway.proxy.sse import StreamObserver
    from gateway.routing.dispatch import Ticket
    from gateway.telemetry.record import RequestRecord
    from gateway.upstream.client import Response

# Answers up to this size are read before the client gets the first byte, so that a worker that
# breaks off in the middle still becomes a clean error; longer ones are passed on as they come.
MAX_WHOLE_BYTES = 1 << 20
# What is translated is read as a whole, however long: room for many choices of long texts.
MAX_TRANSLATED_BYTES = 32 << 20
_JSON = b"application/json"


class Delivery:
    """Delivers one answer of a worker; ``run`` is called once.

    Args:
        exchange: The client's request, not answered yet.
        answer: The worker's answer, its head read; closed by the caller.
        ticket: Finished here, as soon as the worker has done its part.
        record: Gets status, token counts and TTFT.
        proxy: Lends its limits, lifecycle and clock.
        started_s: When the request came.
        hearing: How the answer is read.
    """

    __slots__ = (
        *("_answer", "_clock", "_exchange", "_failure", "_hearing", "_inflater", "_lifecycle"),
        *("_limits", "_record", "_started_s", "_ticket"),
    )

    def __init__(
        self,
        exchange: Exchange,
        answer: Response,
        ticket: Ticket,
        record: RequestRecord,
        proxy: Proxy,
        started_s: float,
        hearing: Hearing = PLAIN,
    ) -> None:
        self._exchange = exchange
        self._hearing = hearing
        self._answer = answer
        self._ticket = ticket
        self._record = record
        self._limits = proxy.limits
        self._lifecycle = proxy.lifecycle
        self._clock = proxy.clock
        self._started_s = started_s
        self._inflater: Inflater | None = None
        self._failure: UpstreamError | None = None

    async def run(self) -> None:
        """Deliver the whole answer.

        Raises:
            WorkerFailed: If the worker broke off before the client got a byte.
            ConnectionError: If the client left.
        """
        answer = self._answer
        headers: RawPairs = answer.headers
        if Inflater.can(answer.content_encoding):
            self._inflater = Inflater(answer.content_encoding, self._limits.decompressed_bytes)
            headers = [pair for pair in headers if pair[0].lower() != b"content-encoding"]
        hearing, kind = self._hearing, answer.content_type
        is_stream = kind.startswith(b"text/event-stream")
        if hearing.translation is not None:
            kind = kind if is_stream else _JSON
            headers = [pair for pair in headers if pair[0].lower() != b"content-type"]
            headers.append((b"content-type", kind))
        lines = to_client(headers, answer.connection) + own_lines(self._exchange, self._record)
        if is_stream:
            await self._events(lines)
        elif hearing.passes_at_once and not kind.startswith(_JSON):
            await self._long_body(b"", lines)
        else:
            await self._body(lines)

    async def _body(self, lines: bytes) -> None:
        answer, translation = self._answer, self._hearing.translation
        try:
            if translation is None:
                data = await answer.read_up_to(MAX_WHOLE_BYTES)
            else:
                data = await answer.read(MAX_TRANSLATED_BYTES)
            if answer.complete and self._inflater is not None:
                data = self._inflater.feed(data)
                self._inflater.end()
            said = data if translation is None else translation.body(answer.status, data)
        except UpstreamError as error:
            self._ticket.finish(_cut(error))
            if isinstance(error, TotalTimeout):
                raise DeadlineExceeded(f"The answer was not complete in time: {error}.") from error
            raise WorkerFailed(
                f"Worker {self._ticket.worker.id} broke off in its answer: {error}.",
                code="answer_cut_off",
            ) from error
        if not answer.complete:
            await self._long_body(data, lines)
            return
        outcome = _outcome(answer.status)
        self._finish(outcome, usage_in_body(data) if outcome is OK else None)
        self._record.status = answer.status
        exchange = self._exchange
        if self._hearing.kept is not None and outcome is OK:
            self._keep(parsed(data))
        if exchange.trace is not None:
            exchange.trace.heard(data)
        exchange.answer(answer.status, lines, said)
        if exchange.is_full:
            await self._drain()

    async def _long_body(self, begin: bytes, lines: bytes) -> None:
        answer = self._answer
        length = answer.content_length if self._inflater is None else None
        write = self._inflated(self._begin(lines, length))
        write(begin)
        try:
            await answer.pump(write, self._drain)
        except UpstreamError as error:
            self._ticket.finish(_cut(error))
            self._exchange.abort()
        else:
            self._exchange.end()
        self._finish(_outcome(answer.status), None)

    async def _events(self, lines: bytes) -> None:
        answer, hearing = self._answer, self._hearing
        observer = observer_for(hearing.markers, strips_usage=hearing.strips_usage)
        translation = hearing.translation
        events = None if translation is None else translation.events()
        said = b"\r\n" + lines.lower()
        if said.find(b"\r\ncache-control:") < 0:  # dearer with ``in``: see ``sse``
            lines += b"cache-control: no-cache\r\n"
        if said.find(b"\r\nx-accel-buffering: no\r\n") < 0:
            lines += b"x-accel-buffering: no\r\n"
        send = send_plain = self._begin(lines, None)
        feed = observer.feed
        is_waiting = True

        def write(data: bytes) -> bool:
            nonlocal is_waiting
            is_open = send(feed(data))
            if is_waiting and observer.has_token:
                # Accounted for once it is on its way.
                is_waiting = False
                self._record.ttft_s = self._clock() - self._started_s
                self._ticket.first_token()
                self._keep(observer.first)
            return is_open

        if events is not None:
            send = self._translated(events, send)
        error: GatewayError | None = None
        if not answer.buffered_bytes:
            send_plain(b"")  # the client sees at once that it is being answered
        try:
            await answer.pump(self._inflated(write), self._drain)
        except UpstreamError as failure:
            self._failure = failure
        except asyncio.CancelledError:
            if not self._lifecycle.is_over:
                raise
            error = self._shutdown()
        finally:
            if observer.has_token:
                self._record.counted_tokens = observer.num_events
        error = error or self._account(observer)
        if error is None:
            send(observer.rest())
            if events is not None:
                send_plain(events.end())
        else:
            self._exchange.keep_alive = False
            is_cut = observer.is_mid_event and events is None
            send_plain((b"\n\n" if is_cut else b"") + error_event(error, self._exchange.path))
        self._exchange.end()
        if self._exchange.is_full:
            await self._drain()

    def _shutdown(self) -> GatewayError:
        """End the stream as cancelled by this gateway; the error to tell."""
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        self._ticket.finish(Outcome.CANCELLED)
        return ShuttingDown("The gateway was shut down before the stream ended.")

    def _account(self, observer: StreamObserver) -> GatewayError | None:
        """Finish the ticket of a stream that ended; the error to tell if it did not end well."""
        end = observer.end(is_cut=self._failure is not None)
        if (trace := self._exchange.trace) is not None:
            trace.heard(observer.first, *reversed(list(observer.events_from_last())))
        if end.is_error:
            outcome = Outcome.UPSTREAM_ERROR
        elif end.is_complete:
            outcome = OK
        else:
            outcome = _cut(self._failure)
        self._finish(outcome, end.usage)
        if outcome is Outcome.DEADLINE:
            return DeadlineExceeded(f"The stream did not end in time: {self._failure}.")
        if outcome is not Outcome.TRUNCATED:
            return None
        reason = self._failure or "the stream ended without a finish reason"
        return WorkerFailed(
            f"Worker {self._ticket.worker.id} broke off in its stream: {reason}.",
            code="stream_cut_off",
        )

    def _begin(self, lines: bytes, length: int | None) -> Callable[[bytes], bool]:
        """Begin the answer; return what writes its body."""
        write = self._exchange.begin(self._answer.status, lines, length)
        self._record.status = self._answer.status
        return write

    def _translated(
        self, events: Events, write: Callable[[bytes], bool]
    ) -> Callable[[bytes], bool]:
        """Put the translation of a stream before ``write``."""

        def translate(data: bytes) -> bool:
            try:
                return write(events.feed(data))
            except UpstreamError as error:
                self._failure = error
                return False

        return translate

    def _inflated(self, write: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
        """Put the undoing of the worker's content encoding, if there is one, before ``write``."""
        inflater = self._inflater
        if inflater is None:
            return write

        def inflate(data: bytes) -> bool:
            try:
                return write(inflater.feed(data))
            except UpstreamError as error:
                self._failure = error
                return False

        return inflate

    async def _drain(self) -> None:
        """Wait for a slow client, though not for ever."""
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(self._limits.request_s):
                await self._exchange.drain()
        except TimeoutError as error:
            self._exchange.abort()
            raise ConnectionResetError("the client took too long to read its answer") from error

    def _keep(self, said: object) -> None:
        """Tell what the answer is to whoever wants to know."""
        if self._hearing.kept is not None and isinstance(said, dict):
            self._hearing.kept(said)

    def _finish(self, outcome: Outcome, usage: Usage | None) -> None:
        if usage is None or self._hearing.is_ours:
            self._ticket.finish(outcome, usage)
        else:
            # Of another prompt than the one that was read here nothing is to be learned.
            self._ticket.finish(outcome, Usage(completion_tokens=usage.completion_tokens))
            self._ticket.observed_hit_tokens = usage.cached_tokens
        if usage is not None:
            if (trace := self._exchange.trace) is not None:
                trace.reported(usage)
            self._record.prompt_tokens = usage.prompt_tokens or self._record.prompt_tokens
            self._record.completion_tokens = usage.completion_tokens


def own_lines(exchange: Exchange, record: RequestRecord) -> bytes:
    """Return what the gateway says about its own part, more of it when asked to explain."""
    lines = b"x-request-id: %b\r\nserver-timing: route;dur=%.3f, queue;dur=%.3f\r\n" % (
        record.request_id.encode(),
        record.route_s * 1000,
        record.queue_s * 1000,
    )
    if record.canonicalized:
        lines += f"x-warmlane-canonicalized: {record.canonicalized}\r\n".encode()
    if record.worker and exchange.headers.get("x-warmlane-explain") == "1":
        lines += (
            f"x-warmlane-worker: {record.worker}\r\n"
            f"x-warmlane-reason: {record.reason}\r\n"
            f"x-warmlane-prompt-tokens: {record.prompt_tokens}\r\n"
            f"x-warmlane-hit-tokens: {record.predicted_hit_tokens}\r\n"
        ).encode()
    return lines + exchange.limit_lines


def _outcome(status: int) -> Outcome:
    if status < 400:
        return OK
    return Outcome.REJECTED if status < 500 else Outcome.UPSTREAM_ERROR


def _cut(failure: UpstreamError | None) -> Outcome:
    """Return how an answer ended that was not complete."""
    return Outcome.DEADLINE if isinstance(failure, TotalTimeout) else Outcome.TRUNCATED
