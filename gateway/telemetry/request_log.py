"""One JSON line per finished request; those that are told of together are written together.

A write per request would cost more than the routing decision.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import BinaryIO

    from gateway.telemetry.record import RequestRecord

_encode = msgspec.json.Encoder().encode


class RequestLog:
    """Writes request lines to ``stream``; used from the event loop only."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, batch: Iterable[tuple[float, RequestRecord]]) -> None:
        """Write a line for each of some finished requests, in one go.

        Args:
            batch: When each ended, seconds since 1970, and its account.
        """
        lines: list[bytes] = []
        try:
            for at_s, record in batch:
                lines.append(_line(at_s, record))
        finally:
            self._stream.write(b"".join(lines))
            self._stream.flush()


def _line(at_s: float, record: RequestRecord) -> bytes:
    second, ms = divmod(int(at_s * 1e3), 1000)
    # The record is serialised as it is, null where nothing is known: picking fields in Python cost
    # more than everything else here together. orjson takes twice as long for dataclasses.
    fields = _encode(record)[1:]
    return _LINE % (_stamp(second), ms, fields)


_LINE = b'{"event":"request_finished","level":"info","timestamp":"%s.%03d+00:00",%s\n'


# Requests of one second share it.
@lru_cache(maxsize=8)
def _stamp(second: int) -> bytes:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()
