"""``/admin/v1/warm``, ``documents`` and ``purge``: the operator's side of warm-up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from gateway.admin.purging import Purging
from gateway.errors import InvalidRequest
from gateway.proxy.body import parse_json, read_body
from gateway.proxy.headers import request_id_from
from gateway.proxy.responses import json_response
from gateway.tenancy import Tenancy
from gateway.warm.documents import DEFAULT_ROWS, MAX_ROWS
from gateway.warm.items import read_order

if TYPE_CHECKING:
    from gateway.misses.report import MissReport
    from gateway.proxy.limits import Limits
    from gateway.replicas.orders import Orders
    from gateway.warm.items import Order
    from gateway.warm.run import Run
    from gateway.warm.warmer import Warmer

NDJSON = "application/x-ndjson"
# How soon it is noticed that the operator has left while nothing happens.
LOOK_S = 0.5
# An idle stream says a blank line so often: what is between us and the operator cuts off silence.
HEARTBEAT_S = 5.0


class WarmEndpoints:
    """The handlers; one per process.

    Args:
        warmer: Does it.
        limits: Bound on bodies.
        misses: Forgets what is purged, too.
        tenancy: Knows the cache salts under which tenants' items are warmed; None = there are none.
        orders: Reaches other gateways; None = there is no Redis to reach them through.
    """

    def __init__(
        self,
        warmer: Warmer,
        limits: Limits,
        misses: MissReport | None = None,
        tenancy: Tenancy | None = None,
        orders: Orders | None = None,
    ) -> None:
        self._tenancy = tenancy or Tenancy()
        self._warmer = warmer
        self._limits = limits
        self._purging = Purging(warmer, misses, orders)

    async def warm(self, request: web.Request) -> web.StreamResponse:
        """``POST /admin/v1/warm``: run, and say each event as one line of JSON, at once."""
        order = self._salted(read_order(parse_json(await read_body(request, self._limits))))
        stream = _Stream(request)
        run = await self._warmer.make_run(order, stream.event)
        # Nothing may be awaited before it is started: one that never runs would never be over.
        # What is in flight when the operator leaves finishes, so the run is not this task's.
        task = self._warmer.start(run)
        watch = asyncio.ensure_future(stream.watch(run))
        try:
            await asyncio.shield(task)
            await stream.close()
        except ConnectionError:
            pass  # the operator has left
        finally:
            run.stop()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        return stream.response

    def _salted(self, order: Order) -> Order:
        """Have each item warmed under its tenant's salt, as its requests will be sent."""
        salt_of = {item.tenant: self._tenancy.named(item.tenant).salt for item in order.items}
        if not any(salt_of.values()):
            return order
        items = tuple(replace(item, salt=salt_of[item.tenant]) for item in order.items)
        return replace(order, items=items)

    async def state(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/warm``: the run that is under way and those before it."""
        return _json(request, self._warmer.state())

    async def documents(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/documents``: what is hot, where it is, and what that is worth."""
        given = request.query.get("limit", str(DEFAULT_ROWS))
        if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= MAX_ROWS:
            raise InvalidRequest(f"limit: expected a whole number, 1 to {MAX_ROWS}.", param="limit")
        return _json(request, self._warmer.documents(int(given)))

    async def purge(self, request: web.Request) -> web.Response:
        """``POST /admin/v1/purge``: forget a tenant or a document, here and elsewhere."""
        body = parse_json(await read_body(request, self._limits))
        return _json(request, await self._purging.everywhere(body))


class _Stream:
    """The lines of one run on their way to the operator."""

    def __init__(self, request: web.Request) -> None:
        headers = {
            "content-type": NDJSON,
            "cache-control": "no-cache",
            # Proxies of the nginx family would collect the lines before they pass them on.
            "x-accel-buffering": "no",
            "x-request-id": request_id_from(request.headers.get("x-request-id")),
        }
        self.response = web.StreamResponse(headers=headers)
        self._request = request
        self._lock = asyncio.Lock()
        self._said_s = asyncio.get_running_loop().time()

    async def close(self) -> None:
        await self.response.write_eof()

    async def event(self, event: dict[str, Any]) -> None:
        """Say one event; waits while the operator is slow.

        Raises:
            ConnectionError: If the operator has left.
        """
        await self._write(orjson.dumps(event) + b"\n")

    async def watch(self, run: Run) -> None:
        """Stop the run when the operator leaves, and keep an idle stream alive."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            transport = self._request.transport
            if transport is None or transport.is_closing():
                run.stop()
                return
            if loop.time() - self._said_s >= HEARTBEAT_S and not self._lock.locked():
                try:
                    await self._write(b"\n")
                except ConnectionError:
                    run.stop()
                    return

    async def _write(self, data: bytes) -> None:
        async with self._lock:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(data)
            self._said_s = asyncio.get_running_loop().time()


def _json(request: web.Request, document: object) -> web.Response:
    headers = [("x-request-id", request_id_from(request.headers.get("x-request-id")))]
    return json_response(orjson.dumps(document), headers)
