"""``GET /console``, the operator's page, and ``GET /console/data``, which it polls."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from gateway.console.alerts import Alerts
from gateway.console.decisions import Decisions
from gateway.console.page import load_page
from gateway.console.snapshot import Snapshots
from gateway.errors import InvalidRequest
from gateway.proxy.headers import request_id_from
from gateway.proxy.responses import json_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.console.parts import Parts
    from gateway.telemetry.requests import Telemetry
    from gateway.usage.usage import Usage

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    Guard = Callable[[Handler], Handler]

# An alert begins to count at most this late.
LOOK_EVERY_S = 5.0


class Console:
    """The console of one process; event loop only.

    Args:
        parts: The gateway's; read when asked, so they may be made later.
        telemetry: Knows what was observed of workers, and how late the event loop is.
        usage: Knows what workers' caches save.
        spans_lost: As for ``Alerts``.

    Attributes:
        decisions: Fed with every finished request.
        alerts: Judged every few seconds while ``run`` runs.
        is_reloaded: Says whether the configuration read last holds; set by who reads it again.
    """

    def __init__(
        self, parts: Parts, telemetry: Telemetry, usage: Usage, spans_lost: Callable[[], int]
    ) -> None:
        self.decisions = Decisions()
        self.is_reloaded: Callable[[], bool] = lambda: True
        self.alerts = Alerts(
            parts,
            self.decisions,
            lag_p99_s=lambda now_s: telemetry.lag.recent.quantile(0.99, now_s),
            spans_lost=spans_lost,
            is_reloaded=lambda: self.is_reloaded(),
        )
        self._snapshots = Snapshots(parts, telemetry, usage, self.decisions, self.alerts)
        self._page = load_page(needs_token=False)

    async def run(self) -> None:
        """Judge the alerts until cancelled."""
        while True:
            self.alerts.look(time.monotonic())
            await asyncio.sleep(LOOK_EVERY_S)

    def routes(self, guard: Guard, page_guard: Guard, *, needs_token: bool) -> list[web.RouteDef]:
        """Return the routes.

        Args:
            guard: Lets only operators through.
            page_guard: Likewise for the page, which a browser asks for without a token and which
                tells nothing.
            needs_token: Whether operators are known by a token.
        """
        self._page = load_page(needs_token=needs_token)
        return [
            web.get("/console", page_guard(self.page)),
            web.get("/console/data", guard(self.data)),
        ]

    async def page(self, request: web.Request) -> web.Response:
        """``GET /console``."""
        headers = self._page.headers
        if request.headers.get("if-none-match") == headers["etag"]:
            return web.Response(status=304, headers=headers)
        return web.Response(body=self._page.body, headers=headers)

    async def data(self, request: web.Request) -> web.Response:
        """``GET /console/data?after=UNIX_SECONDS``."""
        document = await self._snapshots.make(_after(request.query.get("after", "0")))
        headers = [
            ("x-request-id", request_id_from(request.headers.get("x-request-id"))),
            ("cache-control", "no-store"),
        ]
        return json_response(orjson.dumps(document), headers)


def _after(text: str) -> float:
    try:
        after_s = float(text)
    except ValueError:
        after_s = -1.0
    # Also false for what is no number.
    if not 0.0 <= after_s < float("inf"):
        raise InvalidRequest("after: expected seconds since 1970.", param="after")
    return after_s
