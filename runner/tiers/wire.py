"""A blocking socket on which everything ends by a deadline; shared by the remote and peer tiers."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# One system call brings many small replies; a block's bytes go past this buffer.
BUFFER_BYTES = 32 * 1024
# Smaller pieces are sent together; copying these costs less than a system call.
JOIN_BYTES = 16 * 1024


class ProtocolError(ConnectionError):
    """The other side does not speak the protocol; its connection is of no more use."""


class Target(NamedTuple):
    """Where to connect.

    Attributes:
        host: Name or address; the path of the socket if ``port`` is 0.
        port: TCP port; 0 for a unix socket.
        is_tls: Whether to speak TLS, verified against the system's authorities.
    """

    host: str
    port: int
    is_tls: bool = False


class Wire:
    """One connection; used by one thread at a time.

    All deadlines are on ``clock``. After any exception it can only be closed: nobody knows how much
    of an exchange is still under way.
    """

    def __init__(self, target: Target, deadline_s: float, clock: Callable[[], float]) -> None:
        """Connect.

        Raises:
            TimeoutError: At the deadline.
            OSError: If nobody listens there, or TLS fails.
        """
        self._clock = clock
        self._data = bytearray(BUFFER_BYTES)
        self._buffer = memoryview(self._data)
        self._start = self._end = 0
        self._socket = _connect(target, self._left_s(deadline_s))

    def send(self, pieces: Iterable[bytes | memoryview], deadline_s: float) -> None:
        """Send bytes; large pieces are not copied.

        Raises:
            TimeoutError: At the deadline.
            OSError: If the connection is broken.
        """
        joined = bytearray()
        for piece in pieces:
            if len(piece) <= JOIN_BYTES:
                joined += piece
                continue
            self._send(memoryview(joined), deadline_s)
            self._send(memoryview(piece), deadline_s)
            joined = bytearray()
        self._send(memoryview(joined), deadline_s)

    def line(self, deadline_s: float) -> bytes:
        r"""Return the next line without its ``\r\n``.

        Raises:
            ProtocolError: If it is longer than ``BUFFER_BYTES`` or the stream ends before.
            TimeoutError: At the deadline.
            OSError: If the connection is broken.
        """
        while True:
            start = self._start
            found = self._data.find(b"\r\n", start, self._end)
            if found >= 0:
                self._start = found + 2
                return bytes(self._buffer[start:found])
            rest = bytes(self._buffer[start : self._end])
            if len(rest) == BUFFER_BYTES:
                raise ProtocolError(f"a line of more than {BUFFER_BYTES} bytes")
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
            self._end += self._receive(self._buffer[self._end :], deadline_s)

    def fill(self, target: memoryview, deadline_s: float) -> None:
        """Fill all of ``target`` with the next bytes.

        Raises:
            ProtocolError: If the stream ends before.
            TimeoutError: At the deadline.
            OSError: If the connection is broken.
        """
        at = min(len(target), self._end - self._start)
        target[:at] = self._buffer[self._start : self._start + at]
        self._start += at
        while at < len(target):
            at += self._receive(target[at:], deadline_s)

    def close(self) -> None:
        """Close it; whatever is under way is lost."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _send(self, data: memoryview, deadline_s: float) -> None:
        while data:
            self._socket.settimeout(self._left_s(deadline_s))
            data = data[self._socket.send(data) :]

    def _receive(self, target: memoryview, deadline_s: float) -> int:
        self._socket.settimeout(self._left_s(deadline_s))
        count = self._socket.recv_into(target)
        if not count:
            raise ProtocolError("the other side ended the connection")
        return count

    def _left_s(self, deadline_s: float) -> float:
        left_s = deadline_s - self._clock()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s


def _connect(target: Target, timeout_s: float) -> socket.socket:
    if not target.port:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            plain.settimeout(timeout_s)
            plain.connect(target.host)
        except BaseException:
            plain.close()
            raise
        return plain
    try:
        plain = socket.create_connection((target.host, target.port), timeout_s)
    except UnicodeError as error:  # no name that could be asked for
        raise OSError(f"{target.host!r} is no host") from error
    try:
        # Requests are small and an answer is waited for.
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not target.is_tls:
            return plain
        return ssl.create_default_context().wrap_socket(plain, server_hostname=target.host)
    except BaseException:
        plain.close()
        raise
