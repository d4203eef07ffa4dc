"""One connection of a client, served by the gateway's own front.

It reads heads, and serves itself the requests whose first line is one of the front's: POSTs to the
paths of inference, one at a time, in order. The first request of any other kind hands the
connection over to the reference front (aiohttp), with the bytes read so far, for good: whatever is
odd, rare or broken is answered there. Bytes behind a request wait, unread beyond
``MAX_HELD_BYTES``, until it is answered.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import TYPE_CHECKING

from gateway.errors import BodyTimeout, HeadTooLarge, InvalidRequest
from gateway.front.exchange import refusal
from gateway.front.framing import ChunkedBody, SizedBody
from gateway.front.head import Head
from gateway.front.raw_exchange import RawExchange
from gateway.sockets import probe_peer

if TYPE_CHECKING:
    from gateway.front.exchange import FrontLimits
    from gateway.front.raw import RawFront

# More digits than any length has; within them, a number is read exactly.
_MAX_DIGITS = 15
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,%d})\r\n" % _MAX_DIGITS)
# Held for the next request while one is served. A client that leaves is noticed only while its
# connection is read, so a pipelined request must not stop that at once.
MAX_HELD_BYTES = 64 << 10
# How long the rest of a refused request is read, so that its client can read the refusal.
LINGER_S = 2.0


class RawConnection(asyncio.Protocol):
    """The protocol of one client's socket.

    ``deadline_s`` is the loop time at which the front calls ``expire``.
    """

    __slots__ = (
        *("_after_length", "_before", "_body", "_called", "_drained", "_exchange", "_front"),
        *("_held", "_is_lingering", "_is_paused", "_known", "_task", "deadline_s", "loop"),
        *("transport", "writing_paused"),
    )

    def __init__(self, front: RawFront, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.writing_paused = False
        self.deadline_s = math.inf
        self._front = front
        self._exchange: RawExchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._called: asyncio.Future[None] | None = None
        self._known: Head | None = None
        self._before = self._after_length = b""
        self._body: SizedBody | ChunkedBody | None = None
        self._held = b""
        self._is_paused = False
        self._is_lingering = False
        self._drained: asyncio.Future[None] | None = None

    # asyncio's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket."""
        self.transport = transport  # type: ignore[assignment]
        self.deadline_s = self.loop.time() + self._front.limits.idle_s
        self._front.remember(self)
        probe_peer(transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes: of a body, of the next request, or of what nobody wants any more."""
        if self._body is not None:
            self._feed_body(self._body, data)
        elif self._exchange is not None or self.writing_paused:
            self._hold(self._held + data)
        elif not self._is_lingering:
            self._take(self._held + data if self._held else data)

    def eof_received(self) -> None:
        """Treat a client that sends no more as one that has left, as the reference does."""
        self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what is under way."""
        self.transport = None
        self._front.forget(self)
        self.resume_writing()
        self._cancel()

    def pause_writing(self) -> None:
        """Note that the client is slower than what is sent to it."""
        self.writing_paused = True

    def resume_writing(self) -> None:
        """Go on with what waited for the client."""
        self.writing_paused = False
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)
        elif self._is_idle:
            self._next()

    # Called by the front and the exchange.

    @property
    def limits(self) -> FrontLimits:
        """Bounds on what this client may send."""
        return self._front.limits

    async def drain(self) -> None:
        """Wait until writing may go on.

        Raises:
            ConnectionError: If the client has left.
        """
        if self.writing_paused:
            self._drained = self.loop.create_future()
            await self._drained
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError("the client has left")

    def expire(self) -> None:
        """Act on a deadline that is over."""
        self.deadline_s = math.inf
        limits = self._front.limits
        if self._exchange is not None:
            late = f"The body did not arrive within {limits.body_s:g} s."
            self._fail_body(self._exchange, BodyTimeout(late))
        elif self._held and not self._is_lingering:
            late = f"The head did not arrive within {limits.head_s:g} s."
            self._refuse(BodyTimeout(late))
        else:
            self.abort()

    def abort(self) -> None:
        """Close the socket at once."""
        if self.transport is not None:
            self.transport.abort()

    # Reading.

    def _take(self, data: bytes) -> None:
        """Read the beginning of a request, and serve it once its head is there."""
        limits = self._front.limits
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            self._take_part(data)
            return
        hot = self._front.hot_lines.get(data[: data.find(b"\r\n") + 2])
        if hot is None:
            self._hand_over(data)
            return
        self._held = b""
        try:
            if end > limits.head_bytes:
                raise _too_large(limits.head_bytes)
            head, length = self._parse(data, end, is_http11=hot[1])
        except InvalidRequest as error:
            self._refuse(error)
            return
        exchange = self._exchange = RawExchange(self, head, hot[0], length)
        if length == len(data) - end:
            exchange.body = data[end:]
            self.deadline_s = math.inf
        else:
            self._begin_body(length, data[end:])
        if self._task is None:
            self._task = self.loop.create_task(self._serve())
        else:
            self._call()

    def _parse(self, data: bytes, end: int, *, is_http11: bool) -> tuple[Head, int | None]:
        """Return the head that ends at ``end``, and the body's length; None if it is chunked.

        A client's heads are mostly the same but for the length of the body, so the last one is kept
        and compared: parsing it again would be a third of what the front does.
        """
        known, before, after = self._known, self._before, self._after_length
        if known is not None and data.startswith(before) and data.endswith(after, 0, end):
            digits = data[len(before) : end - len(after)]
            if digits.isdigit() and len(digits) <= _MAX_DIGITS:
                return known, int(digits)
        head = Head(data[:end], is_http11=is_http11, max_headers=self._front.limits.headers)
        if (match := _LENGTH.search(data, 0, end)) is not None:
            at, to = match.span(1)
            self._known, self._before, self._after_length = head, data[:at], data[to:end]
        return head, head.content_length

    def _begin_body(self, length: int | None, data: bytes) -> None:
        """Begin a body that did not come together with its head, or with more behind it."""
        limits = self._front.limits
        self.deadline_s = self.loop.time() + limits.body_s
        if length is not None and length > limits.body_bytes:
            self._pause()  # it is refused from its head; nothing of it is kept
            return
        body = self._body = ChunkedBody(limits.body_bytes) if length is None else SizedBody(length)
        self._feed_body(body, data)

    def _take_part(self, data: bytes) -> None:
        """Keep a head that goes on, unless it is too long or can no longer become a valid one."""
        limits = self._front.limits
        is_too_large = len(data) > limits.head_bytes
        is_broken = not data[:1].isalpha() or data.count(b"\n") != data.count(b"\r\n")
        if not is_too_large and not is_broken:
            if not self._held:
                self.deadline_s = self.loop.time() + limits.head_s
            self._held = data
        elif not data.startswith(tuple(self._front.hot_lines)):
            self._hand_over(data)
        elif is_broken:
            self._refuse(InvalidRequest("The request is not valid HTTP: a line has no CRLF."))
        else:
            self._refuse(_too_large(limits.head_bytes))

    def _feed_body(self, body: SizedBody | ChunkedBody, data: bytes) -> None:
        exchange = self._exchange
        assert exchange is not None  # a body belongs to one
        try:
            rest = body.feed(data)
        except InvalidRequest as error:
            self._fail_body(exchange, error)
            return
        if rest is None:
            return
        self._body = None
        self.deadline_s = math.inf
        exchange.body = body.value()
        exchange.wake()
        if rest:
            self._hold(rest)

    def _fail_body(self, exchange: RawExchange, error: InvalidRequest) -> None:
        self._body = None
        self.deadline_s = math.inf
        exchange.failure = error
        exchange.wake()

    def _hold(self, data: bytes) -> None:
        """Keep bytes of requests to come."""
        self._held = data
        if len(data) > MAX_HELD_BYTES:
            self._pause()

    def _pause(self) -> None:
        if not self._is_paused and self.transport is not None:
            self._is_paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and self.transport is not None and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    # Serving and ending.

    async def _serve(self) -> None:
        """Serve the connection's requests one after the other; its only task."""
        while (exchange := self._exchange) is not None:
            try:
                await self._front.handler(exchange)
            except ConnectionError:
                pass  # the client has left
            finally:
                self._exchange = self._body = None
                self._after(exchange)
            if self._is_idle:
                self._called = self.loop.create_future()
                await self._called

    @property
    def _is_idle(self) -> bool:
        return self._exchange is None and self.transport is not None

    def _call(self) -> None:
        """Let the task look for a request, or see that none will come."""
        called, self._called = self._called, None
        if called is not None and not called.done():
            called.set_result(None)

    def _cancel(self) -> None:
        """End the task, whatever it does."""
        if self._exchange is None:
            self._call()
        elif self._task is not None:
            self._task.cancel()

    def _after(self, exchange: RawExchange) -> None:
        """Go on with the connection, or end it."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if not exchange.is_ended:
            transport.abort()
        elif not exchange.keep_alive or exchange.body is None:
            self._linger(is_all_read=exchange.body is not None and not self._held)
        else:
            self.deadline_s = self.loop.time() + self._front.limits.idle_s
            if self._held and not self.writing_paused:
                self._next()

    def _next(self) -> None:
        """Take up what was held while a request was served."""
        data, self._held = self._held, b""
        self._resume()
        if data:
            self._take(data)

    def _refuse(self, error: InvalidRequest) -> None:
        """Answer what is not a request that could be served."""
        if self.transport is not None:
            self.transport.write(refusal(error))
            self._linger(is_all_read=False)

    def _linger(self, *, is_all_read: bool) -> None:
        """End the connection so that the client can still read what was sent to it.

        Closed with bytes unread, it would be reset, and the reset may overtake the answer.
        """
        transport = self.transport
        if transport is None:
            return
        self._held = b""
        if is_all_read:
            transport.close()
            return
        self._is_lingering = True
        self.deadline_s = self.loop.time() + LINGER_S
        if transport.can_write_eof():
            transport.write_eof()
        self._resume()

    def _hand_over(self, data: bytes) -> None:
        """Give the connection to the reference front, which gets ``data`` first."""
        transport, self.transport = self.transport, None
        if transport is None:
            return
        self._front.forget(self)
        self._call()
        protocol = self._front.reference()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(data)


def _too_large(limit_bytes: int) -> HeadTooLarge:
    return HeadTooLarge(f"The head of the request is longer than {limit_bytes} bytes.")
