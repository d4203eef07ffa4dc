"""Send spans to an OTLP collector from a thread of its own, whatever the collector does.

Requests wait for nothing here: a span is made and put in a queue; while that is full, none is even
made. Source: OpenTelemetry protocol, OTLP/HTTP (binary protobuf to ``/v1/traces``).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import requests
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway.telemetry.build import installed_version
from gateway.tracing.spans import SpanMaker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from gateway.telemetry.record import RequestRecord
    from gateway.tracing.trace import Trace

log = structlog.get_logger("warmlane")

# About 4 MB: what a busy gateway samples at 1 % in a minute.
MAX_WAITING_SPANS = 2048
# A request has twelve spans at most: ten attempts, of which each pool's limit allows no more.
_SPANS_PER_REQUEST = 12
# Encoding a batch holds the interpreter, a millisecond at a time, for some ten milliseconds.
_BATCH_SPANS = 256
_EVERY_S = 2.0
# A collector that is away is told of once a minute, with the number of spans that it cost.
WARN_EVERY_S = 60.0
# What waits at a stop is sent in that time or not at all; then the sending itself is broken off.
_FLUSH_S = 1.2
_STOP_S = 1.7
_POLL_S = 0.02
_PATH = "/v1/traces"


class Export:
    """The exporter of one process; starts its thread. Event loop only.

    Args:
        endpoint: Of the collector, with ``/v1/traces`` or without.
        scheme: Of the client port.
        logs_prompts: Whether spans may carry prompts.
        clock: Monotonic seconds.

    Attributes:
        dropped: Spans that were not made because too many wait.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        scheme: str = "http",
        logs_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # The library tells every failure and every retry; what it comes to is told below.
        library = logging.getLogger("opentelemetry")
        library.addHandler(logging.NullHandler())
        library.propagate = False
        self._counted = _Counted(
            OTLPSpanExporter(traces_url(endpoint), session=_Session()),
            urlsplit(endpoint).hostname or "",
            clock,
        )
        self._processor = BatchSpanProcessor(
            self._counted,
            max_queue_size=MAX_WAITING_SPANS + _SPANS_PER_REQUEST,
            schedule_delay_millis=_EVERY_S * 1e3,
            max_export_batch_size=_BATCH_SPANS,
        )
        scope = InstrumentationScope("warmlane.gateway", installed_version())
        self._maker = SpanMaker(process_resource(), scope, scheme=scheme, logs_prompts=logs_prompts)
        self._taken = 0
        self.dropped = 0

    @property
    def exported(self) -> int:
        """Spans that the collector took."""
        return self._counted.exported

    @property
    def failed(self) -> int:
        """Spans that it did not take."""
        return self._counted.failed

    @property
    def num_waiting(self) -> int:
        """Spans in the queue or being sent."""
        return self._taken - self.exported - self.failed

    def take(self, trace: Trace, record: RequestRecord, route: str | None) -> None:
        """Make spans of a request that is over and queue them; never waits.

        Args:
            trace: Its notes.
            record: Its account.
            route: The pattern of its path; None if there is no such path.
        """
        if self.num_waiting >= MAX_WAITING_SPANS:
            self.dropped += 2 + len(trace.attempts)
            return
        for span in self._maker.make(trace, record, route):
            self._taken += 1
            self._processor.on_end(span)

    async def close(self) -> None:
        """Send what waits, if the collector takes it at once; a second call does nothing more."""
        # Its own waits are for seconds, and nothing may hold up the end of the process.
        thread = threading.Thread(target=self._processor.shutdown, daemon=True)
        thread.start()
        begun_s = time.monotonic()
        while thread.is_alive() and (passed_s := time.monotonic() - begun_s) < _STOP_S:
            if passed_s > _FLUSH_S:
                self._counted.shutdown()
            await asyncio.sleep(_POLL_S)
        self._counted.is_quiet = True


class _Counted(SpanExporter):
    """Counts what became of spans, and tells of failures now and then. In the exporter's thread."""

    def __init__(self, exporter: SpanExporter, host: str, clock: Callable[[], float]) -> None:
        self.exported = 0
        self.failed = 0
        self.is_quiet = False
        self._exporter = exporter
        self._host = host
        self._clock = clock
        self._is_shut_down = False
        self._told_s: float | None = None
        self._untold = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        try:
            result = self._exporter.export(spans)
        except Exception:
            # Whatever it is, these spans are lost and the next ones may not be.
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.exported += len(spans)
            return result
        self.failed += len(spans)
        self._untold += len(spans)
        now_s = self._clock()
        if not self.is_quiet and (self._told_s is None or now_s >= self._told_s + WARN_EVERY_S):
            log.warning("traces_not_taken", collector=self._host, spans=self._untold)
            self._told_s, self._untold = now_s, 0
        return result

    def shutdown(self) -> None:
        """Break off what is being sent; a second call does nothing more."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()


class _Session(requests.Session):
    """Reads nothing but the status: an answer without end would otherwise be kept whole."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        """Send a request; its answer has no body.

        Raises:
            TooManyRedirects: If it is to be sent elsewhere, which the library takes for a success.
        """
        response = super().request(*args, **(options | {"stream": True}))
        response.close()
        if response.is_redirect:
            raise requests.TooManyRedirects("a collector is where it is configured to be")
        return response


def traces_url(endpoint: str) -> str:
    """Return where traces are sent: the endpoint itself, or ``/v1/traces`` below it."""
    parts = urlsplit(endpoint)
    path = parts.path.rstrip("/")
    return urlunsplit(parts._replace(path=path if path.endswith(_PATH) else path + _PATH))


def process_resource() -> Resource:
    """Say who this process is; ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME`` win."""
    ours = Resource.create(
        {
            "service.name": "warmlane",
            "service.version": installed_version(),
            "service.instance.id": str(uuid.uuid4()),
        }
    )
    return ours.merge(OTELResourceDetector().detect())
