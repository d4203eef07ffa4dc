"""One request of a client and the answer to it, as the proxy sees them.

The proxy knows nothing of the server in front of it: aiohttp (``gateway/proxy/responses.py``) and
the gateway's own front (``gateway/front/connection.py``) both give it this. What is written to the
client, and how it is framed, is decided here once for both.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

from gateway.errors import BodyTooLarge, ExpectationFailed, InvalidRequest
from gateway.front.decoding import content_coding
from gateway.protocols.errors import error_body

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from gateway.errors import GatewayError
    from gateway.tracing import Trace

    Handler = Callable[["Exchange"], Awaitable[None]]

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_CLOSE = b"connection: close\r\n\r\n"
# What is said of the time of a request that was neither routed nor queued.
NO_TIMING = "route;dur=0.000, queue;dur=0.000"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class FrontLimits(Protocol):
    """The bounds that a front needs."""

    @property
    def head_bytes(self) -> int:
        """Most bytes of a head."""

    @property
    def headers(self) -> int:
        """Most headers of a request."""

    @property
    def head_s(self) -> float:
        """Time from a request's first byte to the end of its head."""

    @property
    def body_bytes(self) -> int:
        """Most bytes of a body."""

    @property
    def decompressed_bytes(self) -> int:
        """Most bytes of a body once it is decompressed."""

    @property
    def body_s(self) -> float:
        """Time from the end of a head to the end of its body."""

    @property
    def idle_s(self) -> float:
        """Time between requests."""


class ClientProtocol(Protocol):
    """The protocol of a client's socket."""

    @property
    def writing_paused(self) -> bool:
        """Whether more is waiting to be sent than should."""


class RequestHead:
    """The headers of a request; the same object may stand for several requests with equal ones.

    Args:
        raw: Pairs as sent, in order.
        headers: The same by lower-case name; of a repeated one the first.
        num_hosts: How many ``host`` headers there are.

    Attributes:
        lines: What the proxy made of them for the worker, kept for the next request; "" before.
    """

    __slots__ = ("headers", "lines", "num_hosts", "raw")

    def __init__(
        self, raw: Sequence[tuple[bytes, bytes]], headers: Mapping[str, str], num_hosts: int
    ) -> None:
        self.raw = raw
        self.headers = headers
        self.num_hosts = num_hosts
        self.lines = b""


class Exchange(ABC):
    """A request and its answer; used by the one task that serves it.

    Attributes:
        path: Path of the target, without a query.
        head: Its headers.
        headers: The same by lower-case name; of a repeated one the first.
        content_length: None if the body is chunked; 0 if there is none.
        is_http11: Whether the client speaks HTTP/1.1, and so chunks and interim answers.
        keep_alive: Whether the connection goes on after the answer; may be set to False.
        is_begun: Whether a byte of the answer was sent.
        is_ended: Whether the whole answer was sent.
        query: What stands behind the ``?`` of the target, empty if nothing does.
        limit_lines: Header lines of its answer, whatever that is, that tell of its tenant's limits.
        trace: Notes what happens to it; None, as for most, where it is not traced.
    """

    __slots__ = (
        *("_is_chunked", "_protocol", "content_length", "head", "headers", "is_begun", "is_ended"),
        *("is_http11", "keep_alive", "limit_lines", "path", "query", "trace"),
    )

    def __init__(
        self,
        path: str,
        head: RequestHead,
        protocol: ClientProtocol,
        *,
        content_length: int | None,
        is_http11: bool,
        keep_alive: bool,
    ) -> None:
        self.path = path
        self._protocol = protocol
        self.head = head
        self.headers = head.headers
        self.content_length = content_length
        self.is_http11 = is_http11
        # An answer to HTTP/1.0 ends by closing: what else its clients understand is not known.
        self.keep_alive = keep_alive and is_http11
        self.is_begun = False
        self.is_ended = False
        self.limit_lines = b""
        self.query = ""
        self.trace: Trace | None = None
        self._is_chunked = False

    # What a front provides.

    @property
    @abstractmethod
    def transport(self) -> asyncio.Transport | None:
        """The client's connection; None once it is lost."""

    @property
    @abstractmethod
    def is_body_read(self) -> bool:
        """Whether all of the request has come."""

    @abstractmethod
    async def read_body(self) -> bytes:
        """Return the whole body, decompressed.

        Raises:
            InvalidRequest: If it is too long, broken or does not come in time.
        """

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the client has taken enough to send more.

        Raises:
            ConnectionError: If it has left.
        """

    # What is the same for every front.

    @property
    def is_full(self) -> bool:
        """Whether more is waiting to be sent than should."""
        return self._protocol.writing_paused

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be sent any more."""
        transport = self.transport
        return transport is None or transport.is_closing()

    def admit_body(self, max_bytes: int) -> None:
        """Check what the head says, before any of the body is waited for; ask for it if need be.

        Raises:
            InvalidRequest: If the request cannot be served, whatever its body is.
        """
        num_hosts = self.head.num_hosts
        if num_hosts != 1 and (self.is_http11 or num_hosts):
            # Whoever sent it and whoever passed it on may not agree on what follows either.
            self.keep_alive = False
            raise InvalidRequest("Expected one host header.", code="bad_host")
        length = self.content_length
        if length is not None and length > max_bytes:
            raise BodyTooLarge(f"The body is {length} bytes, the limit is {max_bytes}.")
        content_coding(self.headers.get("content-encoding"))
        # RFC 9110, 10.1.1: an HTTP/1.0 client's expectation is to be ignored.
        expected = self.headers.get("expect") if self.is_http11 else None
        if expected is None:
            return
        if expected.lower() != "100-continue":
            raise ExpectationFailed("The only expectation known here is 100-continue.")
        transport = self.transport
        if transport is not None and not self.is_body_read:
            transport.write(CONTINUE)

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a whole answer.

        Args:
            status: Of the answer.
            lines: Header lines, each with its end; without framing.
            body: The whole body.

        Raises:
            ConnectionError: If the client has left.
        """
        transport, head = self._begun(status, lines, len(body))
        transport.write(head + body)
        self.is_ended = True

    def refuse(self, error: GatewayError, lines: bytes) -> None:
        """Send ``error`` in its API's shape, with ``lines`` added; nothing if the client has left.

        A connection with a rest of its request unread does not go on.
        """
        if self.is_gone:
            return
        self.keep_alive = self.keep_alive and self.is_body_read
        self.answer(error.status, error_lines(error) + lines, error_body(error, self.path))

    def begin(self, status: int, lines: bytes, length: int | None) -> Callable[[bytes], bool]:
        """Begin an answer and return what writes its body.

        That may be called from any callback, and returns False when the client is slow or has left.
        The head goes with the first piece, in one packet; an empty piece sends it alone.
        Everything it needs is bound once: with hundreds of streams, each attribute it had to look
        up per piece would be a cache miss.

        Args:
            status: Of the answer.
            lines: Header lines, each with its end; without framing.
            length: Of the body; None if it is not known.

        Raises:
            ConnectionError: If the client has left.
        """
        transport, head = self._begun(status, lines, length)
        is_chunked, is_closing, send = self._is_chunked, transport.is_closing, transport.write
        protocol = self._protocol

        def write(data: bytes) -> bool:
            nonlocal head
            if is_closing():
                return False
            if data and is_chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if head:
                data, head = head + data, b""
            if data:
                send(data)
            return not protocol.writing_paused

        return write

    def end(self) -> None:
        """End a body that was begun."""
        transport = self.transport
        self.is_ended = True
        if self._is_chunked and transport is not None and not transport.is_closing():
            transport.write(b"0\r\n\r\n")

    def abort(self) -> None:
        """Break the connection off, so that the client cannot take a part for the whole."""
        if (transport := self.transport) is not None:
            transport.abort()

    def _begun(
        self, status: int, lines: bytes, length: int | None
    ) -> tuple[asyncio.Transport, bytes]:
        """Return where an answer goes, and its head."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        self.is_begun = True
        self._is_chunked = length is None and self.is_http11
        if self._is_chunked:
            framing = b"transfer-encoding: chunked\r\n"
        elif length is None or status in (204, 304):
            framing = b""
        else:
            framing = b"content-length: %d\r\n" % length
        if length is None and not self._is_chunked:
            self.keep_alive = False
        end = b"\r\n" if self.keep_alive else _CLOSE
        return transport, b"".join((_start(status), lines, framing, end))


def error_lines(error: GatewayError) -> bytes:
    """Return the header lines of an error of the gateway's own."""
    pairs = [("content-type", "application/json"), ("server", "warmlane"), *error.http_headers()]
    return "".join([f"{name}: {value}\r\n" for name, value in pairs]).encode()


def refusal(error: GatewayError) -> bytes:
    """Return the whole answer to what is no request, after which the connection ends."""
    body = error.openai_body()
    named = (
        f"x-request-id: {os.urandom(16).hex()}\r\nserver-timing: {NO_TIMING}\r\n"
        f"content-length: {len(body)}\r\n"
    ).encode()
    return b"".join((_start(error.status), error_lines(error), named, _CLOSE, body))


def _start(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
