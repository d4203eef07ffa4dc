"""An OTLP/HTTP collector in this process, which keeps what it gets and can be made to misbehave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support import poll_until

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

SERVER, INTERNAL, CLIENT = 2, 1, 3


@dataclass(slots=True)
class Seen:
    """One span."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    flags: int
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """Listens while entered; answers ``status``.

    Attributes:
        spans: Those that came, in order.
        requests: Bodies of the requests.
        headers: Of the last one.
    """

    status: int = 200
    spans: list[Seen] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Collector:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.headers = dict(request.headers)
        self.requests.append(await request.read())
        if self.status == 200:
            told = ExportTraceServiceRequest.FromString(self.requests[-1])
            for of_resource in told.resource_spans:
                resource = _attributes(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    self.spans += [_seen(span, resource) for span in of_scope.spans]
        return web.Response(status=self.status, content_type="application/x-protobuf")

    async def trace(self, num_spans: int, trace_id: str | None = None) -> list[Seen]:
        """Return the spans of a trace (the only one if not named), once there are as many."""

        def found() -> list[Seen]:
            return [span for span in self.spans if trace_id in (None, span.trace_id)]

        await poll_until(lambda: len(found()) >= num_spans, what=f"{num_spans} spans")
        assert len(found()) == num_spans, found()
        return sorted(found(), key=lambda span: (span.kind != SERVER, span.start_ns))


def _seen(span: Span, resource: dict[str, Any]) -> Seen:
    return Seen(
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        span.flags,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        _attributes(span.attributes),
        resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
