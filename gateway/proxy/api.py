"""The client surface: OpenAI's inference paths, the list of models, health.

Everything else is 404: an engine's administration paths are never proxied.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson
import structlog

from gateway.errors import GatewayError, InvalidRequest, PoolUnavailable, ShuttingDown
from gateway.proxy.body import Surface, parse_body
from gateway.proxy.delivery import own_lines
from gateway.proxy.forward import Proxy
from gateway.proxy.headers import request_id_from
from gateway.proxy.responses import AiohttpExchange, error_response, json_response
from gateway.routing.bodies import KnownBodies
from gateway.routing.dispatch import Inbound, Outcome
from gateway.telemetry.record import RequestRecord
from gateway.tenancy import Tenancy, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp import web

    from gateway.front.exchange import Exchange
    from gateway.proxy.lifecycle import Lifecycle
    from gateway.proxy.limits import Limits
    from gateway.proxy.rewrite import Rewriter
    from gateway.routing.dispatch import Dispatcher

log = structlog.get_logger("warmlane")

# What servers log for a client that left before its status was sent (nginx's convention).
STATUS_CLIENT_CLOSED = 499
_SURFACES: dict[str, Surface] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
}


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

    Attributes:
        proxy: Forwards the requests.
        tenancy: As given.
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
    ) -> None:
        self._dispatcher = dispatcher
        self._observe = observe
        self._limits = limits
        self._lifecycle = lifecycle
        self._clock = clock
        self._bodies = KnownBodies()
        self.tenancy = tenancy or Tenancy()
        self.proxy = Proxy(dispatcher, limits, lifecycle, clock, rewriters, self.tenancy)

    def add_routes(self, app: web.Application) -> None:
        """Add the client surface to ``app``."""
        for path in _SURFACES:
            app.router.add_post(path, self.infer, expect_handler=_no_answer)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.live)
        app.router.add_get("/health/live", self.live)
        app.router.add_get("/health/ready", self.ready)

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """``POST`` on an inference path, through aiohttp."""
        exchange = AiohttpExchange(request, self._limits)
        await self.serve(exchange)
        return exchange.response()

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``: models, aliases and adapters of all pools, each once."""
        try:
            tenant = self.tenancy.identify_head(
                request.headers, request.raw_headers, request.transport
            )
        except GatewayError as error:
            return error_response(error, _request_id(request))
        names: dict[str, str | None] = {}
        for pool in self._dispatcher.pools.values():
            for name in (*pool.models, *pool.aliases):
                names.setdefault(name, None)
        for pool in self._dispatcher.pools.values():
            for name in sorted(pool.adapters_served()):
                names.setdefault(name, pool.models[0])
        data = [_card(name, parent) for name, parent in names.items() if tenant.may_use(name)]
        return _json(request, {"object": "list", "data": data})

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
        record = RequestRecord(request_id, _SURFACES[exchange.path])
        task = asyncio.current_task()
        assert task is not None  # handlers run in tasks
        self._lifecycle.enter(task)
        try:
            await self._serve(exchange, record, started_s)
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
        except Exception:
            log.exception("request_failed", request_id=record.request_id)
            failure = GatewayError("The gateway failed on this request.", code="internal_error")
            _refuse(exchange, failure, record)
        finally:
            self._lifecycle.leave(task)
            record.duration_s = self._clock() - started_s
            self._observe(record)

    async def _serve(self, exchange: Exchange, record: RequestRecord, started_s: float) -> None:
        if self._lifecycle.draining:
            raise ShuttingDown("This gateway is shutting down; another one will answer.")
        exchange.admit_body(self._limits.body_bytes)
        tenant = self.tenancy.identify(exchange)
        record.tenant = tenant.name
        body = await exchange.read_body()
        surface = _SURFACES[exchange.path]
        known = self._bodies.find(record.tenant, surface, body)
        if known is None:
            document = parse_body(body, surface)
            known = self._bodies.add(record.tenant, surface, body, document)
        document = known.document
        model = record.model = document["model"]
        record.stream = document.get("stream") is True
        tenant.check_model(model)
        inbound = Inbound(
            surface,
            document,
            exchange.headers,
            model,
            tenant.name,
            record.request_id,
            known,
            tenant.salting(document),
        )
        grant = self.tenancy.admit(exchange, tenant, document)
        try:
            await self.proxy.forward(exchange, inbound, body, record, started_s)
        finally:
            settle(grant, record)


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
