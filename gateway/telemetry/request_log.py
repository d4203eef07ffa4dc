"""One JSON line per finished request, written in batches.

A write per request would cost more than the routing decision. Lines wait at most ``FLUSH_S``; what
is waiting is written when the gateway stops.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from typing import BinaryIO

    from gateway.telemetry.record import RequestRecord

# A person who watches the log does not notice; a thousand requests share one write.
FLUSH_S = 0.2
# Written earlier than that when this many lines wait.
MAX_WAITING_LINES = 1000


class RequestLog:
    """Writes request lines to ``stream``; used from the event loop only."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: RequestRecord) -> None:
        """Note a finished request; its line is written within ``FLUSH_S``."""
        # The record is serialised as it is, null where nothing is known: picking fields in Python
        # cost more than everything else here together.
        head = b'{"event":"request_finished","level":"info","timestamp":"%s",' % _now()
        self._lines.append(head + orjson.dumps(record)[1:])
        if len(self._lines) >= MAX_WAITING_LINES:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            self._lines.append(b"")
            self._stream.write(b"\n".join(self._lines))
            self._stream.flush()
            self._lines = []


def _now() -> bytes:
    return datetime.now(UTC).isoformat(timespec="milliseconds").encode()
