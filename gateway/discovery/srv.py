"""SRV records: each names the host and the port of one worker. Needs aiodns.

Only the records of the lowest priority number serve (RFC 2782); weights are the router's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiodns
from pycares import SRVRecordData

from gateway.discovery.from_dns import Address, LookupFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of one try; a server that is there answers in milliseconds.
TRY_S = 2.0
TRIES = 3
_NONE_ERRORS = frozenset((aiodns.error.ARES_ENODATA, aiodns.error.ARES_ENOTFOUND))


class SrvResolver:
    """Asks for the SRV records of one name; one event loop only.

    Args:
        name: The name, such as ``_http._tcp.vllm.llm.svc.cluster.local``.
        servers: DNS servers; None = the system's.
        port: Of the servers.
    """

    def __init__(
        self, name: str, *, servers: Sequence[str] | None = None, port: int | None = None
    ) -> None:
        self._name = name
        self._servers = servers
        self._port = port
        self._resolver: aiodns.DNSResolver | None = None

    async def lookup(self) -> list[Address]:
        """Return host and port of each record that serves.

        Raises:
            LookupFailed: If the resolver cannot say whether there are any.
        """
        if self._resolver is None:
            self._resolver = aiodns.DNSResolver(
                self._servers,
                timeout=TRY_S,
                tries=TRIES,
                udp_port=self._port,
                tcp_port=self._port,
            )
        try:
            answer = await self._resolver.query_dns(self._name, "SRV")
        except aiodns.error.DNSError as error:
            if error.args[0] in _NONE_ERRORS:
                return []
            raise LookupFailed(str(error.args[-1])) from error
        # An answer may hold aliases beside the records.
        datas = [record.data for record in answer.answer]
        records = [data for data in datas if isinstance(data, SRVRecordData)]
        least = min((record.priority for record in records), default=0)
        # "." as the target says that the service is not there.
        return sorted(
            Address(record.target.rstrip("."), record.port)
            for record in records
            if record.priority == least and record.target not in ("", ".")
        )
