"""Options of the sockets on both sides."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import BaseTransport
    from collections.abc import Iterator

# A peer that vanished without a word is noticed after two minutes of silence, however long it may
# stay silent when it is alive; the probes also keep what is remembered of a connection in between
# (address translation forgets after five minutes or so). The system's default begins at two hours.
_PROBES = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 60),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
)


def probe_peer(transport: BaseTransport) -> None:
    """Have the kernel find out whether the peer of a TCP connection is still there."""
    sock = transport.get_extra_info("socket")
    for level, name, value in _PROBES:
        # Not every system has every option.
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(level, option, value)


@contextmanager
def listening(key: str, host: str, port: int | None) -> Iterator[None]:
    """Say of an address that cannot be listened on which key names it, and why not.

    Args:
        key: Of the configuration, such as ``server.port``.
        host: Address.
        port: Port.

    Raises:
        ConnectionError: In place of any ``OSError``.
    """
    try:
        yield
    except OSError as error:
        # asyncio's own words repeat the address; a resolver's errors have numbers of their own.
        number = error.errno or 0
        is_name = isinstance(error, socket.gaierror)
        why = os.strerror(number) if number > 0 and not is_name else error.strerror or str(error)
        raise ConnectionError(f"{key}: cannot listen at {host}:{port}: {why}") from error
