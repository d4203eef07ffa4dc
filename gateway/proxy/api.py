"""The client surface: the paths of ``gateway/protocols/surfaces.py``, the models, health.

Everything else is 404: an engine's administration paths are never proxied.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from gateway.errors import (
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    PoolUnavailable,
    ShuttingDown,
)
from gateway.protocols.errors import NotSupported
from gateway.protocols.surfaces import Surfaces, hint
from gateway.proxy.asked import Asking
from gateway.proxy.body import parse_body
from gateway.proxy.counting import count_tokens
from gateway.proxy.delivery import own_lines
from gateway.proxy.forward import Proxy
from gateway.proxy.headers import request_id_from, told_as_json
from gateway.proxy.responses import AiohttpExchange, error_response, json_response
from gateway.proxy.transfers import without_transfers
from gateway.routing.bodies import KnownBodies
from gateway.routing.dispatch import Inbound, Outcome
from gateway.telemetry.record import RequestRecord
from gateway.tenancy import Tenancy, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp import web

    from gateway.front.exchange import Exchange
    from gateway.protocols.surfaces import SurfaceSpec
    from gateway.proxy.lifecycle import Lifecycle
    from gateway.proxy.limits import Limits
    from gateway.proxy.rewrite import Rewriter
    from gateway.proxy.ways import Way
    from gateway.routing.dispatch import Dispatcher
    from gateway.tenancy import Tenant
    from gateway.tracing import Tracing

log = structlog.get_logger("warmlane")

# What servers log for a client that left before its status was sent (nginx's convention).
STATUS_CLIENT_CLOSED = 499
# Clients choose these names, and a line of the log is no place for megabytes of them.
MAX_MODEL_CHARS = 256
_JSON_LINE = b"content-type: application/json\r\n"


class Api:
    """The handlers; one per process.

    Args:
        dispatcher: Routes.
        observe: Called once per inference request, when it is over.
        limits: On bodies, heads and time.
        lifecycle: Of this process.
        clock: Monotonic seconds, the dispatcher's.
        rewriters: Pool name -> its canonicalisation.
        tenancy: Who sends a request; None = nobody is asked.
        surfaces: The paths that are served; None = those that every gateway has.

    Attributes:
        proxy: Forwards the requests.
        tenancy: As given.
        tracing: Decides which requests are traced; None = none is.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        observe: Callable[[RequestRecord], None],
        limits: Limits,
        lifecycle: Lifecycle,
        clock: Callable[[], float],
        rewriters: Mapping[str, Rewriter],
        tenancy: Tenancy | None = None,
        surfaces: Surfaces | None = None,
    ) -> None:
        self._surfaces = surfaces or Surfaces()
        self._asking = Asking()
        self._dispatcher = dispatcher
        self._observe = observe
        self._limits = limits
        self._lifecycle = lifecycle
        self._clock = clock
        self._bodies = KnownBodies()
        self.tenancy = tenancy or Tenancy()
        self.tracing: Tracing | None = None
        self.proxy = Proxy(dispatcher, limits, lifecycle, clock, rewriters, self.tenancy)

    def add_routes(self, app: web.Application) -> None:
        """Add the client surface to ``app``."""
        for path in self._surfaces.patterns():
            app.router.add_post(path, self.infer, expect_handler=_no_answer)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_get("/v1/realtime", self.realtime)
        app.router.add_get("/health", self.live)
        app.router.add_get("/health/live", self.live)
        app.router.add_get("/health/ready", self.ready)

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """``POST`` on an inference path, through aiohttp."""
        exchange = AiohttpExchange(request, self._limits)
        await self.serve(exchange)
        return exchange.response()

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths in full that ``serve`` takes POSTs to."""
        return self._surfaces.exact

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``: models, aliases and adapters of all pools, each once."""
        try:
            return _json(request, {"object": "list", "data": self._cards(request)})
        except GatewayError as error:
            return error_response(error, _request_id(request))

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/ID``: one of them."""
        name = request.match_info["model"]
        try:
            for card in self._cards(request):
                if card["id"] == name:
                    return _json(request, card)
            raise _no_model(name)
        except GatewayError as error:
            return error_response(error, _request_id(request))

    async def realtime(self, request: web.Request) -> web.Response:
        """``GET /v1/realtime``: websockets are not proxied."""
        error = NotSupported("The realtime API is not available; no websockets are proxied.")
        response = error_response(error, _request_id(request))
        response.force_close()
        return response

    def _cards(self, request: web.Request) -> list[dict[str, object]]:
        """Describe the models that whoever sends this may use."""
        tenant = self.tenancy.identify_head(request.headers, request.raw_headers, request.transport)
        names: dict[str, str | None] = {}
        for pool in self._dispatcher.pools.values():
            for name in (*pool.models, *pool.aliases):
                names.setdefault(name, None)
        for pool in self._dispatcher.pools.values():
            for name in sorted(pool.adapters_served()):
                names.setdefault(name, pool.models[0])
        return [_card(name, parent) for name, parent in names.items() if tenant.may_use(name)]

    async def live(self, request: web.Request) -> web.Response:
        """``GET /health`` and ``/health/live``: the process answers."""
        return _json(request, {"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """``GET /health/ready``: 200 while new requests are welcome."""
        reason = "draining" if self._lifecycle.draining else self._lifecycle.not_ready
        if not reason:
            return _json(request, {"status": "ready"})
        response = _json(request, {"status": "not_ready", "reason": reason}, status=503)
        response.force_close()
        return response

    async def serve(self, exchange: Exchange) -> None:
        """Serve a request to an inference path, turn failures into answers, account for both.

        Raises:
            ConnectionError: If the client has left.
        """
        started_s = self._clock()
        request_id = request_id_from(exchange.headers.get("x-request-id"))
        spec = self._surfaces.find(exchange.path)
        record = RequestRecord(request_id, "" if spec is None else spec.name)
        if self.tracing is not None:
            head = exchange.head
            exchange.trace = self.tracing.begin(head.headers, head.raw, record, started_s)
        task = asyncio.current_task()
        assert task is not None  # handlers run in tasks
        self._lifecycle.enter(task)
        try:
            if spec is None:
                raise NotFound(f"No such path: POST {exchange.path}{hint(exchange.path)}.")
            await self._serve(spec, exchange, record, started_s)
        except GatewayError as error:
            _refuse(exchange, error, record)
        except asyncio.CancelledError:
            if not self._lifecycle.is_over or exchange.is_gone:
                _client_closed(record)
                raise
            task.uncancel()
            _refuse(exchange, ShuttingDown("The gateway was shut down."), record)
        except ConnectionError:
            _client_closed(record)
            raise
        except Exception as fault:
            log.error("request_failed", request_id=record.request_id, exc_info=fault)
            failure = GatewayError("The gateway failed on this request.", code="internal_error")
            _refuse(exchange, failure, record)
        finally:
            self._lifecycle.leave(task)
            record.duration_s = self._clock() - started_s
            if self.tracing is not None and exchange.trace is not None:
                self.tracing.end(exchange.trace, record, self._surfaces.route(exchange.path))
            self._observe(record)

    async def _serve(
        self, spec: SurfaceSpec, exchange: Exchange, record: RequestRecord, started_s: float
    ) -> None:
        if self._lifecycle.draining:
            raise ShuttingDown("This gateway is shutting down; another one will answer.")
        exchange.admit_body(self._limits.body_bytes)
        tenant = self.tenancy.identify(exchange)
        record.tenant = tenant.name
        body = await exchange.read_body()
        if spec.way == "count_tokens":
            await self._count(exchange, body, tenant, record)
            return
        way: Way | None = None
        if spec.way == "chat":
            inbound, body = self._read(spec, exchange, body, tenant, record.request_id)
        else:
            inbound, body, way = await self._asking.read(
                spec, exchange, body, tenant, record.request_id
            )
        record.model = inbound.model[:MAX_MODEL_CHARS]
        record.stream = inbound.body.get("stream") is True
        tenant.check_model(inbound.model)
        grant = self.tenancy.admit(exchange, tenant, inbound.body)
        try:
            await self.proxy.forward(exchange, inbound, body, record, started_s, way)
        finally:
            settle(grant, record)

    def _read(
        self, spec: SurfaceSpec, exchange: Exchange, body: bytes, tenant: Tenant, request_id: str
    ) -> tuple[Inbound, bytes]:
        """Read a chat or text completion, unless its body came before."""
        surface: Any = spec.name
        known = self._bodies.find(tenant.name, surface, body)
        if known is None:
            known = self._bodies.add(tenant.name, surface, body, parse_body(body, surface))
        if not tenant.may_transfer:
            exchange.head = told_as_json(exchange.head)
            kept, document = without_transfers(body, known.document)
            if kept is not body:
                body = kept
                known = self._bodies.find(tenant.name, surface, body) or self._bodies.add(
                    tenant.name, surface, body, document
                )
        document = known.document
        inbound = Inbound(
            surface,
            document,
            exchange.headers,
            document["model"],
            tenant.name,
            request_id,
            known,
            tenant.salting(document),
        )
        return inbound, body

    async def _count(
        self, exchange: Exchange, body: bytes, tenant: Tenant, record: RequestRecord
    ) -> None:
        """Answer how many tokens a message's prompt has; costs its tenant nothing."""
        document = parse_body(body, "messages")
        if not tenant.may_transfer:
            _, document = without_transfers(body, document)
        model = document["model"]
        record.model = model[:MAX_MODEL_CHARS]
        tenant.check_model(model)
        pool = self._dispatcher.pool_for(model)
        if pool is None:
            raise _no_model(model)
        record.pool = pool.name
        answer = await count_tokens(pool, document, self._asking.speech)
        record.status, record.outcome = 200, Outcome.OK.value
        exchange.answer(200, _JSON_LINE + own_lines(exchange, record), answer)


def _no_model(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"The model {name!r} does not exist; GET /v1/models lists those that do.", param="model"
    )


def _card(name: str, parent: str | None) -> dict[str, object]:
    """Describe a model as OpenAI does; an adapter as vLLM does, with what it adapts."""
    card: dict[str, object] = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "warmlane",
    }
    return card if parent is None else card | {"parent": parent}


async def _no_answer(request: web.Request) -> None:
    """Leave an ``Expect`` header to ``Api.serve``."""


def _request_id(request: web.Request) -> str:
    return request_id_from(request.headers.get("x-request-id"))


def _json(request: web.Request, document: object, *, status: int = 200) -> web.Response:
    headers = [("x-request-id", _request_id(request))]
    return json_response(orjson.dumps(document), headers, status=status)


def _refuse(exchange: Exchange, error: GatewayError, record: RequestRecord) -> None:
    """Answer with an error and account for it."""
    if not record.outcome:
        record.outcome = (
            "refused"
            if isinstance(error, InvalidRequest)
            else "unavailable"
            if isinstance(error, PoolUnavailable)
            else "failed"
        )
    if exchange.is_begun:
        # Half an answer is out: nothing but its breaking off can tell of the error.
        exchange.abort()
        return
    record.status = error.status
    if isinstance(error, ShuttingDown):
        exchange.keep_alive = False
    exchange.refuse(error, own_lines(exchange, record))


def _client_closed(record: RequestRecord) -> None:
    record.status = record.status or STATUS_CLIENT_CLOSED
    record.outcome = record.outcome or Outcome.CLIENT_CLOSED.value
