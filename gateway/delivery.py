"""Give a worker's answer to the client: as one body, or piece by piece as it is generated.

The worker's body bytes are passed on as they are; only a content encoding is undone, and an event
stream that breaks off gets an error event at its end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from gateway import headers as http_headers
from gateway.dispatch import Outcome
from gateway.encoding import Inflater
from gateway.errors import GatewayError, ShuttingDown, UpstreamError, WorkerFailed
from gateway.sse import StreamObserver, usage_in_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.dispatch import Ticket, Usage
    from gateway.proxy import Proxy
    from gateway.record import RequestRecord
    from gateway.upstream import Response

# Answers up to this size are read before the client gets the first byte, so that a worker that
# breaks off in the middle still becomes a clean error; longer ones are passed on as they come.
MAX_WHOLE_BYTES = 1 << 20
# Proxies in front must neither store nor collect a stream.
_STREAM_HEADERS = [("cache-control", "no-cache"), ("x-accel-buffering", "no")]


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
        self._is_chunked = False

    async def run(self) -> web.StreamResponse:
        """Deliver the whole answer.

        Raises:
            WorkerFailed: If the worker broke off before the client got a byte.
            ConnectionError: If the client left.
        """
        answer = self._answer
        self._record.status = answer.status
        headers = http_headers.to_client(answer.headers)
        if (encoding := http_headers.find(answer.headers, b"content-encoding").decode()) and (
            Inflater.can(encoding)
        ):
            self._inflater = Inflater(encoding.strip().lower(), self._limits.decompressed_bytes)
            headers = [pair for pair in headers if pair[0].lower() != "content-encoding"]
        headers += own_headers(self._request, self._record)
        kind = http_headers.find(answer.headers, b"content-type")
        if kind.startswith(b"text/event-stream"):
            return await self._events(headers)
        return await self._body(headers)

    async def _body(self, headers: list[tuple[str, str]]) -> web.StreamResponse:
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
            return await self._long_body(data, headers)
        outcome = _outcome(answer.status)
        self._finish(outcome, usage_in_body(data) if outcome is Outcome.OK else None)
        return web.Response(body=data, status=answer.status, headers=headers)

    async def _long_body(self, begin: bytes, headers: list[tuple[str, str]]) -> web.StreamResponse:
        answer = self._answer
        if answer.content_length is not None and self._inflater is None:
            headers.append(("content-length", str(answer.content_length)))
        response = web.StreamResponse(status=answer.status, headers=headers)
        write = await self._open(response, lambda data: data)
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

    async def _events(self, headers: list[tuple[str, str]]) -> web.StreamResponse:
        answer, observer = self._answer, StreamObserver()
        names = {name.lower() for name, _ in headers}
        headers += [pair for pair in _STREAM_HEADERS if pair[0] not in names]
        response = web.StreamResponse(status=answer.status, headers=headers)
        is_waiting = True

        def observe(data: bytes) -> bytes:
            nonlocal is_waiting
            data = observer.feed(data)
            if is_waiting and observer.has_token:
                is_waiting = False
                self._ticket.first_token()
                self._record.ttft_s = self._clock() - self._started_s
            return data

        write = await self._open(response, observe)
        error: GatewayError | None = None
        try:
            await answer.pump(write, self._drain)
        except UpstreamError as failure:
            self._failure = failure
        except asyncio.CancelledError:
            if not self._lifecycle.is_over:
                raise
            error = self._shutdown()
        error = error or self._account(observer)
        self._close_stream(response, observer, error)
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

    def _close_stream(
        self, response: web.StreamResponse, observer: StreamObserver, error: GatewayError | None
    ) -> None:
        """Send what was held back, or the error event instead of it."""
        if error is None:
            self._send(observer.rest())
        else:
            response.force_close()
            self._send((b"\n\n" if observer.is_mid_event else b"") + error.event())

    async def _open(
        self, response: web.StreamResponse, transform: Callable[[bytes], bytes]
    ) -> Callable[[bytes], bool]:
        """Send the head; return what ``Response.pump`` writes pieces with.

        Pieces go to the transport directly: they are written from the worker's read callback,
        where nothing can be awaited. aiohttp itself writes nothing until ``write_eof``.
        """
        if self._request.version < HttpVersion11:
            response.force_close()
        await response.prepare(self._request)
        self._is_chunked = response.headers.get("transfer-encoding") == "chunked"
        protocol = self._request.protocol
        send, inflater = self._send, self._inflater

        def write(data: bytes) -> bool:
            if data := transform(data):
                send(data)
            return not protocol.writing_paused

        def write_inflated(data: bytes) -> bool:
            try:
                return write(inflater.feed(data)) if inflater is not None else True
            except UpstreamError as error:
                self._failure = error
                return False

        return write if inflater is None else write_inflated

    def _send(self, data: bytes) -> None:
        """Write body bytes in the framing that ``prepare`` announced."""
        transport = self._request.transport
        if transport is None or transport.is_closing() or not data:
            return
        if self._is_chunked:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            transport.write(data)

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
