"""Give a worker's answer to the client: as one body, or piece by piece as it is generated.

The worker's body bytes are passed on as they are; only a content encoding is undone, and an event
stream that breaks off gets an error event at its end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from gateway.errors import GatewayError, ShuttingDown, UpstreamError, WorkerFailed
from gateway.proxy.encoding import Inflater
from gateway.proxy.headers import RawPairs, to_client
from gateway.proxy.responses import SplicedResponse
from gateway.proxy.sse import StreamObserver, usage_in_body
from gateway.routing.dispatch import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.proxy.forward import Proxy
    from gateway.routing.dispatch import Ticket, Usage
    from gateway.telemetry.record import RequestRecord
    from gateway.upstream.client import Response

# Answers up to this size are read before the client gets the first byte, so that a worker that
# breaks off in the middle still becomes a clean error; longer ones are passed on as they come.
MAX_WHOLE_BYTES = 1 << 20


class Delivery:
    """Delivers one answer of a worker; ``run`` is called once.

    Args:
        request: The client's request.
        answer: The worker's answer, its head read; closed by the caller.
        ticket: Finished here, as soon as the worker has done its part.
        record: Gets status, token counts and TTFT.
        proxy: Lends its limits, lifecycle and clock.
        started_s: When the request came.
    """

    def __init__(
        self,
        request: web.Request,
        answer: Response,
        ticket: Ticket,
        record: RequestRecord,
        proxy: Proxy,
        started_s: float,
    ) -> None:
        self._request = request
        self._answer = answer
        self._ticket = ticket
        self._record = record
        self._limits = proxy.limits
        self._lifecycle = proxy.lifecycle
        self._clock = proxy.clock
        self._started_s = started_s
        self._inflater: Inflater | None = None
        self._failure: UpstreamError | None = None

    async def run(self) -> web.StreamResponse:
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
        own = own_headers(self._request, self._record)
        lines = (
            to_client(headers, answer.connection)
            + "".join([f"{name}: {value}\r\n" for name, value in own]).encode()
        )
        if answer.content_type.startswith(b"text/event-stream"):
            return await self._events(lines)
        return await self._body(lines)

    async def _body(self, lines: bytes) -> web.StreamResponse:
        answer = self._answer
        try:
            data = await answer.read_up_to(MAX_WHOLE_BYTES)
            if answer.complete and self._inflater is not None:
                data = self._inflater.feed(data)
                self._inflater.end()
        except UpstreamError as error:
            self._ticket.finish(Outcome.TRUNCATED)
            raise WorkerFailed(
                f"Worker {self._ticket.worker.id} broke off in its answer: {error}.",
                code="answer_cut_off",
            ) from error
        if not answer.complete:
            return await self._long_body(data, lines)
        outcome = _outcome(answer.status)
        self._finish(outcome, usage_in_body(data) if outcome is Outcome.OK else None)
        self._record.status = answer.status
        return SplicedResponse(answer.status, lines, body=data)

    async def _long_body(self, begin: bytes, lines: bytes) -> web.StreamResponse:
        answer = self._answer
        length = answer.content_length if self._inflater is None else None
        response = SplicedResponse(answer.status, lines, length=length)
        write = self._inflated(await self._open(response))
        write(begin)
        try:
            await answer.pump(write, self._drain)
        except UpstreamError:
            self._ticket.finish(Outcome.TRUNCATED)
            # The client must not take the part for the whole.
            if self._request.transport is not None:
                self._request.transport.abort()
        self._finish(_outcome(answer.status), None)
        return response

    async def _events(self, lines: bytes) -> web.StreamResponse:
        answer, observer = self._answer, StreamObserver()
        if b"\r\ncache-control:" not in b"\r\n" + lines.lower():
            lines += b"cache-control: no-cache\r\n"
        response = SplicedResponse(answer.status, lines + b"x-accel-buffering: no\r\n")
        send, feed = await self._open(response), observer.feed
        is_waiting = True

        def write(data: bytes) -> bool:
            nonlocal is_waiting
            data = feed(data)
            if is_waiting and observer.has_token:
                is_waiting = False
                self._ticket.first_token()
                self._record.ttft_s = self._clock() - self._started_s
            return send(data)

        error: GatewayError | None = None
        try:
            await answer.pump(self._inflated(write), self._drain)
        except UpstreamError as failure:
            self._failure = failure
        except asyncio.CancelledError:
            if not self._lifecycle.is_over:
                raise
            error = self._shutdown()
        error = error or self._account(observer)
        if error is None:
            send(observer.rest())
        else:
            response.force_close()
            send((b"\n\n" if observer.is_mid_event else b"") + error.event())
        await response.write_eof()
        return response

    def _shutdown(self) -> GatewayError:
        """End the stream as cancelled by this gateway; the error to tell."""
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        self._ticket.finish(Outcome.CANCELLED)
        return ShuttingDown("The gateway was shut down before the stream ended.")

    def _account(self, observer: StreamObserver) -> GatewayError | None:
        """Finish the ticket of a stream that ended; the error to tell if it did not end well."""
        end = observer.end()
        if end.is_error:
            outcome = Outcome.UPSTREAM_ERROR
        elif end.is_complete:
            outcome = Outcome.OK
        else:
            outcome = Outcome.TRUNCATED
        self._finish(outcome, end.usage)
        if outcome is not Outcome.TRUNCATED:
            return None
        reason = self._failure or "the stream ended without a finish reason"
        return WorkerFailed(
            f"Worker {self._ticket.worker.id} broke off in its stream: {reason}.",
            code="stream_cut_off",
        )

    async def _open(self, response: SplicedResponse) -> Callable[[bytes], bool]:
        """Send the head; return what writes the body."""
        if self._request.version < HttpVersion11:
            response.force_close()
        await response.prepare(self._request)
        self._record.status = response.status
        return response.writer()

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
                await self._request.writer.drain()
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client took too long to read its answer") from error

    def _finish(self, outcome: Outcome, usage: Usage | None) -> None:
        self._ticket.finish(outcome, usage)
        if usage is not None:
            self._record.prompt_tokens = usage.prompt_tokens or self._record.prompt_tokens
            self._record.completion_tokens = usage.completion_tokens


def own_headers(request: web.Request, record: RequestRecord) -> list[tuple[str, str]]:
    """Return what the gateway says about its own part, more of it when asked to explain."""
    timing = f"route;dur={record.route_s * 1000:.3f}, queue;dur={record.queue_s * 1000:.3f}"
    headers = [("x-request-id", record.request_id), ("server-timing", timing)]
    if request.headers.get("x-warmlane-explain") == "1" and record.worker:
        headers += [
            ("x-warmlane-worker", record.worker),
            ("x-warmlane-reason", record.reason),
            ("x-warmlane-prompt-tokens", str(record.prompt_tokens)),
            ("x-warmlane-hit-tokens", str(record.predicted_hit_tokens)),
        ]
    return headers


def _outcome(status: int) -> Outcome:
    if status < 400:
        return Outcome.OK
    return Outcome.REJECTED if status < 500 else Outcome.UPSTREAM_ERROR
