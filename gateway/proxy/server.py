"""The aiohttp server around the client surface: connections, error shapes, start and drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import time
from typing import TYPE_CHECKING, Any, Literal

import structlog
from aiohttp import web
from aiohttp.web_protocol import _ErrInfo

from gateway.errors import BodyTimeout, ExpectationFailed, GatewayError, error_for_status
from gateway.front.exchange import NO_TIMING, refusal
from gateway.front.raw import RawFront
from gateway.protocols.surfaces import Surfaces, hint
from gateway.proxy.api import Api
from gateway.proxy.headers import request_id_from
from gateway.proxy.lifecycle import Lifecycle
from gateway.proxy.limits import Limits
from gateway.proxy.responses import error_response
from gateway.sockets import listening, probe_peer

if TYPE_CHECKING:
    import ssl as ssl_module
    from collections.abc import Callable, Mapping, Sequence

    from aiohttp import StreamReader

    from gateway.proxy.rewrite import Rewriter
    from gateway.routing.dispatch import Dispatcher
    from gateway.telemetry.record import RequestRecord
    from gateway.tenancy import Tenancy

LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
LIMITS = web.AppKey("limits", Limits)
API = web.AppKey("api", Api)

Front = Literal["aiohttp", "raw"]

log = structlog.get_logger("warmlane")

# One header may take this share of all: cookies and traces are the long ones.
_MAX_FIELD_RATIO = 4
# How long the rest of a refused body is read, so that its client can read the refusal.
_LINGER_S = 2.0
# How long streams get to pass on their error event once the drain time is over.
_END_S = 2.0
# Requests leave hardly a cycle behind; Python's defaults (700, 10, 10) collect every few requests
# all the same, and cost 8 % of the CPU of a small one (measured 2026-11-30, in process).
_GC_THRESHOLDS = (20_000, 20, 50)
_FAILED = "The gateway failed on this request."
# Connections waiting to be accepted; a burst of a thousand agents must not see refusals.
_BACKLOG = 1024


def make_app(
    dispatcher: Dispatcher,
    *,
    observe: Callable[[RequestRecord], None],
    limits: Limits | None = None,
    extra_routes: Sequence[web.RouteDef] = (),
    clock: Callable[[], float] = time.monotonic,
    rewriters: Mapping[str, Rewriter] | None = None,
    tenancy: Tenancy | None = None,
    pass_through: Sequence[str] = (),
) -> web.Application:
    """Build the application of the client port.

    Args:
        dispatcher: Routes requests.
        observe: Called once per inference request, when it is over.
        limits: Bounds; None takes the defaults.
        extra_routes: More routes for this port, such as metrics.
        clock: Monotonic seconds; the dispatcher's.
        rewriters: Pool name -> its canonicalisation; None forwards what came.
        tenancy: Who sends a request; None asks nobody.
        pass_through: More paths that are passed on to workers.
    """
    app = web.Application()
    app[LIFECYCLE] = Lifecycle()
    app[LIMITS] = limits = limits or Limits()
    app[API] = api = Api(
        dispatcher,
        observe,
        limits,
        app[LIFECYCLE],
        clock,
        rewriters or {},
        tenancy,
        Surfaces(pass_through),
    )
    api.add_routes(app)
    app.add_routes(extra_routes)
    return app


async def serve(
    app: web.Application,
    host: str,
    port: int,
    *,
    drain_s: float,
    ready: Callable[[int], None],
    ssl: ssl_module.SSLContext | None = None,
    front: Front = "raw",
    reuse_port: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

    Args:
        app: From ``make_app``.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        drain_s: How long running requests may go on after the signal.
        ready: Called with the port once connections are accepted.
        ssl: Context for TLS.
        front: What serves the connections of inference requests.
        reuse_port: Let other processes of this gateway listen on the same port.

    Raises:
        OSError: If the address cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    with listening("server.port", host, port):
        listener = await Listener.start(
            app, host, port, ssl=ssl, front=front, reuse_port=reuse_port
        )
    # What exists by now lives as long as the process; looking at it again finds nothing.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        ready(listener.port)
        await stop.wait()
        running = app[LIFECYCLE].num_running
        log.info("draining", running=running, drain_s=drain_s)
        drain = asyncio.create_task(listener.stop(drain_s))
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait((drain, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            drain.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drain
        hurried.cancel()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await listener.stop(0.0)


class Listener:
    """A listening application. Make it with ``start``."""

    def __init__(
        self, app: web.Application, runner: web.AppRunner, server: asyncio.Server, raw: RawFront
    ) -> None:
        self.port: int = server.sockets[0].getsockname()[1]
        self._raw = raw
        self._lifecycle = app[LIFECYCLE]
        self._runner = runner
        self._server = server
        self._is_closed = False

    @staticmethod
    async def start(
        app: web.Application,
        host: str,
        port: int,
        *,
        ssl: ssl_module.SSLContext | None = None,
        front: Front = "raw",
        reuse_port: bool = False,
    ) -> Listener:
        """Start the application and listen.

        Raises:
            OSError: If the address cannot be listened on.
        """
        # Without cancellation a vanished client would be noticed at the next write only.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_END_S)
        await runner.setup()
        loop = asyncio.get_running_loop()
        limits = app[LIMITS]
        reference = functools.partial(reference_connection, runner, limits, loop)
        raw = RawFront(app[API].serve, reference, app[API].paths, limits, loop)
        connection = reference if front == "aiohttp" else raw.connection
        try:
            server = await loop.create_server(
                connection,
                host,
                port,
                backlog=_BACKLOG,
                ssl=ssl,
                # To a client, greeting takes as long as a head may.
                ssl_handshake_timeout=limits.head_s if ssl else None,
                ssl_shutdown_timeout=_END_S if ssl else None,
                reuse_port=reuse_port or None,
            )
        except BaseException:
            await runner.cleanup()
            raise
        return Listener(app, runner, server, raw)

    @property
    def num_raw_connections(self) -> int:
        """Open client connections that the gateway's own front serves."""
        return self._raw.num_connections

    async def stop(self, drain_s: float) -> None:
        """Take no more requests, let running ones end within ``drain_s``, then close everything.

        New connections are still answered meanwhile, with 503, so that load balancers see it.
        """
        if not await self._lifecycle.drain(drain_s):
            await self._lifecycle.end(_END_S)
        if self._is_closed:
            return
        self._is_closed = True
        self._server.close()
        self._raw.close()
        await self._runner.cleanup()


def reference_connection(
    runner: web.AppRunner, limits: Limits, loop: asyncio.AbstractEventLoop
) -> ClientConnection:
    """Make a connection that aiohttp serves."""
    assert runner.server is not None  # set by its setup
    return ClientConnection(
        runner.server,
        loop=loop,
        head_s=limits.head_s,
        keepalive_timeout=limits.idle_s,
        max_line_size=limits.head_bytes // _MAX_FIELD_RATIO,
        max_field_size=limits.head_bytes // _MAX_FIELD_RATIO,
        max_headers=limits.headers,
        lingering_time=_LINGER_S,
        auto_decompress=False,
        access_log=None,  # aiohttp takes None for no log
    )


class ClientConnection(web.RequestHandler):
    """aiohttp's connection, with every error in OpenAI's shape.

    This is below routing, so it also shapes what never reaches a handler: broken requests, unknown
    paths, failed expectations. Requests that go well do not pass through it.
    """

    __slots__ = ("_head_s", "_head_timer", "_last_body")

    def __init__(self, manager: web.Server, *, head_s: float, **options: Any) -> None:
        super().__init__(manager, **options)
        self._head_s = head_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._last_body: StreamReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket."""
        super().connection_made(transport)
        probe_peer(transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a head that goes on must become a whole one in time."""
        num_messages = len(self._messages)
        super().data_received(data)
        if len(self._messages) > num_messages:
            self._watch_framing()
        waiter = self._waiter
        is_waiting = not self._request_count or (waiter is not None and not waiter.done())
        if is_waiting and not self._messages:
            if self._head_timer is None:
                self._head_timer = self._loop.call_later(self._head_s, self._head_late)
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """End what is under way."""
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def _watch_framing(self) -> None:
        """Take note of what was read last; where that is broken, whoever waits for a body hears it.

        aiohttp answers what is broken once the request before it is over, but leaves that one
        waiting for the rest of its body.
        """
        message, body = self._messages[-1]
        if not isinstance(message, _ErrInfo):
            self._last_body = body
        elif self._last_body is not None and not self._last_body.is_eof():
            self._last_body.set_exception(web.RequestPayloadError("broken framing"))
            self._lingering_time = 0.0  # nothing that follows can be read

    def _head_late(self) -> None:
        transport = self.transport
        if transport is not None:
            late = f"The head did not arrive within {self._head_s:g} s."
            transport.write(refusal(BodyTimeout(late)))
            self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer an exception that no handler caught; also aiohttp's own, for broken requests."""
        if isinstance(exc, ConnectionError) or request.writer.output_size > 0:
            raise ConnectionResetError("nothing can be answered any more") from exc
        if isinstance(exc, UnicodeEncodeError) and "expect" in request.headers:
            # aiohttp quotes an expectation unknown to it in its error, which cannot hold all bytes.
            status = ExpectationFailed.status
        if isinstance(exc, GatewayError):
            return error_response(exc, _request_id(request), request.path)
        if status >= 500:
            log.error("request_failed", exc_info=exc)
        # aiohttp's own message quotes the line that it could not read, which may hold a key.
        said = "The request is not valid HTTP." if status < 500 else _FAILED
        response = error_response(
            error_for_status(status, said),
            _request_id(request),
            request.path,
        )
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; aiohttp's HTTP errors are exchanged for ours first.

        Those of the proxy have told their id and times already.
        """
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = _reshape(request, resp)
        resp.headers.setdefault("x-request-id", _request_id(request))
        resp.headers.setdefault("server-timing", NO_TIMING)
        return await super().finish_response(request, resp, start_time)


def _reshape(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    what = f"{request.method} {request.path}"
    messages = {
        404: f"No such path: {what}{hint(request.path)}.",
        405: f"Method not allowed: {what}.",
    }
    message = messages.get(error.status) or error.text or error.reason
    shown = error_for_status(error.status, message)
    response = error_response(shown, _request_id(request), request.path)
    if "allow" in error.headers:
        response.headers["allow"] = error.headers["allow"]
    return response


def _request_id(request: Any) -> str:
    return request_id_from(request.headers.get("x-request-id"))
