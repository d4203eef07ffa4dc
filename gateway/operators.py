"""Where metrics and admin endpoints live: on the client port, or only on one of their own."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from aiohttp import web

from gateway.config import Settings
from gateway.proxy.server import API
from gateway.proxy.shape import in_shape
from gateway.settings import ConfigError
from gateway.sockets import listening
from gateway.supervisor.child import SETTINGS_PATH, WINDOWS_PATH
from gateway.supervisor.peers import Peer, as_from_peer, relay_routes
from gateway.supervisor.windows import pack

if TYPE_CHECKING:
    import ssl as ssl_module
    from collections.abc import Awaitable, Callable

    from gateway.admin import Admin
    from gateway.config import ServerConfig
    from gateway.supervisor.child import Role
    from gateway.telemetry.requests import Telemetry


class Operators:
    """The operators' ways into one process.

    With ``server.admin_port`` nothing of theirs is on the client port. One of several processes
    answers the supervisor, and lets it answer on the client port.

    Args:
        server: Says whether there is an admin port.
        role: What the supervisor told this process; None = it is the only one.
        admin: The endpoints.
        telemetry: For the supervisor.
        reload: Takes over the configuration that the supervisor hands on.
        ssl: For the admin port; None = it speaks plain HTTP.
    """

    def __init__(
        self,
        server: ServerConfig,
        role: Role | None,
        admin: Admin,
        telemetry: Telemetry,
        reload: Callable[[Settings], Awaitable[None]],
        ssl: ssl_module.SSLContext | None = None,
    ) -> None:
        self._server = server
        self._role = role
        self._routes = admin.routes()
        self._telemetry = telemetry
        self._reload = reload
        self._ssl = ssl
        self._supervisor: Peer | None = None
        self._runner: web.AppRunner | None = None

    def place(self, app: web.Application) -> None:
        """Give the client port's application what operators find there; call it once."""
        if self._role is not None:
            self._routes.append(web.get(WINDOWS_PATH, self._windows))
            self._routes.append(web.post(SETTINGS_PATH, self._settings))
            if self._role.supervisor is not None:
                self._supervisor = Peer(self._role.supervisor)
                app.add_routes(relay_routes(self._supervisor))
        elif self._server.admin_port is not None:
            api = app[API]
            self._routes += [
                web.get("/health", api.live),
                web.get("/health/live", api.live),
                web.get("/health/ready", api.ready),
            ]
        else:
            app.add_routes(self._routes)

    async def start(self) -> None:
        """Listen where they do not live on the client port.

        Raises:
            OSError: If the address cannot be listened on.
        """
        server, role = self._server, self._role
        if role is None and server.admin_port is None:
            return
        app = web.Application(
            client_max_size=server.max_body_mb << 20,
            middlewares=(in_shape,) if role is None else (in_shape, as_from_peer),
        )
        app.add_routes(self._routes)
        runner = self._runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        if role is None:
            with listening("server.admin_port", server.host, server.admin_port):
                site = web.TCPSite(runner, server.host, server.admin_port, ssl_context=self._ssl)
                await site.start()
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(role.socket)  # of the process before this one
        await web.UnixSite(runner, role.socket).start()

    async def close(self) -> None:
        """Stop listening; a second call does nothing more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._supervisor is not None:
            await self._supervisor.close()

    async def _windows(self, _request: web.Request) -> web.Response:
        return web.Response(body=pack(self._telemetry), content_type="application/json")

    async def _settings(self, request: web.Request) -> web.Response:
        try:
            await self._reload(Settings.model_validate_json(await request.read()))
        except (ConfigError, ValueError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=422)
        return web.json_response({})
