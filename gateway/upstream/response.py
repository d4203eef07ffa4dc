"""A worker's answer while it is being read.

Filled by ``gateway/upstream/connection.py``; memory is bounded because the connection stops reading
when the reader of the answer falls behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.errors import MalformedAnswer, ResetMidStream, UpstreamError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from gateway.upstream.connection import Connection

Headers = list[tuple[bytes, bytes]]

# Body bytes held for a slow reader before the socket is no longer read.
MAX_BUFFERED_BYTES = 256 << 10
# Probe answers and small JSON bodies read as a whole.
MAX_READ_BYTES = 64 << 20


class StaleConnection(Exception):
    """A reused connection was closed by the worker while the request was under way to it."""


class Response:
    """A worker's answer: its head, then its body, read once by one task.

    ``headers`` are the raw pairs as sent, and those that decide how the body is read are attributes
    (empty if not sent); ``content_length`` is None for chunked and until-close bodies.
    Call ``close`` when done, in any state: an unfinished exchange is aborted, which is how a worker
    learns that nobody wants its tokens.
    """

    __slots__ = (
        "_buffer",
        "_buffered_bytes",
        "_connection",
        "_error",
        "_full",
        "_limit_bytes",
        "_sink",
        "_waiter",
        "complete",
        "connection",
        "content_encoding",
        "content_length",
        "content_type",
        "headers",
        "status",
    )

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: Headers = []
        self.content_length: int | None = None
        self.content_type = self.content_encoding = self.connection = b""
        self.complete = False
        self._connection = connection
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0
        self._limit_bytes = MAX_BUFFERED_BYTES
        self._sink: Callable[[bytes], bool] | None = None
        self._full = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | StaleConnection | None = None

    async def head(self) -> None:
        """Wait for the head; only for whoever sent the request.

        Raises:
            StaleConnection: If the worker closed the connection before it had the request.
            UpstreamError: If it fails in any other way before the head is complete.
        """
        try:
            # The state of the connection may already be that of its next exchange.
            while not self.status and self._error is None:
                await self.wait()
        except BaseException:
            self.close()
            raise
        if self._error is not None and not self.status:
            raise self._error

    async def read(self, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the whole body.

        Raises:
            UpstreamError: If the connection fails before the body's end, or the body is larger
                than ``max_bytes``.
        """
        body = await self.read_up_to(max_bytes)
        if len(body) > max_bytes or not self.complete:
            self._connection.fail(MalformedAnswer(f"body is larger than {max_bytes} bytes"))
            raise MalformedAnswer(f"body is larger than {max_bytes} bytes")
        return body

    async def read_up_to(self, max_bytes: int) -> bytes:
        """Return the whole body, or its beginning as soon as that exceeds ``max_bytes``.

        ``complete`` tells which it was; the rest is left to be read.

        Raises:
            UpstreamError: If the connection fails before either.
        """
        if not self.complete:
            self._limit_bytes = max_bytes
            self._connection.resume_reading()
        while not self.complete and self._buffered_bytes <= max_bytes:
            if self._error is not None:
                raise self._error
            await self.wait()
        self._limit_bytes = MAX_BUFFERED_BYTES
        return self._take()

    def __aiter__(self) -> Response:
        """Iterate over the body, in pieces as they arrive."""
        return self

    async def __anext__(self) -> bytes:
        """Return the next piece of the body."""
        while not (piece := self._take()):
            if self._error is not None:
                raise self._error
            if self.complete:
                raise StopAsyncIteration
            await self.wait()
        return piece

    async def pump(
        self, write: Callable[[bytes], bool], drain: Callable[[], Awaitable[None]]
    ) -> None:
        """Hand every piece of the body to ``write`` as it arrives, without waking this task.

        Args:
            write: Takes a piece, from the event loop's read callback; must not raise. Returns
                False when the receiver is full: nothing more is read until ``drain`` returns.
            drain: Waits until the receiver has room.

        Raises:
            UpstreamError: If the connection fails before the body's end.
        """
        self._sink = write
        try:
            while True:
                if piece := self._take():
                    self._full = not write(piece)
                if self._full:
                    await drain()
                    self._full = False
                elif self._error is not None:
                    raise self._error
                elif self.complete:
                    return
                else:
                    self._connection.resume_reading()
                    await self.wait()
        finally:
            self._sink = None

    def close(self) -> None:
        """Abort the exchange if it is not complete; idempotent."""
        if not self.complete and self._error is None:
            self._error = ResetMidStream("closed by this side")
            self._connection.abort()

    def wait(self) -> asyncio.Future[None]:
        """Return what ends when something happens: head, piece, end, error or a full receiver."""
        waiter: asyncio.Future[None] = self._connection.loop.create_future()
        self._waiter = waiter
        return waiter

    @property
    def buffered_bytes(self) -> int:
        """Body bytes that were received and not yet taken."""
        return self._buffered_bytes

    def deliver(self, piece: bytes) -> None:
        """Take a piece of the body from the connection."""
        if self._sink is not None and not self._full and not self._buffer:
            if self._sink(piece):
                return
            self._full = True
            self._connection.pause_reading()
        else:
            self._buffer.append(piece)
            self._buffered_bytes += len(piece)
            if self._buffered_bytes > self._limit_bytes:
                self._connection.pause_reading()
        self.wake()

    def fail(self, error: UpstreamError | StaleConnection) -> None:
        """End the exchange with ``error``."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Let the waiting task look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> bytes:
        if not self._buffer:
            return b""
        piece = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
        self._buffer.clear()
        self._buffered_bytes = 0
        if not self.complete:
            self._connection.resume_reading()
        return piece
