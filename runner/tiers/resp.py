r"""A small client of Redis' protocol: pipelined commands, large values straight into a buffer.

It speaks RESP 2, which every Redis and Valkey speaks to who does not ask for more, and only what
blocks need: strings, numbers, status, errors and values. A cluster's redirections are errors here.

Source: the protocol's specification (redis.io, "Redis serialization protocol").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit

from runner.tiers.wire import ProtocolError, Target, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Buffer: TypeAlias = bytes | memoryview
Argument: TypeAlias = Buffer | Sequence[Buffer]
"""One argument of a command, in one piece or several."""

DEFAULT_PORT = 6379


class ReplyError(Exception):
    """The server refused a command; the connection is fine. ``code`` is its first word."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]


class OversizedError(ConnectionError):
    """A value is longer than the buffer it was to fill; the connection can only be closed."""


@dataclass(frozen=True, slots=True)
class Address:
    """A server as a URL names it."""

    target: Target
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0


def parse_url(url: str) -> Address:
    """Read ``redis://[[user]:password@]host[:port][/database]``, ``rediss://`` or ``unix://path``.

    Raises:
        ValueError: If it is none of them; the message repeats no password.
    """
    parts = urlsplit(url)
    secrets = unquote(parts.username or ""), unquote(parts.password or "")
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError("a unix:// address needs a path, as in unix:///run/redis.sock")
        return Address(Target(unquote(parts.path), 0), *secrets)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError(
            "expected redis://HOST:PORT/DATABASE, rediss://HOST:PORT/DATABASE or unix://PATH"
        )
    database = parts.path.strip("/") or "0"
    if not database.isascii() or not database.isdecimal():
        raise ValueError(f"the database must be a number, got {database!r}")
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        # The library's own message repeats what may be a part of a password.
        raise ValueError("the port must be a number up to 65535") from None
    return Address(Target(parts.hostname, port, parts.scheme == "rediss"), *secrets, int(database))


class RespClient:
    """One connection; used by one thread at a time. All deadlines are on ``clock``.

    After any exception but ``ReplyError`` it can only be closed.

    Attributes:
        num_pending: Replies that were asked for and not read yet.
        has_answered: Whether anything came; false it back to tell a dead idle connection.
    """

    def __init__(self, address: Address, deadline_s: float, clock: Callable[[], float]) -> None:
        """Connect, log in, choose the database.

        Raises:
            TimeoutError: At the deadline.
            OSError: If nobody answers there as such a server.
            ReplyError: If it does not let us in.
        """
        self.num_pending = 0
        self.has_answered = False
        self._wire = Wire(address.target, deadline_s, clock)
        try:
            for command in _greeting(address):
                self.send([command], deadline_s)
                self.reply(deadline_s)
        except BaseException:
            self.close()
            raise

    def send(self, commands: Sequence[Sequence[Argument]], deadline_s: float) -> None:
        """Send commands in one go; each is answered by one reply, in their order.

        Raises:
            TimeoutError: At the deadline.
            OSError: If the connection is broken.
        """
        self.num_pending += len(commands)
        self._wire.send(_encoded(commands), deadline_s)

    def reply(self, deadline_s: float, into: memoryview | None = None) -> int | bytes | None:
        """Return the next reply: a number, a status or value, or None for no such value.

        Args:
            deadline_s: When to give up.
            into: Takes a value's bytes; the reply is then their number.

        Raises:
            ReplyError: If the server refused that command.
            OversizedError: If the value does not fit into ``into``.
            ProtocolError: If it is no such reply.
            TimeoutError: At the deadline.
            OSError: If the connection is broken.
        """
        line = self._wire.line(deadline_s)
        self.num_pending -= 1
        self.has_answered = True
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            raise ReplyError(rest.decode("utf-8", "replace"))
        if kind == b":":
            return _number(rest)
        if kind != b"$":
            raise ProtocolError(f"expected a reply of Redis, got {line[:40]!r}")
        length = _number(rest)
        return None if length == -1 else self._value(length, deadline_s, into)

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()

    def _value(self, length: int, deadline_s: float, into: memoryview | None) -> int | bytes:
        own = into is None
        target = memoryview(bytearray(min(length, _MAX_SMALL_BYTES))) if into is None else into
        if not 0 <= length <= len(target):
            raise OversizedError(f"a value of {length} bytes where {len(target)} were expected")
        self._wire.fill(target[:length], deadline_s)
        if self._wire.line(deadline_s):
            raise ProtocolError("a value is longer than its length")
        return bytes(target) if own else length


# No reply but a block's is long.
_MAX_SMALL_BYTES = 4096


def _greeting(address: Address) -> Iterator[Sequence[Argument]]:
    if address.password:
        user = [address.username.encode()] if address.username else []
        yield [b"AUTH", *user, address.password.encode()]
    if address.database:
        yield [b"SELECT", b"%d" % address.database]


def _encoded(commands: Sequence[Sequence[Argument]]) -> Iterable[Buffer]:
    for command in commands:
        yield b"*%d\r\n" % len(command)
        for argument in command:
            pieces = (argument,) if isinstance(argument, bytes | memoryview) else argument
            yield b"$%d\r\n" % sum(len(piece) for piece in pieces)
            yield from pieces
            yield b"\r\n"


def _number(digits: bytes) -> int:
    try:
        return int(digits)
    except ValueError as error:
        raise ProtocolError(f"expected a number, got {digits[:40]!r}") from error
