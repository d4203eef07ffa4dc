"""The operator's endpoints: ``/metrics`` and ``/admin/v1``.

Admin needs the admin token; with no token configured it answers loopback only.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from gateway.errors import Forbidden, GatewayError, ModelNotFound, NotFound, Unauthorized
from gateway.proxy.body import parse_body, read_body
from gateway.proxy.headers import request_id_from
from gateway.proxy.responses import error_response, json_response
from gateway.routing.dispatch import Inbound, explain_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from gateway.fleet.fleet import Fleet
    from gateway.misses.report import MissReport
    from gateway.proxy.body import Surface
    from gateway.proxy.limits import Limits
    from gateway.proxy.rewrite import Rewriter
    from gateway.routing.dispatch import Dispatcher
    from gateway.routing.pool import Pool, Worker
    from gateway.telemetry.requests import Telemetry

# What Prometheus' text parsers expect.
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Admin:
    """The handlers; one per process.

    Args:
        dispatcher: Explains decisions.
        fleet: Knows the workers.
        telemetry: Renders the metrics.
        limits: Bound on bodies.
        token: Admin token; None answers loopback only.
        clock: Monotonic seconds.
        misses: The miss report; without one there is no such endpoint.
        rewriters: Pool name -> its canonicalisation.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        fleet: Fleet,
        telemetry: Telemetry,
        limits: Limits,
        token: str | None,
        clock: Callable[[], float],
        misses: MissReport | None = None,
        rewriters: Mapping[str, Rewriter] | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._telemetry = telemetry
        self._limits = limits
        self._token = token
        self._clock = clock
        self._misses = misses
        self._rewriters = rewriters or {}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of these endpoints."""
        misses = self._misses
        return [
            *([] if misses is None else [web.get("/admin/v1/misses", self._guarded(self.misses))]),
            web.get("/admin/v1/index", self._guarded(self.index)),
            web.get("/metrics", self.metrics),
            web.get("/admin/v1/workers", self._guarded(self.workers)),
            web.post("/admin/v1/workers/{id}/drain", self._guarded(self.drain)),
            web.post("/admin/v1/explain", self._guarded(self.explain)),
        ]

    async def metrics(self, _request: web.Request) -> web.Response:
        """``GET /metrics``."""
        return web.Response(
            body=self._telemetry.render(), headers={"content-type": METRICS_CONTENT_TYPE}
        )

    async def workers(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/workers``: every worker with mode, health, load and index state."""
        rows = [
            self._describe(pool, worker)
            for pool in self._fleet.pools
            for worker in pool.workers.values()
        ]
        return _json(request, {"workers": rows})

    async def misses(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/misses``: what broke prefixes, and how many tokens that cost."""
        assert self._misses is not None, "the route exists only with a report"
        return _json(request, self._misses.report())

    async def index(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/index``: per pool, how prompts are read and how many blocks are known."""
        return _json(request, {"pools": [_describe_index(pool) for pool in self._fleet.pools]})

    async def drain(self, request: web.Request) -> web.Response:
        """``POST /admin/v1/workers/{id}/drain``: no new requests there; running ones go on."""
        worker_id = request.match_info["id"]
        for pool in self._fleet.pools:
            if worker_id in pool.workers:
                pool.drain(worker_id)
                return _json(request, self._describe(pool, pool.workers[worker_id]))
        raise NotFound(f"No worker has the id {worker_id!r}; GET /admin/v1/workers lists them.")

    async def explain(self, request: web.Request) -> web.Response:
        """``POST /admin/v1/explain``: where this request would go, and why; nothing is sent."""
        body = await read_body(request, self._limits)
        # The path tells nothing here, so the body does: only completions have a prompt.
        has_messages = b'"messages"' in body
        surface: Surface = "completions" if b'"prompt"' in body and not has_messages else "chat"
        document = parse_body(body, surface)
        pool = self._dispatcher.pool_for(document["model"])
        if pool is None:
            raise ModelNotFound(f"The model {document['model']!r} does not exist.", param="model")
        inbound = Inbound(
            surface,
            document,
            request.headers,
            document["model"],
            request_id=request_id_from(request.headers.get("x-request-id")),
        )
        rewriter = self._rewriters.get(pool.name)
        if rewriter is None:
            plan = await self._dispatcher.plan(pool, inbound, in_full=True)
            return _json(request, explain_json(plan, self._dispatcher.choose(plan)))
        rewrite = await rewriter.explain(self._dispatcher, pool, inbound, body)
        decision = self._dispatcher.choose(rewrite.plan)
        return _json(request, explain_json(rewrite.plan, decision, canonicalization=rewrite.report))

    def _describe(self, pool: Pool, worker: Worker) -> dict[str, Any]:
        now_s = self._clock()
        feed = self._fleet.feeds.get(worker.id)
        blocks = pool.index.blocks_by_tier(worker.id) if pool.index is not None else {}
        return {
            "id": worker.id,
            "url": worker.url,
            "pool": pool.name,
            "mode": worker.mode if pool.reader is not None else "text",
            "state": _state(worker, now_s),
            "ready": worker.health.ready and self._fleet.watches[worker.id].checked.is_set(),
            "in_flight": worker.books.in_flight,
            "queued_tokens": worker.books.queued_tokens,
            "blocks": {tier: count for tier, count in blocks.items() if count},
            "capacity_tokens": worker.capacity_tokens or None,
            "block_size": worker.block_size,
            "epoch": worker.epoch,
            "parity": self._fleet.parity_of(worker),
            "divergence": self._fleet.divergence_of(worker),
            "has_events": self._fleet.has_events(worker),
            "pool_block_size": pool.block_size if pool.index is not None else None,
            "event_age_s": None if worker.last_event_s is None else now_s - worker.last_event_s,
            "gaps": feed.subscriber.gaps if feed else None,
            "decode_errors": feed.subscriber.decode_errors if feed else None,
        }

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Let only operators through, and give their errors the usual shape."""

        async def guarded(request: web.Request) -> web.Response:
            try:
                self._check_access(request)
                return await handler(request)
            except GatewayError as error:
                request_id = request_id_from(request.headers.get("x-request-id"))
                return error_response(error, request_id)

        return guarded

    def _check_access(self, request: web.Request) -> None:
        if self._token is None:
            if not _is_loopback(request.remote):
                raise Forbidden(
                    "No admin token is configured, so admin endpoints answer loopback only; "
                    "set server.access.admin_token_env."
                )
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise Unauthorized("The admin token is missing or wrong.")


def _describe_index(pool: Pool) -> dict[str, Any]:
    index = pool.index
    return {
        "pool": pool.name,
        "models": list(pool.models),
        "engine": pool.engine,
        "reads_prompts": pool.reader is not None,
        "block_size": None if index is None else index.block_size,
        "blocks": 0 if index is None else index.num_blocks,
        "max_blocks": None if index is None else index.max_blocks,
        "unread_prompts": dict(pool.unread_prompts),
    }


def _state(worker: Worker, now_s: float) -> str:
    if worker.draining:
        return "draining"
    if not worker.health.ready:
        return "not_ready"
    breaker = worker.health.breaker(now_s)
    return "ready" if breaker == "closed" else breaker.value


def _is_loopback(address: str | None) -> bool:
    try:
        return address is not None and ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _json(request: web.Request, document: object) -> web.Response:
    headers = [("x-request-id", request_id_from(request.headers.get("x-request-id")))]
    return json_response(orjson.dumps(document), headers)
