"""The two kinds of response: the gateway's own JSON, and a worker's answer spliced through."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.web_request import BaseRequest

    from gateway.errors import GatewayError

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class SplicedResponse(web.StreamResponse):
    """A worker's answer, written straight to the client's transport.

    aiohttp would parse, order and print the headers again, and take pieces of the body only from a
    task; here the worker's header lines go out as they came, in one write with a body that is
    complete, and pieces may come from any callback of the event loop.

    Args:
        status: The worker's.
        lines: Header lines, each with its end; without framing.
        body: The whole body; None if it will be written in pieces.
        length: Length of all pieces together; None if it is not known.
    """

    def __init__(
        self, status: int, lines: bytes, *, body: bytes | None = None, length: int | None = None
    ) -> None:
        super().__init__(status=status)
        self._lines = lines
        self._whole = body
        self._length = length if body is None else len(body)
        self._is_chunked = False
        self._is_begun = False
        self._is_ended = False
        self._client: BaseRequest | None = None

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:
        """Write the head, and the whole body if it is there; once, whoever calls.

        Raises:
            ConnectionError: If the client has left.
        """
        if self._is_begun:
            return None
        self._is_begun = True
        self._client = request
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive and request.version >= HttpVersion11
        head = [_STATUS_LINES.get(self.status) or b"HTTP/1.1 %d \r\n" % self.status, self._lines]
        if self._length is not None:
            if self.status not in (204, 304):
                head.append(b"content-length: %d\r\n" % self._length)
        elif request.version >= HttpVersion11:
            self._is_chunked = True
            head.append(b"transfer-encoding: chunked\r\n")
        head.append(b"\r\n" if self._keep_alive else b"connection: close\r\n\r\n")
        if self._whole:
            head.append(self._whole)
        transport.write(b"".join(head))
        if request.protocol.writing_paused:
            await request.writer.drain()
        return None

    def writer(self) -> Callable[[bytes], bool]:
        """Return what writes body bytes in the framing that the head announced.

        It may be called from any callback, and returns False when the client is slow or has left.
        Everything it needs is bound once: with hundreds of streams, each attribute it had to look
        up per piece would be a cache miss.

        Raises:
            ConnectionError: If the client has left already.
        """
        client = self._client
        transport = client.transport if client is not None else None
        if client is None or transport is None:
            raise ConnectionResetError("the client has left")
        protocol, is_chunked = client.protocol, self._is_chunked
        is_closing, send = transport.is_closing, transport.write

        def write(data: bytes) -> bool:
            if is_closing():
                return False
            if data:
                send(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
            return not protocol.writing_paused

        return write

    async def write_eof(self, data: bytes = b"") -> None:
        """End the body."""
        if self._is_ended:
            return
        self._is_ended = True
        client = self._client
        transport = client.transport if client is not None else None
        if client is None or transport is None or transport.is_closing():
            return
        if self._is_chunked:
            transport.write(b"0\r\n\r\n")
            await client.writer.drain()


def error_response(error: GatewayError, request_id: str) -> web.Response:
    """Return an error in OpenAI's shape."""
    headers = [*error.http_headers(), ("x-request-id", request_id)]
    return json_response(error.openai_body(), headers, status=error.status)


def json_response(
    body: bytes, headers: list[tuple[str, str]] | None = None, *, status: int = 200
) -> web.Response:
    """Return an encoded JSON document."""
    # aiohttp would name itself and its version.
    pairs = [("content-type", "application/json"), ("server", "warmlane"), *(headers or ())]
    return web.Response(body=body, status=status, headers=pairs)
