"""The gateway's own front: makes client connections, watches their deadlines, ends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.front.connection import RawConnection

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from gateway.front.exchange import FrontLimits, Handler

# Deadlines are checked this often, for all connections at once: a timer per request would cost more
# than it tells, and no deadline here is a matter of milliseconds.
SWEEP_S = 0.25


class RawFront:
    """All connections of one listener; one event loop only.

    Args:
        handler: Serves one exchange; whatever goes wrong becomes its answer.
        reference: Makes the protocol that takes over every other kind of connection.
        paths: Those to which this front serves POSTs itself.
        limits: On what clients send.
        loop: The event loop.

    Attributes:
        hot_lines: First lines of the requests it serves -> their path, whether they are HTTP/1.1.
    """

    def __init__(
        self,
        handler: Handler,
        reference: Callable[[], asyncio.Protocol],
        paths: Iterable[str],
        limits: FrontLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.handler = handler
        self.reference = reference
        self.hot_lines = {
            f"POST {path} HTTP/1.{minor}\r\n".encode(): (path, minor == 1)
            for path in paths
            for minor in (1, 0)
        }
        self.limits = limits
        self._loop = loop
        self._open: set[RawConnection] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def connection(self) -> RawConnection:
        """Make the protocol of a new connection."""
        return RawConnection(self, self._loop)

    @property
    def num_connections(self) -> int:
        """Connections that are open and were not handed over."""
        return len(self._open)

    def close(self) -> None:
        """Abort all connections."""
        for connection in tuple(self._open):
            connection.abort()

    # Called by the connections.

    def remember(self, connection: RawConnection) -> None:
        """Count a connection that is open."""
        self._open.add(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def forget(self, connection: RawConnection) -> None:
        """Drop one that is closed or was handed over."""
        self._open.discard(connection)
        if not self._open and self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def _sweep(self) -> None:
        now_s = self._loop.time()
        for connection in tuple(self._open):
            if connection.deadline_s <= now_s:
                connection.expire()
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep) if self._open else None
