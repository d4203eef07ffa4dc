"""One HTTP/1.1 connection to a worker, parsed by httptools.

Used only by ``gateway/upstream/client.py``. A connection carries one exchange at a time and goes
back to its pool only after a complete answer with nothing left over on either side.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import httptools

from gateway.errors import MalformedAnswer, ResetBeforeFirstByte, ResetMidStream, UpstreamError
from gateway.sockets import probe_peer
from gateway.upstream.response import Headers, Response, StaleConnection

if TYPE_CHECKING:
    from gateway.upstream.client import Upstream

# An engine's head is a few hundred bytes; this leaves room for odd ones and bounds memory.
MAX_HEAD_BYTES = 64 << 10
# Headers that decide how an answer is read.
_READ_HERE = frozenset(
    b"connection content-encoding content-length content-type transfer-encoding".split()
)


class Connection(asyncio.Protocol):
    """The protocol of one socket: sends a request, parses the answer, goes back to its pool.

    ``deadline_s`` is the loop time at which ``Upstream`` fails the exchange.
    """

    __slots__ = (
        *("_head_bytes", "_headers", "_is_head_request", "_is_interim", "_is_message_complete"),
        *(
            "_is_paused",
            "_is_reusable",
            "_is_stray",
            "_is_until_close",
            "_num_pieces",
            "_parser",
            "_pieces",
        ),
        *("_response", "_stale_before_s", "_total_s", "_transport", "_upstream"),
        *("deadline_s", "head_done", "idle_since_s", "loop", "on_body"),
    )

    def __init__(self, upstream: Upstream, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.deadline_s = math.inf
        self.idle_since_s = 0.0
        self.head_done = False
        self.on_body = (pieces := list[bytes]()).append  # looked up once by the parser
        self._pieces = pieces
        self._upstream = upstream
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._headers: Headers = []
        self._head_bytes = 0
        self._is_interim = False
        self._is_head_request = False
        self._is_until_close = False
        self._is_message_complete = False
        self._is_stray = False
        self._num_pieces = 0  # of the answer, once it is complete
        self._is_paused = False
        self._is_reusable = False
        self._stale_before_s = 0.0
        self._total_s = math.inf

    def send(
        self,
        head: bytes,
        body: bytes,
        is_head_request: bool,
        stale_window_s: float,
        first_byte_s: float,
        total_s: float,
    ) -> Response:
        """Send one request and return its answer, of which nothing has come yet.

        If the connection ends within ``stale_window_s`` and no byte came, the answer fails with
        ``StaleConnection``.

        Raises:
            ResetBeforeFirstByte: If the connection is closed already.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ResetBeforeFirstByte("connection closed as soon as it was made")
        response = self._response = Response(self)
        now_s = self.loop.time()
        self.deadline_s = now_s + first_byte_s
        self._total_s = now_s + total_s
        self._stale_before_s = now_s + stale_window_s
        self._head_bytes = 0
        self._headers = []  # trailers of the answer before
        self._is_head_request = is_head_request
        self.head_done = self._is_message_complete = self._is_until_close = False
        transport.writelines((head, body) if body else (head,))
        return response

    def fail(self, error: UpstreamError | StaleConnection) -> None:
        """Abort and end the exchange, if there is one, with ``error``."""
        response, self._response = self._response, None
        self.abort()
        if response is not None:
            response.fail(error)

    def abort(self) -> None:
        """Close the socket at once, dropping what is unsent."""
        self._response = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_usable(self) -> bool:
        """Whether a request can be sent now."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not self._is_stray

    def pause_reading(self) -> None:
        """Stop taking bytes from the socket."""
        transport = self._transport
        if not self._is_paused and transport is not None and not transport.is_closing():
            self._is_paused = True
            transport.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes again."""
        transport = self._transport
        if self._is_paused and transport is not None and not transport.is_closing():
            self._is_paused = False
            transport.resume_reading()

    # asyncio's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket."""
        self._transport = transport  # type: ignore[assignment]
        probe_peer(transport)
        self._upstream.remember(self)

    def data_received(self, data: bytes) -> None:
        """Parse what came and pass on the body."""
        if self._response is None:  # nobody asked: not a connection to send a request on
            self.abort()
            return
        self._stale_before_s = 0.0
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail_parse(error)
            return
        if not self.head_done:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.fail(MalformedAnswer(f"head is larger than {MAX_HEAD_BYTES} bytes"))
            return
        self._deliver_pieces()
        if self._is_message_complete:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: the worker closed, or this side aborted."""
        self._upstream.forget(self)
        self._transport = None
        response, self._response = self._response, None
        if response is None:
            return
        if not self.head_done:
            if self.loop.time() < self._stale_before_s:
                response.fail(StaleConnection())
            else:
                reason = f"connection ended before an answer: {exc or 'end of stream'}"
                response.fail(ResetBeforeFirstByte(reason))
        elif self._is_until_close and exc is None:
            response.complete = True
            response.wake()
        else:
            response.fail(ResetMidStream(f"connection ended in the body: {exc or 'early end'}"))

    # httptools' callbacks.

    def on_message_begin(self) -> None:
        """Notice an answer that nobody asked for."""
        if self._response is None or self._is_message_complete:
            self._is_stray = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header or trailer."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Publish the head of the final answer."""
        headers, self._headers = self._headers, []
        status = self._parser.get_status_code()
        response = self._response
        if status < 200 or response is None or self._is_message_complete:
            self._is_interim = True
            return
        response.status = status
        response.headers = headers
        is_framed = status in (204, 304)
        for name, value in headers:
            lower = name.lower()
            if lower not in _READ_HERE:
                continue
            if lower == b"content-length":
                response.content_length = int(value)
                is_framed = True
            elif lower == b"content-type":
                response.content_type = value
            elif lower == b"transfer-encoding":
                is_framed = value.lower().endswith(b"chunked")
            elif lower == b"content-encoding":
                response.content_encoding = value.strip().lower()
            else:
                response.connection = value
        self._is_until_close = not is_framed
        self.head_done = True
        self.deadline_s = self._total_s
        response.wake()

    def on_message_complete(self) -> None:
        """Note the end of an answer; ``data_received`` acts on it."""
        if self._is_interim:
            self._is_interim = False
        else:
            self._is_message_complete = True
            self._num_pieces = len(self._pieces)
            # Only meaningful here: the parser forgets the framing when this callback returns.
            self._is_reusable = self._parser.should_keep_alive()

    # Internals.

    def _deliver_pieces(self) -> None:
        pieces = self._pieces
        if self._is_stray and self._is_message_complete:
            # What the parser read behind the answer came from another one, which nobody asked for.
            del pieces[self._num_pieces :]
        if self._is_head_request:
            # The parser cannot know that no body follows whatever the headers say.
            pieces.clear()
            self._is_message_complete = self._is_stray = True
        elif pieces:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if self._response is not None:
                self._response.deliver(piece)

    def _fail_parse(self, error: Exception) -> None:
        if not self.head_done:
            self.fail(MalformedAnswer(f"not an HTTP/1.1 answer: {error}"))
            return
        self._deliver_pieces()
        if self._is_message_complete:  # the garbage stands after a complete answer
            self._is_stray = True
            self._finish()
        else:
            self.fail(MalformedAnswer(f"broken framing of the body: {error}"))

    def _finish(self) -> None:
        """Complete the answer, then give the connection back or close it."""
        response, self._response = self._response, None
        transport = self._transport
        if response is None or transport is None:
            return
        response.complete = True
        response.wake()
        self.deadline_s = math.inf
        self.resume_reading()
        if (
            self._is_reusable
            and not self._is_stray
            and not transport.is_closing()
            # Bytes of the request still unsent: the worker answered without reading it all.
            and not transport.get_write_buffer_size()
        ):
            self.idle_since_s = self.loop.time()
            self._upstream.give_back(self)
        else:
            transport.abort()
