"""Whose identity headers count: those of configured peers, which have checked who sends."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

from gateway.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    RawPairs = Iterable[tuple[bytes, bytes]]

TENANT_HEADER = b"x-tenant-id"
# A tenant is a label of metrics and a part of every key.
MAX_TENANT_CHARS = 128


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

    def trusts(self, peer: object) -> bool:
        """Whether a connection's ``peername`` is one of them; None (lost) is not."""
        return isinstance(peer, tuple) and self._trusts(str(peer[0]))

    def tenant(self, raw: RawPairs, peer: object) -> str:
        """Return the tenant that a request names, if its peer may name one; else empty.

        Args:
            raw: The request's headers as sent.
            peer: The connection's ``peername``: (host, port, ...), or None once it is lost.

        Raises:
            InvalidRequest: If a peer that may name one names several, or one unfit for logs.
        """
        if not self.trusts(peer):
            return ""
        given = [value.strip() for name, value in raw if name.lower() == TENANT_HEADER]
        if not given or given == [b""]:
            return ""
        tenant = given[0].decode("latin-1")
        if len(given) > 1 or len(tenant) > MAX_TENANT_CHARS or not is_one_name(tenant):
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


def is_one_name(text: str) -> bool:
    """Whether a text can be a tenant's name: printable ASCII without a comma."""
    return text.isascii() and text.isprintable() and "," not in text
