"""A DNS server that knows SRV records only, over UDP."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

SRV = 33
NO_ERROR, SERVER_FAILURE, NO_SUCH_NAME = 0, 2, 3


class DnsServer(asyncio.DatagramProtocol):
    """Answers each question with ``records``, or with ``code``.

    Attributes:
        records: (priority, weight, port, target) of each record.
        code: Response code.
    """

    def __init__(self) -> None:
        self.records: list[tuple[int, int, int, str]] = []
        self.code = NO_ERROR
        self.num_asked = 0
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    async def __aenter__(self) -> DnsServer:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        self.port = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._transport is not None
        self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.num_asked += 1
        end = data.index(0, 12) + 5
        question = data[12:end]
        answers = b"".join(self._record(*record) for record in self.records)
        number = len(self.records) if self.code == NO_ERROR else 0
        head = data[:2] + struct.pack(">HHHHH", 0x8180 | self.code, 1, number, 0, 0)
        assert self._transport is not None
        self._transport.sendto(head + question + (answers if number else b""), addr)

    def _record(self, priority: int, weight: int, port: int, target: str) -> bytes:
        labels = [label.encode() for label in target.split(".") if label]
        name = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
        data = struct.pack(">HHH", priority, weight, port) + name
        # The name of the question, pointed at; not to be cached.
        return b"\xc0\x0c" + struct.pack(">HHIH", SRV, 1, 0, len(data)) + data
