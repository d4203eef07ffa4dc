"""Options of the sockets on both sides."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import BaseTransport

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
