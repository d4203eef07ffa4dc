"""Where workers may be that are registered or discovered: ``pools[].worker_allow``.

A gateway can reach what its operators' callers cannot: metadata services, databases on loopback. So
a URL is judged by its host before anything is connected to, and once more by every address that a
name resolves to, each time a connection is made: names can change their mind.
"""

from __future__ import annotations

import asyncio
import re
import socket
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

    Address = IPv4Address | IPv6Address

_HOST_PATTERN = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9*._-]*[A-Za-z0-9*])?")
# Without a list: this machine and private networks (RFC 1918, RFC 4193), where workers are.
USUAL_NETWORKS = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1", "fc00::/7")
# The well-known prefix under which IPv4 addresses stand in IPv6 ones (RFC 6052).
_NAT64 = ip_network("64:ff9b::/96")


class HostRefusedError(ValueError):
    """Workers may not be there; the message names the host and what would be allowed."""


def check_allowed_host(value: str) -> None:
    """Check one entry of ``worker_allow``: an address, a network, or a host name with ``*``.

    Raises:
        ValueError: If it is none of them.
    """
    if not _is_pattern(value):
        try:
            ip_network(value)
        except ValueError as error:
            raise ValueError(
                f"expected addresses, networks (10.1.0.0/16) or host names with *: {error}"
            ) from error


class AllowedHosts:
    """The hosts of one pool.

    A name that matches a pattern may resolve to any address but those that no worker has: loopback,
    link-local (where clouds have their metadata), multicast, unspecified and reserved ones, unless
    a network of the list has them. Any other name must resolve into the networks.

    Args:
        entries: As configured; none = ``USUAL_NETWORKS``.
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        entries = tuple(entries)
        self._patterns = tuple(entry.lower() for entry in entries if _is_pattern(entry))
        networks = [entry for entry in entries if not _is_pattern(entry)]
        self._networks = tuple(
            ip_network(entry) for entry in (networks if entries else USUAL_NETWORKS)
        )
        self._shown = ", ".join(entries) or "loopback and private addresses (no worker_allow)"

    def check(self, url: str) -> None:
        """Judge a worker's URL by its host alone: nothing is looked up.

        Raises:
            HostRefusedError: If no worker may be there, whatever the name resolves to.
        """
        self.check_host(urlsplit(url).hostname or "")

    def check_host(self, host: str) -> None:
        """Judge a host as ``check`` does."""
        address = _literal(host)
        if address is not None:
            self._check_address(host, address)
        elif not self._networks and not self._matches(host):
            raise self._refusal(host)

    def check_resolved(self, host: str, found: str) -> None:
        """Judge an address that a host resolved to; before it is connected to.

        Raises:
            HostRefusedError: If no worker may be there.
        """
        address = _literal(found)
        if address is None:
            raise self._refusal(host)
        self._check_address(host, address)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host, in the resolver's order, all of them allowed.

        Raises:
            HostRefusedError: If one of them is not.
            OSError: If there is none.
        """
        self.check_host(host)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        for address in addresses:
            self.check_resolved(host, address)
        return addresses

    def _check_address(self, host: str, address: Address) -> None:
        if any(address in network for network in self._networks):
            return
        if not self._matches(host) or _is_special(address):
            raise self._refusal(host)

    def _matches(self, host: str) -> bool:
        """Whether a name matches a pattern; a ``*`` stands within one label."""
        labels = host.lower().rstrip(".").split(".")
        for pattern in self._patterns:
            wanted = pattern.split(".")
            if len(wanted) == len(labels) and all(map(fnmatchcase, labels, wanted)):
                return True
        return False

    def _refusal(self, host: str) -> HostRefusedError:
        return HostRefusedError(f"no worker may be at {host!r}; allowed: {self._shown}")


def _is_pattern(entry: str) -> bool:
    return bool(_HOST_PATTERN.fullmatch(entry)) and not entry.replace(".", "").isdigit()


def _literal(host: str) -> Address | None:
    """Return the address that a host is, the IPv4 one if it only looks like an IPv6 one."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_special(address: Address) -> bool:
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
    )
