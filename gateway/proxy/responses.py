"""aiohttp's side: its exchanges as the proxy sees them, and the gateway's own JSON answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import HttpVersion11, web

from gateway.front.exchange import Exchange, RequestHead
from gateway.protocols.errors import error_body
from gateway.proxy.body import read_body

if TYPE_CHECKING:
    import asyncio

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.web_request import BaseRequest

    from gateway.errors import GatewayError
    from gateway.proxy.limits import Limits


class AiohttpExchange(Exchange):
    """A request that aiohttp took.

    The answer goes straight to the client's transport: aiohttp would parse, order and print the
    headers again, and take pieces of the body only from a task.

    Args:
        request: aiohttp's.
        limits: On the body.
    """

    __slots__ = ("_limits", "_request")

    def __init__(self, request: web.Request, limits: Limits) -> None:
        super().__init__(
            request.path,
            # aiohttp's mapping finds names in any case.
            RequestHead(
                request.raw_headers, request.headers, len(request.headers.getall("host", ()))
            ),
            request.protocol,
            content_length=request.content_length,
            is_http11=request.version >= HttpVersion11,
            keep_alive=request.keep_alive,
        )
        self.query = request.rel_url.raw_query_string
        self._request = request
        self._limits = limits

    @property
    def transport(self) -> asyncio.Transport | None:
        """The client's connection; None once it is lost."""
        return self._request.transport

    @property
    def is_body_read(self) -> bool:
        """Whether all of the request has come."""
        return self._request.content.is_eof()

    async def read_body(self) -> bytes:
        """Return the whole body, decompressed.

        Raises:
            InvalidRequest: If it is too long, broken or does not come in time.
        """
        return await read_body(self._request, self._limits)

    async def drain(self) -> None:
        """Wait until the client has taken enough to send more.

        Raises:
            ConnectionError: If it has left.
        """
        if self.is_gone:
            raise ConnectionResetError("the client has left")
        await self._request.writer.drain()

    def response(self) -> web.StreamResponse:
        """Return what tells aiohttp how the connection goes on, once the answer was sent.

        Raises:
            ConnectionError: If none was.
        """
        if not self.is_begun:
            raise ConnectionResetError("the client has left")
        return _Sent(keep_alive=self.keep_alive)


class _Sent(web.StreamResponse):
    """An answer that is already with the client."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keep_alive

    async def prepare(self, request: BaseRequest) -> AbstractStreamWriter | None:
        """Do nothing: the head was sent."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: the body was sent."""


def error_response(error: GatewayError, request_id: str, path: str = "") -> web.Response:
    """Return an error in the shape of the API that ``path`` belongs to."""
    headers = [*error.http_headers(), ("x-request-id", request_id)]
    return json_response(error_body(error, path), headers, status=error.status)


def json_response(
    body: bytes, headers: list[tuple[str, str]] | None = None, *, status: int = 200
) -> web.Response:
    """Return an encoded JSON document."""
    # aiohttp would name itself and its version.
    pairs = [("content-type", "application/json"), ("server", "warmlane"), *(headers or ())]
    return web.Response(body=body, status=status, headers=pairs)
