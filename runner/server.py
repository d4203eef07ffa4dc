"""The HTTP server: routes, limits, start and drain. Knows nothing of models."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING
from weakref import ref

from aiohttp import web

from runner.generate import chat_completions, completions
from runner.operations import ROUTES
from runner.responses import SERVICE, add_request_id, answer_errors

if TYPE_CHECKING:
    from runner.service import Service

# The contract's default of `server.max_body_mb`: a million tokens of text and room to spare.
MAX_BODY_BYTES = 32 * 1024 * 1024

# Connections that are idle after a drain need no grace; handlers past it are cancelled.
SHUTDOWN_TIMEOUT_S = 0.5


def build_app(service: Service) -> web.Application:
    """Return the application of one runner; the service is the caller's to keep."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer_errors])
    app[SERVICE] = ref(service)
    app.on_response_prepare.append(add_request_id)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)
    app.router.add_routes(ROUTES)
    return app


class AddressError(RuntimeError):
    """The address to listen on is unknown or taken; the message names it."""


def bind(host: str, port: int) -> socket.socket:
    """Take an address without listening on it yet: early connections are refused, not hung.

    Raises:
        AddressError: If that is not possible.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    try:
        # A restarted process must not wait for the old one's connections to time out.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise AddressError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


class HttpServer:
    """Serves one application on a bound socket; use from one event loop."""

    def __init__(self, service: Service, bound: socket.socket) -> None:
        self._service = service
        self._bound = bound
        # Without cancellation a vanished client is noticed only at the next write, and a
        # request that is not streamed writes only at its end.
        self._runner = web.AppRunner(
            build_app(service),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        )

    async def start(self) -> None:
        """Begin to take connections."""
        await self._runner.setup()
        await web.SockSite(self._runner, self._bound).start()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for those in flight, at most ``timeout_s`` seconds."""
        self._service.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._service.is_idle.wait()

    async def stop(self) -> None:
        """Close all connections; requests still in flight are cancelled and abort."""
        await self._runner.cleanup()
