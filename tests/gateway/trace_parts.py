"""A gateway that traces, over any engines, and what its collector got once it has stopped."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.fakes.collector import CLIENT, INTERNAL, SERVER, Collector, Seen
from tests.gateway.tenancy_parts import Serving, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.engine import RawEngine

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}


@dataclass
class Traced:
    """What a test of traces needs of a gateway; ``spans`` are there when it has stopped."""

    gw: Serving
    collector: Collector

    @property
    def spans(self) -> list[Seen]:
        return self.collector.spans

    def only(self, kind: int) -> Seen:
        (span,) = self.of(kind)
        return span

    def of(self, kind: int) -> list[Seen]:
        """Spans of a kind, in the order in which they began."""
        return sorted((s for s in self.spans if s.kind == kind), key=lambda span: span.start_ns)

    @property
    def server(self) -> Seen:
        return self.only(SERVER)

    @property
    def routing(self) -> Seen:
        return self.only(INTERNAL)

    @property
    def clients(self) -> list[Seen]:
        return self.of(CLIENT)


@asynccontextmanager
async def tracing(
    *engines: RawEngine, telemetry: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Traced]:
    """Run a gateway that traces everything, unless ``telemetry`` says otherwise."""
    async with Collector() as collector:
        told = {"otlp_endpoint": collector.url, "trace_sample": 1.0} | (telemetry or {})
        async with serving(*engines, telemetry=told, **config) as gw:
            yield Traced(gw, collector)
