"""Which headers cross the gateway, in both directions, as ready lines of bytes.

Source: RFC 9110, 7.6.1 (hop-by-hop fields and those that ``connection`` names).
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from gateway.errors import HeadTooLarge
from gateway.front.exchange import RequestHead

RawPairs = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade".split()
)
# Set anew towards the worker; or answered here (expect); or a switch of the gateway's own; or the
# gateway's own choice (a worker's rank, where it fetches KV from), or not to be believed (tenant),
# or told anew as it shrinks (what is left of the client's time).
_NOT_FORWARDED = _HOP_BY_HOP | frozenset(
    b"host content-length expect accept-encoding content-encoding x-request-id"
    b" x-warmlane-explain x-data-parallel-rank x-kv-cache-source-host-port x-tenant-id"
    b" x-request-timeout".split()
)
# By which clients prove who they are, to the gateway where it asks them, else to the engine.
_KEYS = frozenset((b"authorization", b"x-api-key", b"api-key"))
# Framing and request id are this side's.
_NOT_RETURNED = _HOP_BY_HOP | frozenset((b"content-length", b"x-request-id"))
# What `connection` may say without naming further headers.
_PLAIN_CONNECTION = frozenset((b"", b"keep-alive", b"close"))
# Seeded by the system: two processes never draw the same ids.
_random = random.Random()
# Long enough for any tracing scheme, short enough for a log line.
MAX_REQUEST_ID_CHARS = 128
# vLLM's connectors for prefill elsewhere connect to the addresses behind these in a request's id.
_ADDRESS_MARKS = ("___prefill_addr_", "___decode_addr_")
_KIND = b"content-type"
_KIND_LINE = _KIND + b":"
# What engines of some frameworks read by other rules than JSON's.
_FORMS = ("multipart/", "application/x-www-form-urlencoded")
_JSON = b"application/json"
# Names are chosen by clients, so what is remembered of them must end somewhere.
_MAX_KNOWN_NAMES = 1000


class _Prefixes(dict[bytes, bytes]):
    """Name as sent -> the beginning of its line, empty if it is not passed on."""

    def __init__(self, dropped: frozenset[bytes]) -> None:
        super().__init__()
        self._dropped = dropped

    def __missing__(self, name: bytes) -> bytes:
        prefix = b"" if name.lower() in self._dropped else name + b": "
        if len(self) < _MAX_KNOWN_NAMES:
            self[name] = prefix
        return prefix


_forwarded = _Prefixes(_NOT_FORWARDED)
_forwarded_without_keys = _Prefixes(_NOT_FORWARDED | _KEYS)
_returned = _Prefixes(_NOT_RETURNED)


def request_id_from(given: str | None) -> str:
    """Return the client's request id if it is fit for headers, logs and engines, else a new one."""
    if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        is_address = any(mark in given for mark in _ADDRESS_MARKS)
        if not is_address:
            return given
    # Ids tell requests apart and guard nothing.
    return _random.getrandbits(128).to_bytes(16, "big").hex()


def to_worker(
    raw: RawPairs, connection: str | None, max_bytes: int, *, keeps_keys: bool = True
) -> bytes:
    """Return the header lines to send on, without ``host``, ``content-length``, ``x-request-id``.

    Args:
        raw: The client's headers as sent.
        connection: The value of its ``connection`` header.
        max_bytes: Limit on all lines together.
        keeps_keys: Whether the client's key is meant for the worker.

    Raises:
        HeadTooLarge: If they are larger.
    """
    raw = _without_named(raw, connection.encode() if connection else b"")
    forwarded = _forwarded if keeps_keys else _forwarded_without_keys
    lines = [prefix + value for name, value in raw if (prefix := forwarded[name])]
    kinds = [line for line in lines if line[:13].lower() == _KIND_LINE]
    if len(kinds) > 1:  # the first is the one by which the body is read here
        lines = [line for line in lines if line is kinds[0] or line not in kinds]
    # Answers are observed as they pass, so they must not be compressed.
    lines.append(b"accept-encoding: identity\r\n")
    block = b"\r\n".join(lines)
    if len(block) > max_bytes:
        raise HeadTooLarge(f"headers are {len(block)} bytes, the limit is {max_bytes}")
    return block


def told_as_json(head: RequestHead) -> RequestHead:
    """Return the head of a request whose body was read as JSON, saying so where it says otherwise.

    An engine that believed it would read other fields than those that were found here.
    """
    kind = head.headers.get("content-type")
    if kind is None or kind == "application/json" or not kind.lower().startswith(_FORMS):
        return head
    raw = [(name, _JSON if name.lower() == _KIND else value) for name, value in head.raw]
    return RequestHead(raw, head.headers, head.num_hosts)


def to_client(raw: RawPairs, connection: bytes) -> bytes:
    """Return the header lines of a worker's answer that its client gets.

    Args:
        raw: The worker's headers as sent.
        connection: The value of its ``connection`` header, empty if there is none.
    """
    raw = _without_named(raw, connection)
    lines = [prefix + value for name, value in raw if (prefix := _returned[name])]
    return b"\r\n".join(lines) + b"\r\n" if lines else b""


def _without_named(raw: RawPairs, connection: bytes) -> RawPairs:
    """Leave out the headers that ``connection`` names."""
    if connection.lower() in _PLAIN_CONNECTION:
        return raw
    named = {token.strip() for token in connection.lower().split(b",")}
    return [pair for pair in raw if pair[0].lower() not in named]
