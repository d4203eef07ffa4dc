"""Which headers cross the gateway, in both directions.

Source: RFC 9110, 7.6.1 (hop-by-hop fields and those that ``connection`` names).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gateway.errors import HeadTooLarge

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.upstream import Headers

RawPairs = tuple[tuple[bytes, bytes], ...]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade".split()
)
# Set anew towards the worker; or answered here (expect); or a switch of the gateway's own.
_NOT_FORWARDED = _HOP_BY_HOP | frozenset(
    b"host content-length expect accept-encoding content-encoding x-request-id"
    b" x-warmlane-explain".split()
)
# Framing and request id are this side's.
_NOT_RETURNED = _HOP_BY_HOP | frozenset((b"content-length", b"x-request-id"))
# What `connection` may say without naming further headers.
_PLAIN_CONNECTION = frozenset((b"", b"keep-alive", b"close"))
# Long enough for any tracing scheme, short enough for a log line.
MAX_REQUEST_ID_CHARS = 128


def request_id_from(given: str | None) -> str:
    """Return the client's request id if it is fit for headers and logs, else a new one."""
    if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return os.urandom(16).hex()


def to_worker(raw: RawPairs, request_id: str, max_bytes: int) -> Headers:
    """Return the headers to send on; ``host`` and ``content-length`` are the connection's.

    Raises:
        HeadTooLarge: If all headers together are larger than ``max_bytes``.
    """
    size = 0
    kept: Headers = []
    named: Iterable[bytes] = ()
    for pair in raw:
        name, value = pair
        size += len(name) + len(value)
        lower = name.lower()
        if lower not in _NOT_FORWARDED:
            kept.append(pair)
        elif lower == b"connection" and value.lower() not in _PLAIN_CONNECTION:
            named = [token.strip() for token in value.lower().split(b",")]
    if size > max_bytes:
        raise HeadTooLarge(f"headers are {size} bytes, the limit is {max_bytes}")
    if named:
        kept = [pair for pair in kept if pair[0].lower() not in named]
    # Answers are observed as they pass, so they must not be compressed.
    kept.append((b"accept-encoding", b"identity"))
    kept.append((b"x-request-id", request_id.encode()))
    return kept


def to_client(headers: Headers) -> list[tuple[str, str]]:
    """Return the headers of a worker's answer that its client gets."""
    kept = []
    named: Iterable[bytes] = ()
    for name, value in headers:
        lower = name.lower()
        if lower not in _NOT_RETURNED:
            # Only visible ASCII is certain to mean the same everywhere; Latin-1 loses nothing.
            kept.append((name.decode("latin-1"), value.decode("latin-1")))
        elif lower == b"connection" and value.lower() not in _PLAIN_CONNECTION:
            named = [token.strip() for token in value.lower().split(b",")]
    if named:
        kept = [pair for pair in kept if pair[0].lower().encode() not in named]
    return kept


def find(headers: Headers, name: bytes) -> bytes:
    """Return the value of a header, given in lower case; empty if it is not there."""
    for key, value in headers:
        if len(key) == len(name) and key.lower() == name:
            return value
    return b""
