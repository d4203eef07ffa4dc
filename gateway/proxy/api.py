"""The client surface: OpenAI's inference paths, the list of models, health.

Everything else is 404: an engine's administration paths are never proxied.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson
import structlog

from gateway.errors import (
    ExpectationFailed,
    GatewayError,
    InvalidRequest,
    PoolUnavailable,
    ShuttingDown,
)
from gateway.proxy.body import Surface, check_length, parse_body, read_body
from gateway.proxy.delivery import own_headers
from gateway.proxy.forward import Proxy
from gateway.proxy.headers import request_id_from
from gateway.proxy.responses import error_response, json_response
from gateway.routing.dispatch import Inbound, Outcome
from gateway.telemetry.record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from gateway.proxy.lifecycle import Lifecycle
    from gateway.proxy.limits import Limits
    from gateway.routing.dispatch import Dispatcher

log = structlog.get_logger("warmlane")

# What servers log for a client that left before its status was sent (nginx's convention).
STATUS_CLIENT_CLOSED = 499


class Api:
    """The handlers; one per process.

    Args:
        dispatcher: Routes.
        observe: Called once per inference request, when it is over.
        limits: On bodies, heads and time.
        lifecycle: Of this process.
        clock: Monotonic seconds, the dispatcher's.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        observe: Callable[[RequestRecord], None],
        limits: Limits,
        lifecycle: Lifecycle,
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._observe = observe
        self._limits = limits
        self._lifecycle = lifecycle
        self._clock = clock
        self._proxy = Proxy(dispatcher, limits, lifecycle, clock)

    def add_routes(self, app: web.Application) -> None:
        """Add the client surface to ``app``."""
        add = app.router.add_route
        expect = self.expect
        add("POST", "/v1/chat/completions", self.chat, expect_handler=expect)
        add("POST", "/v1/completions", self.completions, expect_handler=expect)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.live)
        app.router.add_get("/health/live", self.live)
        app.router.add_get("/health/ready", self.ready)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        return await self._infer(request, "chat")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        return await self._infer(request, "completions")

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``: names and aliases of all pools, each once."""
        pools = self._dispatcher.pools.values()
        names = dict.fromkeys(name for pool in pools for name in (*pool.models, *pool.aliases))
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "warmlane"} for name in names
        ]
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

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer an ``Expect`` header: go on, or refuse before the body is sent."""
        try:
            check_length(request, self._limits)
            if request.headers["expect"].lower() != "100-continue":
                raise ExpectationFailed("The only expectation known here is 100-continue.")
        except InvalidRequest as error:
            return error_response(error, _request_id(request))
        if request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    async def _infer(self, request: web.Request, surface: Surface) -> web.StreamResponse:
        """Serve, turn failures into answers, and account for both."""
        started_s = self._clock()
        record = RequestRecord(_request_id(request), surface)
        task = asyncio.current_task()
        assert task is not None  # handlers run in tasks
        self._lifecycle.enter(task)
        try:
            return await self._serve(request, surface, record, started_s)
        except GatewayError as error:
            return _refuse(request, error, record)
        except asyncio.CancelledError:
            if not self._lifecycle.is_over or request.transport is None:
                _client_closed(record)
                raise
            task.uncancel()
            return _refuse(request, ShuttingDown("The gateway was shut down."), record)
        except ConnectionError:
            _client_closed(record)
            raise
        except Exception:
            log.exception("request_failed", request_id=record.request_id)
            failure = GatewayError("The gateway failed on this request.", code="internal_error")
            return _refuse(request, failure, record)
        finally:
            self._lifecycle.leave(task)
            record.duration_s = self._clock() - started_s
            self._observe(record)

    async def _serve(
        self, request: web.Request, surface: Surface, record: RequestRecord, started_s: float
    ) -> web.StreamResponse:
        if self._lifecycle.draining:
            raise ShuttingDown("This gateway is shutting down; another one will answer.")
        body = await read_body(request, self._limits)
        document = parse_body(body, surface)
        model = record.model = document["model"]
        record.stream = document.get("stream") is True
        # The mapping of aiohttp finds names in any case.
        inbound = Inbound(surface, document, request.headers, model, request_id=record.request_id)
        return await self._proxy.forward(request, inbound, body, record, started_s)


def _request_id(request: web.Request) -> str:
    return request_id_from(request.headers.get("x-request-id"))


def _json(request: web.Request, document: object, *, status: int = 200) -> web.Response:
    headers = [("x-request-id", _request_id(request))]
    return json_response(orjson.dumps(document), headers, status=status)


def _refuse(request: web.Request, error: GatewayError, record: RequestRecord) -> web.Response:
    """Answer with an error and account for it."""
    record.status = error.status
    if not record.outcome:
        record.outcome = (
            "refused"
            if isinstance(error, InvalidRequest)
            else "unavailable"
            if isinstance(error, PoolUnavailable)
            else "failed"
        )
    response = error_response(error, record.request_id)
    response.headers.update(own_headers(request, record))
    if isinstance(error, ShuttingDown) or not request.content.is_eof():
        response.force_close()
    return response


def _client_closed(record: RequestRecord) -> None:
    record.status = record.status or STATUS_CLIENT_CLOSED
    record.outcome = record.outcome or Outcome.CLIENT_CLOSED.value
