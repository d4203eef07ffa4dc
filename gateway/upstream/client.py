"""The connections to one worker: a keep-alive pool of raw sockets and one call, ``request``.

Not a general HTTP client: HTTP/1.1 only, no redirects, no cookies, no decompression. Owned by a
worker's entry in its pool; used from the event loop it was first called on.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.allowed import HostRefusedError
from gateway.errors import (
    ConnectFailed,
    FirstByteTimeout,
    MalformedAnswer,
    ResetBeforeFirstByte,
    ResetMidStream,
    TotalTimeout,
    UpstreamError,
)
from gateway.tls import worker_context
from gateway.upstream.connection import Connection
from gateway.upstream.response import Headers, Response, StaleConnection

if TYPE_CHECKING:
    import ssl as ssl_module

    from gateway.allowed import AllowedHosts

__all__ = [
    "ConnectFailed",
    "FirstByteTimeout",
    "Headers",
    "MalformedAnswer",
    "ResetBeforeFirstByte",
    "ResetMidStream",
    "Response",
    "TotalTimeout",
    "Upstream",
    "UpstreamError",
]

# Deadlines are checked this often, for all exchanges of a worker at once: a timer per request would
# cost more than it tells, and no deadline here is a matter of milliseconds.
SWEEP_S = 0.25
# An idle-close race shows within a round trip. A connection that ends later than this had its
# request with the engine, and sending it again could compute it twice.
STALE_WINDOW_S = 1.0
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Upstream:
    """The keep-alive pool of one worker.

    Args:
        url: ``http://HOST:PORT[/PREFIX]``; an IPv6 host stands in brackets.
        ssl: Context for ``https`` URLs; None verifies workers by the system's authorities.
        connect_timeout_s: Time for name look-up, TCP and TLS together.
        idle_s: How long a connection may wait for its next request. Engines close theirs after
            5 s (uvicorn's default), so ours goes first.
        first_byte_s: Time from sending a request to the head of its answer.
        total_s: Time from sending a request to the end of its answer.
        authorization: Header line, with its end, that says who the gateway is to the worker;
            clients' own must not be sent beside it.
        allowed: Judges each address before it is connected to; None = all are.

    Raises:
        ValueError: If ``url`` is not of that form.
    """

    def __init__(
        self,
        url: str,
        *,
        ssl: ssl_module.SSLContext | None = None,
        connect_timeout_s: float = 5.0,
        idle_s: float = 4.0,
        first_byte_s: float = 600.0,
        total_s: float = math.inf,
        authorization: bytes = b"",
        allowed: AllowedHosts | None = None,
    ) -> None:
        scheme, host, port, self._prefix = _split(url)
        self.url = url
        self._host, self._port = host, port
        self._ssl = (ssl or worker_context()) if scheme == "https" else None
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._first_byte_s = first_byte_s
        self._total_s = total_s
        bracketed = f"[{host}]" if ":" in host else host
        shown = bracketed if port == _DEFAULT_PORTS[scheme] else f"{bracketed}:{port}"
        self._host_line = f" HTTP/1.1\r\nhost: {shown}\r\n".encode() + authorization
        self._allowed = allowed
        # (path, epoch of the worker) -> whether it has that path (gateway/proxy/speech.py).
        self.spoken: dict[tuple[str, object], bool] = {}
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    async def request(
        self,
        method: str,
        target: str,
        headers: Headers | bytes,
        body: bytes = b"",
        *,
        first_byte_s: float | None = None,
        total_s: float | None = None,
    ) -> Response:
        """Send a request and return its answer as soon as its head is complete.

        Args:
            method: Request method.
            target: Path and query, beginning with a slash.
            headers: End-to-end headers only, as pairs or as ready lines, each with its end.
                ``host`` and ``content-length`` are added.
            body: The whole body.
            first_byte_s: Overrides the pool's deadline for the head of the answer.
            total_s: Overrides the pool's deadline for the end of the answer.

        Returns:
            The answer, whatever its status. The caller must ``close`` it.

        Raises:
            ConnectFailed, ResetBeforeFirstByte, FirstByteTimeout, MalformedAnswer: see
                ``gateway/errors.py``. A reused connection that the worker closed meanwhile is
                replaced once without the caller noticing.
        """
        head = self._head(method, target, headers, len(body))
        if first_byte_s is None:
            first_byte_s = self._first_byte_s
        if total_s is None:
            total_s = self._total_s
        is_head = method == "HEAD"
        connection = self._take_idle()
        if connection is not None:
            answer = connection.send(head, body, is_head, STALE_WINDOW_S, first_byte_s, total_s)
            try:
                await answer.head()
            except StaleConnection:
                pass
            else:
                return answer
        connection = await self._connect()
        answer = connection.send(head, body, is_head, 0.0, first_byte_s, total_s)
        await answer.head()
        return answer

    def close(self) -> None:
        """Abort all connections; exchanges under way fail."""
        for connection in tuple(self._open):
            connection.fail(ResetMidStream("the connection pool was closed"))

    @property
    def num_connections(self) -> int:
        """Open sockets, busy and idle."""
        return len(self._open)

    @property
    def num_idle(self) -> int:
        """Open sockets that wait for a request."""
        return len(self._idle)

    # Called by this pool's connections.

    def remember(self, connection: Connection) -> None:
        """Count a connection that is open."""
        self._open.add(connection)
        if self._sweeper is None:
            self._sweeper = connection.loop.call_later(SWEEP_S, self._sweep, connection.loop)

    def give_back(self, connection: Connection) -> None:
        """Take a connection whose exchange is complete."""
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if not self._open and self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    # Internals.

    def _head(self, method: str, target: str, headers: Headers | bytes, length: int) -> bytes:
        if not isinstance(headers, bytes):
            headers = b"".join(b"%b: %b\r\n" % pair for pair in headers)
        framing = b"content-length: %d\r\n\r\n" % length
        if not length and method in ("GET", "HEAD"):
            framing = b"\r\n"
        start = f"{method} {self._prefix}{target}".encode()
        return b"".join((start, self._host_line, headers, framing))

    def _take_idle(self) -> Connection | None:
        # The one used last is the one least likely to be closed by the worker meanwhile.
        while self._idle:
            connection = self._idle.pop()
            if (
                connection.is_usable
                and connection.loop.time() - connection.idle_since_s < self._idle_s
            ):
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._connection(loop)
        except TimeoutError as late:
            raise ConnectFailed(
                f"{self.url}: no connection within {self._connect_timeout_s} s"
            ) from late
        except (OSError, HostRefusedError) as error:
            raise ConnectFailed(f"{self.url}: {error}") from error
        return connection

    async def _connection(self, loop: asyncio.AbstractEventLoop) -> Connection:
        """Connect to the host, or where its addresses are judged, to the first that answers."""

        def make() -> Connection:
            return Connection(self, loop)

        if self._allowed is None:
            _, connection = await loop.create_connection(
                make, self._host, self._port, ssl=self._ssl
            )
            return connection
        # What was judged is what is connected to: a second look-up could find another address.
        failure: OSError | None = None
        for address in await self._allowed.resolve(self._host, self._port):
            try:
                _, connection = await loop.create_connection(
                    make,
                    address,
                    self._port,
                    ssl=self._ssl,
                    server_hostname=None if self._ssl is None else self._host,
                )
            except OSError as error:
                failure = error
            else:
                return connection
        raise failure or OSError("no address")

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail exchanges past their deadline and close connections idle for too long."""
        now_s = loop.time()
        for connection in tuple(self._open):
            if connection.deadline_s <= now_s:
                connection.fail(
                    TotalTimeout(f"{self.url}: the answer took too long")
                    if connection.head_done
                    else FirstByteTimeout(f"{self.url}: no answer within the deadline")
                )
        while self._idle and now_s - self._idle[0].idle_since_s >= self._idle_s:
            self._idle.pop(0).abort()
        self._sweeper = loop.call_later(SWEEP_S, self._sweep, loop) if self._open else None


def _split(url: str) -> tuple[str, str, int, str]:
    """Return scheme, host, port and path prefix of a worker's URL."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(
            f"expected http://HOST:PORT or https://HOST:PORT, an IPv6 host in brackets, got {url!r}"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{url!r}: no user, query or fragment belongs in a worker's URL")
    return (
        parts.scheme,
        parts.hostname,
        port or _DEFAULT_PORTS[parts.scheme],
        parts.path.rstrip("/"),
    )
