"""One JSON line per finished request; those that are told of together are written together.

A write per request would cost more than the routing decision.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from typing import BinaryIO

    from gateway.telemetry.finished import Batch
    from gateway.telemetry.record import RequestRecord

_encode = msgspec.json.Encoder().encode


class RequestLog:
    """Writes request lines to ``stream``; used from the event loop only."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, batch: Batch) -> None:
        """Write a line for each of some finished requests, in one go."""
        self._stream.write(b"".join([_line(at_s, record) for at_s, record in batch]))
        self._stream.flush()


def _line(at_s: float, record: RequestRecord) -> bytes:
    # The record is serialised as it is, null where nothing is known: picking fields in Python cost
    # more than everything else here together. orjson takes twice as long for dataclasses.
    head = b'{"event":"request_finished","level":"info","timestamp":"%s",' % _stamp(int(at_s * 1e3))
    return head + _encode(record)[1:] + b"\n"


# Requests of one millisecond stand together.
@lru_cache(maxsize=8)
def _stamp(at_ms: int) -> bytes:
    at = datetime.fromtimestamp(at_ms / 1e3, UTC)
    return at.isoformat(timespec="milliseconds").encode()
