"""Which headers cross the gateway, in both directions, as ready lines of bytes.

Source: RFC 9110, 7.6.1 (hop-by-hop fields and those that ``connection`` names).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network

from gateway.errors import HeadTooLarge, InvalidRequest

RawPairs = Iterable[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade".split()
)
# Set anew towards the worker; or answered here (expect); or a switch of the gateway's own; or the
# gateway's own choice (a worker's rank, where it fetches KV from), or not to be believed (tenant).
_NOT_FORWARDED = _HOP_BY_HOP | frozenset(
    b"host content-length expect accept-encoding content-encoding x-request-id"
    b" x-warmlane-explain x-data-parallel-rank x-kv-cache-source-host-port x-tenant-id".split()
)
# Framing and request id are this side's.
_NOT_RETURNED = _HOP_BY_HOP | frozenset((b"content-length", b"x-request-id"))
# What `connection` may say without naming further headers.
_PLAIN_CONNECTION = frozenset((b"", b"keep-alive", b"close"))
# Seeded by the system: two processes never draw the same ids.
_random = random.Random()
# Long enough for any tracing scheme, short enough for a log line.
MAX_REQUEST_ID_CHARS = 128
TENANT_HEADER = b"x-tenant-id"
# A tenant is a label of metrics and a part of every key.
MAX_TENANT_CHARS = 128
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
_returned = _Prefixes(_NOT_RETURNED)


class TrustedPeers:
    """Whose identity headers count: proxies that have checked who sends.

    Args:
        networks: Addresses and networks, as configured; none trusts nobody.

    Raises:
        ValueError: If one of them is neither.
    """

    def __init__(self, networks: Iterable[str] = ()) -> None:
        self._networks = tuple(ip_network(network) for network in networks)
        # Peers are few; reading an address costs 5 us.
        self._trusts = lru_cache(maxsize=1024)(self._is_in)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def tenant(self, raw: RawPairs, peer: object) -> str:
        """Return the tenant that a request names, if its peer may name one; else empty.

        Args:
            raw: The request's headers as sent.
            peer: The connection's ``peername``: (host, port, ...), or None once it is lost.

        Raises:
            InvalidRequest: If a peer that may name one names several, or one unfit for logs.
        """
        if not isinstance(peer, tuple) or not self._trusts(str(peer[0])):
            return ""
        given = [value.strip() for name, value in raw if name.lower() == TENANT_HEADER]
        if not given or given == [b""]:
            return ""
        tenant = given[0].decode("latin-1")
        if len(given) > 1 or len(tenant) > MAX_TENANT_CHARS or not _is_one_name(tenant):
            raise InvalidRequest("Expected one x-tenant-id with one tenant.", code="bad_tenant")
        return tenant

    def _is_in(self, host: str) -> bool:
        try:
            # A link-local address comes with its zone.
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


def _is_one_name(text: str) -> bool:
    return text.isascii() and text.isprintable() and "," not in text


def request_id_from(given: str | None) -> str:
    """Return the client's request id if it is fit for headers and logs, else a new one."""
    if given and len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    # Ids tell requests apart and guard nothing.
    return f"{_random.getrandbits(128):032x}"


def to_worker(raw: RawPairs, connection: str | None, max_bytes: int) -> bytes:
    """Return the header lines to send on, without ``host``, ``content-length``, ``x-request-id``.

    Args:
        raw: The client's headers as sent.
        connection: The value of its ``connection`` header.
        max_bytes: Limit on all lines together.

    Raises:
        HeadTooLarge: If they are larger.
    """
    raw = _without_named(raw, connection.encode() if connection else b"")
    lines = [prefix + value for name, value in raw if (prefix := _forwarded[name])]
    # Answers are observed as they pass, so they must not be compressed.
    lines.append(b"accept-encoding: identity\r\n")
    block = b"\r\n".join(lines)
    if len(block) > max_bytes:
        raise HeadTooLarge(f"headers are {len(block)} bytes, the limit is {max_bytes}")
    return block


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
