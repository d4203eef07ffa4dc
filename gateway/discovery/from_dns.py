"""Workers that a DNS name stands for: its addresses, or its SRV records.

An answer is one moment's view: resolvers give a part of many addresses, rotate them, fail. So a
worker leaves only once several answers in a row are without it, or its own health says so too.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from gateway.config import WorkerConfig
from gateway.config.discovery import filled
from gateway.discovery.listing import Found, host_url, id_from

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from gateway.config.discovery import DnsDiscovery
    from gateway.discovery.listing import Listing

    Lookup = Callable[[], Awaitable[list["Address"]]]

# Names that do not exist, or have no addresses: an answer, of no workers. Resolvers that cannot be
# reached say something else.
_NONE_ERRORS = frozenset(
    number
    for name in ("EAI_NONAME", "EAI_NODATA")
    if (number := getattr(socket, name, None)) is not None
)
# Longer than any resolver's own tries; a hanging one must not hang with us.
LOOKUP_DEADLINE_S = 15.0
# Gateways that started together should not ask together.
JITTER_SHARE = 0.1


class Address(NamedTuple):
    """Host and port of a worker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class LookupFailed(Exception):
    """The resolver has no answer."""


class DnsSource:
    """Asks a resolver again and again.

    Args:
        config: What to ask, and how patient to be.
        lookup: Asks once; None = as configured.
        is_well: Says of a worker's id whether the worker answers.
        clock: Monotonic seconds.
        sleep: Waits some seconds.

    Raises:
        ImportError: If SRV records are asked for and aiodns is not installed.
    """

    def __init__(
        self,
        config: DnsDiscovery,
        *,
        lookup: Lookup | None = None,
        is_well: Callable[[str], bool] = lambda _id: True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._config = config
        self._lookup = lookup or _lookup_of(config)
        self._is_well = is_well
        self._clock = clock
        self._sleep = sleep
        # Address -> answers in a row that were without it.
        self._absent: dict[Address, int] = {}
        self._answered_s = float("-inf")

    async def run(self, listing: Listing) -> None:
        """Ask at the configured interval."""
        while True:
            await self.ask(listing)
            spread = random.uniform(-JITTER_SHARE, JITTER_SHARE)
            await self._sleep(self._config.interval_s * (1 + spread))

    async def ask(self, listing: Listing) -> None:
        """Ask once, and tell what there is now."""
        try:
            async with asyncio.timeout(LOOKUP_DEADLINE_S):
                answer = await self._lookup()
        except (LookupFailed, TimeoutError) as error:
            listing.failed(f"{self._config.name}: {str(error) or 'no answer in time'}")
            if self._absent and self._clock() - self._answered_s > self._config.keep_s:
                self._absent.clear()
                listing.given_up({self._config.name: f"no answer for {self._config.keep_s:g} s"})
            return
        self._answered_s = self._clock()
        self._settle(answer)
        self._tell(listing)

    def _settle(self, answer: Iterable[Address]) -> None:
        present = set(answer)
        for address in list(self._absent):
            if address in present:
                continue
            self._absent[address] += 1
            is_over = self._absent[address] >= self._config.absent_answers
            if is_over or not self._is_well(id_from(str(address))):
                del self._absent[address]
        for address in present:
            self._absent[address] = 0

    def _tell(self, listing: Listing) -> None:
        found, bad = [], {}
        for address in sorted(self._absent):
            try:
                found.append(Found(_worker(self._config, address)))
            except ValidationError as error:
                bad[str(address)] = error.errors(include_url=False)[0]["msg"]
        listing.told(found, bad)


def _worker(config: DnsDiscovery, address: Address) -> WorkerConfig:
    events, replay = config.kv_events, config.kv_replay
    return WorkerConfig(
        id=id_from(str(address)),
        url=host_url(config.scheme, address.host, address.port),
        kv_events=None if events is None else filled(events, address.host),
        kv_replay=None if replay is None else filled(replay, address.host),
    )


def _lookup_of(config: DnsDiscovery) -> Lookup:
    if not config.srv:
        port = config.port
        assert port is not None, "checked by the configuration"
        return lambda: addresses_of(config.name, port)
    # Only who asks for SRV records has aiodns.
    from gateway.discovery.srv import SrvResolver

    return SrvResolver(config.name).lookup


async def addresses_of(name: str, port: int) -> list[Address]:
    """Return a name's IPv4 and IPv6 addresses as the system's resolver knows them.

    Raises:
        LookupFailed: If the resolver cannot say whether there are any.
    """
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NONE_ERRORS:
            return []
        raise LookupFailed(error.strerror or str(error)) from error
    # An address of one link only means nothing to anybody else.
    hosts = {str(row[4][0]) for row in rows}
    return [Address(host, port) for host in sorted(hosts) if "%" not in host]
