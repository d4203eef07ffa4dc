"""How operators' requests travel between the processes: plain HTTP over unix sockets.

An operator asks on the admin port (the supervisor) or on the client port (a child, which asks the
supervisor); the supervisor asks the children. Who may ask is decided in one place, by the child's
own admin endpoints: they are told the operator's address and given the operator's token. The
sockets lie in a folder that only this user can enter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The operator's address; believed on the unix sockets only, and set anew on every other way in.
PEER_HEADER = "x-warmlane-peer"
# What of an operator's request matters to the endpoints.
_PASSED_ON = (
    *("authorization", "content-type", "x-request-id", "accept", "x-tenant-id", "if-none-match"),
    # That a proxy is between: an operator on this machine needs no token, others do.
    *("x-forwarded-for", "forwarded", "x-real-ip"),
)
_RETURNED = (
    *("content-type", "x-request-id", "retry-after", "www-authenticate", "cache-control", "etag"),
    # Of the console's page.
    *("content-security-policy", "x-content-type-options", "x-frame-options"),
    *("referrer-policy", "cross-origin-opener-policy"),
)
# Answers that come line by line, for as long as the work takes.
STREAMED = frozenset({("POST", "/admin/v1/warm")})
# An explanation of a long unseen prompt takes a second; nothing takes longer.
TIMEOUT_S = 10.0


class Peer:
    """The other end of a unix socket; one event loop only.

    Args:
        path: The socket.
        timeout_s: For a whole answer.
    """

    def __init__(self, path: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._path = path
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._path),
                timeout=self._timeout,
                auto_decompress=False,
            )
        return self._session

    async def stream(self, request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
        """Pass a request on, and its answer back as it comes, however long that takes.

        Whoever asked and leaves ends it on the other side, too: this handler is cancelled then.

        Raises:
            ConnectionError: If nobody answers, or the answer breaks off.
        """
        body = await request.read()
        try:
            async with self._connected().request(
                request.method,
                f"http://gateway{request.path_qs}",
                headers=headers,
                data=body or None,
                timeout=aiohttp.ClientTimeout(sock_connect=self._timeout.total),
            ) as answer:
                found = {name.lower(): value for name, value in answer.headers.items()}
                response = web.StreamResponse(
                    status=answer.status,
                    headers={name: found[name] for name in _RETURNED if name in found},
                )
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(f"{self._path}: {type(error).__name__}") from error

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Answer:
        """Send a request and read its whole answer.

        Raises:
            ConnectionError: If nobody answers (in time).
        """
        try:
            async with self._connected().request(
                method, f"http://gateway{path}", headers=headers, data=body or None
            ) as response:
                return Answer(response.status, dict(response.headers), await response.read())
        except (aiohttp.ClientError, OSError) as error:  # the latter includes timeouts
            raise ConnectionError(f"{self._path}: {type(error).__name__}") from error

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class Answer:
    """A whole HTTP answer."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    def response(self) -> web.Response:
        """Return it as an answer of one's own."""
        headers = {name: self.headers[name] for name in _RETURNED if name in self.headers}
        return web.Response(status=self.status, body=self.body, headers=headers)


def passed_on(request: web.Request, peer: str | None) -> dict[str, str]:
    """Return the headers that go on with an operator's request from ``peer``."""
    headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    headers[PEER_HEADER] = peer or ""
    return headers


@web.middleware
async def as_from_peer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let the endpoints behind a unix socket see the operator's address as their client's."""
    return await handler(request.clone(remote=request.headers.get(PEER_HEADER, "")))


def relay_routes(supervisor: Peer) -> list[web.RouteDef]:
    """Return a child's routes on the client port that the supervisor answers."""

    async def relay(request: web.Request) -> web.StreamResponse:
        headers = passed_on(request, request.remote)
        try:
            if (request.method, request.path) in STREAMED:
                return await supervisor.stream(request, headers)
            answer = await supervisor.ask(
                request.method, request.path_qs, headers, await request.read()
            )
        except ConnectionError:
            return web.json_response(
                {"error": {"message": "The supervisor does not answer.", "type": "server_error",
                           "param": None, "code": "unavailable"}},
                status=503,
            )  # fmt: skip
        return answer.response()

    return [
        web.get("/metrics", relay),
        web.get("/console", relay),
        web.get("/console/data", relay),
        web.route("*", "/admin/v1/{tail:.*}", relay),
    ]
