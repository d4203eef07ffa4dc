"""One request on a connection of the gateway's own front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.front.decoding import content_coding, decoded
from gateway.front.exchange import Exchange

if TYPE_CHECKING:
    import asyncio

    from gateway.errors import InvalidRequest
    from gateway.front.connection import RawConnection
    from gateway.front.head import Head


class RawExchange(Exchange):
    """A request on a connection of this front."""

    __slots__ = ("_connection", "_waiter", "body", "failure")

    def __init__(
        self, connection: RawConnection, head: Head, path: str, content_length: int | None
    ) -> None:
        super().__init__(
            path,
            head,
            connection,
            content_length=content_length,
            is_http11=head.is_http11,
            keep_alive=head.keep_alive,
        )
        self.body: bytes | None = None
        self.failure: InvalidRequest | None = None
        self._connection = connection
        self._waiter: asyncio.Future[None] | None = None

    @property
    def transport(self) -> asyncio.Transport | None:
        """The client's connection; None once it is lost."""
        return self._connection.transport

    @property
    def is_body_read(self) -> bool:
        """Whether all of the request has come."""
        return self.body is not None

    async def read_body(self) -> bytes:
        """Return the whole body, decompressed.

        Raises:
            InvalidRequest: If it is too long, broken or does not come in time.
        """
        while self.body is None:
            if self.failure is not None:
                raise self.failure
            self._waiter = self._connection.loop.create_future()
            await self._waiter
        coding = self.headers.get("content-encoding")
        if coding is None:
            return self.body
        max_bytes = self._connection.limits.decompressed_bytes
        return await decoded(self.body, content_coding(coding), max_bytes)

    async def drain(self) -> None:
        """Wait until the client has taken enough to send more.

        Raises:
            ConnectionError: If it has left.
        """
        await self._connection.drain()

    def wake(self) -> None:
        """Let ``read_body`` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
