"""One JSON line per finished request, written in batches.

A write per request would cost more than the routing decision. Lines wait at most ``FLUSH_S``; what
is waiting is written when the gateway stops.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import lru_cache
from time import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from typing import BinaryIO

    from gateway.telemetry.record import RequestRecord

# A person who watches the log does not notice; a thousand requests share one write.
FLUSH_S = 0.2
# Written earlier than that when this many lines wait.
MAX_WAITING_LINES = 1000
_encode = msgspec.json.Encoder().encode


class RequestLog:
    """Writes request lines to ``stream``; used from the event loop only."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._waiting: list[tuple[float, RequestRecord]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: RequestRecord) -> None:
        """Note a finished request; its line is written within ``FLUSH_S``."""
        # Serialised together, when the code and the data for it are at hand.
        waiting = self._waiting
        waiting.append((time(), record))
        if len(waiting) >= MAX_WAITING_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if waiting:
            lines = [_line(at_s, record) for at_s, record in waiting]
            self._stream.write(b"".join(lines))
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
