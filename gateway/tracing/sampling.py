"""Which requests are traced: as their client decided, else a share of them by lot."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Protocol

from gateway.tracing.context import (
    RANDOM_IDS,
    SAMPLED,
    num_traceparents,
    parse_traceparent,
    tracestate,
)
from gateway.tracing.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gateway.telemetry.record import RequestRecord


class Exports(Protocol):
    """Takes traces of requests that are over."""

    dropped: int

    @property
    def exported(self) -> int:
        """Spans that the collector took."""

    @property
    def failed(self) -> int:
        """Spans that it did not take."""

    def take(self, trace: Trace, record: RequestRecord, route: str | None) -> None:
        """Make spans of a request that is over and have them sent; never waits."""

    async def close(self) -> None:
        """Send what waits, if that is possible at once."""


class Tracing:
    """Decides which requests are traced, once for each; event loop only.

    Args:
        ratio: Share of the requests that are traced of those whose clients say nothing, 0 to 1.
        export: Takes the traces.
        rng: Draws lots and ids, which tell traces apart and guard nothing.
        wall_ns: Nanoseconds of Unix time.
    """

    def __init__(
        self,
        ratio: float,
        export: Exports,
        *,
        rng: random.Random | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.export = export
        self._ratio = ratio
        # Seeded by the system: two processes never draw the same ids.
        rng = rng or random.Random()
        self._draw = rng.random
        self._bits = rng.getrandbits
        self._wall_ns = wall_ns

    def begin(
        self,
        headers: Mapping[str, str],
        raw: Sequence[tuple[bytes, bytes]],
        record: RequestRecord,
        start_s: float,
    ) -> Trace | None:
        """Decide about a request that came.

        Args:
            headers: Of the request, by lower-case name.
            raw: The same as sent.
            record: Gets the id of its trace.
            start_s: When it came, monotonic.

        Returns:
            What notes its trace; None = nothing is noted.
        """
        told = headers.get("traceparent")
        parent = None if told is None else parse_traceparent(told)
        if parent is not None and num_traceparents(raw) > 1:
            parent = None
        if parent is None:
            if self._draw() >= self._ratio:
                return None
            trace_id, flags = self._draw_id(128), SAMPLED
        elif parent.flags & SAMPLED:
            trace_id, flags = parent.trace_id, SAMPLED | parent.flags & RANDOM_IDS
        else:
            return None
        record.trace_id = f"{trace_id:032x}"
        state = () if parent is None else tracestate(raw)
        return Trace(trace_id, flags, parent, state, start_s, self._wall_ns(), self._draw_id)

    def end(self, trace: Trace, record: RequestRecord, route: str | None) -> None:
        """Take a traced request that is over.

        Args:
            trace: Its notes.
            record: Its account.
            route: The pattern of its path; None if there is no such path.
        """
        self.export.take(trace, record, route)

    def _draw_id(self, num_bits: int = 64) -> int:
        # Zero means that there is none.
        return self._bits(num_bits) or 1
