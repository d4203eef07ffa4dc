"""The operator's endpoints: ``/metrics`` and ``/admin/v1``.

Admin needs the admin token; with no token configured it answers loopback only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from gateway.admin.describe import pool_row, worker_row
from gateway.admin.registration import Registration
from gateway.admin.warm import WarmEndpoints
from gateway.admin.worker_cache import cache_of, selftest_of
from gateway.errors import (
    Forbidden,
    GatewayError,
    NotFound,
    Unauthorized,
    WorkerFailed,
)
from gateway.protocols.anthropic import is_messages, to_chat
from gateway.proxy.body import parse_body, read_body
from gateway.proxy.forward import target_of
from gateway.proxy.headers import request_id_from
from gateway.proxy.responses import error_response, json_response
from gateway.proxy.rewrite import Rewrite
from gateway.proxy.transfers import without_transfers
from gateway.routing.dispatch import Inbound, explain_json
from gateway.settings import redacted_document
from gateway.telemetry.exposition import content_type, wants_open_metrics
from gateway.tenancy import Tenancy
from gateway.usage.document import CSV_CONTENT_TYPE, usage_csv, wants_csv
from gateway.usage.fleet import FleetUsage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from gateway.config import Settings
    from gateway.console.endpoints import Console
    from gateway.fleet.fleet import Fleet
    from gateway.misses.report import MissReport
    from gateway.proxy.body import Surface
    from gateway.proxy.limits import Limits
    from gateway.proxy.rewrite import Rewriter
    from gateway.replicas.orders import Orders
    from gateway.routing.dispatch import Dispatcher
    from gateway.routing.pool import Pool, Worker
    from gateway.telemetry.requests import Telemetry
    from gateway.usage.usage import Usage
    from gateway.warm.warmer import Warmer
    from gateway.worth.account import WorthAccount

# Of a usage document, beside the whole.
SCOPES = frozenset({"process", "others"})
# By these a proxy says for whom it asks: somebody else then, wherever the proxy is.
_FORWARDED = ("x-forwarded-for", "forwarded", "x-real-ip")


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
        worth: The worth of lower tiers; without it there is no such endpoint.
        shared: Pool name -> what the shared index says of it, as plain values, with ``workers`` by
            id; None where the index is this process's own.
        warmer: Warms workers up; without one there are no such endpoints.
        tenancy: Knows the tenants' cache salts; None = there are none.
        usage: What tenants used and caches save; without it there is no such endpoint.
        orders: Reaches other gateways; None = there is no Redis to reach them through.
        console: The operator's page; without it there is none.
        settings: The configuration that holds now; without it there is no such endpoint.
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
        worth: WorthAccount | None = None,
        shared: Callable[[str], dict[str, Any] | None] = lambda _pool: None,
        warmer: Warmer | None = None,
        tenancy: Tenancy | None = None,
        usage: Usage | None = None,
        orders: Orders | None = None,
        console: Console | None = None,
        settings: Callable[[], Settings] | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._telemetry = telemetry
        self._limits = limits
        self._token = token
        self._clock = clock
        self._misses = misses
        self._rewriters = rewriters or {}
        self._worth = worth
        self._usage = usage
        self._fleet_usage = None if usage is None else FleetUsage(usage, orders)
        self._console = console
        self._settings = settings
        self._shared = shared
        self._tenancy = tenancy or Tenancy()
        self._warm = (
            None if warmer is None else WarmEndpoints(warmer, limits, misses, self._tenancy, orders)
        )
        self._registration = Registration(fleet, lambda: fleet.configs, limits)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of these endpoints."""
        reports = []
        if self._misses is not None:
            reports.append(web.get("/admin/v1/misses", self._guarded(self.misses)))
        if self._worth is not None:
            reports.append(web.get("/admin/v1/worth", self._guarded(self.worth)))
        if self._usage is not None:
            reports.append(web.get("/admin/v1/usage", self._guarded(self.usage)))
        if self._settings is not None:
            reports.append(web.get("/admin/v1/config", self._guarded(self.config)))
        if self._console is not None:
            reports += self._console.routes(
                self._guarded, self._guarded_page, needs_token=self._token is not None
            )
        if self._warm is not None:
            reports += [
                web.post("/admin/v1/warm", self._guarded(self._warm.warm)),
                web.get("/admin/v1/warm", self._guarded(self._warm.state)),
                web.get("/admin/v1/documents", self._guarded(self._warm.documents)),
                web.post("/admin/v1/purge", self._guarded(self._warm.purge)),
            ]
        return [
            *reports,
            web.get("/admin/v1/index", self._guarded(self.index)),
            web.get("/metrics", self.metrics),
            web.get("/admin/v1/workers", self._guarded(self.workers)),
            web.post("/admin/v1/workers", self._guarded(self.add)),
            web.delete("/admin/v1/workers/{id}", self._guarded(self.remove)),
            web.post("/admin/v1/workers/{id}/drain", self._guarded(self.drain)),
            web.post("/admin/v1/workers/{id}/reset", self._guarded(self.reset)),
            web.get("/admin/v1/workers/{id}/cache", self._guarded(self.cache)),
            web.post("/admin/v1/workers/{id}/selftest", self._guarded(self.selftest)),
            web.post("/admin/v1/explain", self._guarded(self.explain)),
        ]

    async def metrics(self, request: web.Request) -> web.Response:
        """``GET /metrics``; OpenMetrics, with exemplars, where the scraper takes it."""
        open_metrics = wants_open_metrics(request.headers.get("accept", ""))
        return web.Response(
            body=await self._telemetry.render_in_slices(open_metrics=open_metrics),
            headers={"content-type": content_type(open_metrics=open_metrics)},
        )

    async def workers(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/workers``: every worker with mode, health, load and index state."""
        rows = [
            self._row(pool, worker)
            for pool in self._fleet.pools
            for worker in pool.workers.values()
        ]
        return _json(request, {"workers": rows})

    async def add(self, request: web.Request) -> web.Response:
        """``POST /admin/v1/workers``: a worker joins a pool, if it may be where it is."""
        pool_name, workers = await self._registration.add(request)
        pool = next(pool for pool in self._fleet.pools if pool.name == pool_name)
        rows = [self._row(pool, worker) for worker in workers]
        return _json(request, {"workers": rows}, status=201)

    async def remove(self, request: web.Request) -> web.Response:
        """``DELETE /admin/v1/workers/{id}``: a worker leaves; its running requests go on."""
        worker_id = request.match_info["id"]
        self._registration.remove(worker_id)
        return _json(request, {"removed": worker_id})

    async def misses(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/misses``: what broke prefixes, and how many tokens that cost."""
        assert self._misses is not None, "the route exists only with a report"
        return _json(request, self._misses.report())

    async def index(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/index``: per pool what is known, and how each worker's part is known."""
        rows = [pool_row(self._fleet, pool, self._shared(pool.name)) for pool in self._fleet.pools]
        return _json(request, {"pools": rows})

    async def worth(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/worth``: whether lower tiers pay, and whose cache is worth least."""
        assert self._worth is not None, "the route exists only with an account"
        workers = {} if self._usage is None else self._usage.worth()
        return _json(request, {**self._worth.report(), **workers})

    async def usage(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/usage``: what each configured tenant used, as JSON or CSV.

        With ``?scope=process`` of this process alone, with ``others`` of each other one: as the
        supervisor of several processes asks, who adds them up itself.
        """
        usage, scope = self._fleet_usage, request.query.get("scope")
        assert usage is not None, "the route exists only with an account"
        if scope in SCOPES:
            return _json(request, usage.own() if scope == "process" else await usage.others())
        document = await usage.document()
        if not wants_csv(request.query, request.headers.get("accept", "")):
            return _json(request, document)
        headers = {"content-type": CSV_CONTENT_TYPE}
        return web.Response(body=usage_csv(document), headers=headers)

    async def config(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/config``: version and configuration that hold now, without secrets."""
        assert self._settings is not None, "the route exists only with settings"
        document = redacted_document(self._settings())
        return _json(request, {"version": version("warmlane"), "settings": document})

    async def cache(self, request: web.Request) -> web.Response:
        """``GET /admin/v1/workers/{id}/cache``: a runner's own figures of its cache and tiers."""
        return _json(request, await cache_of(*self._worker(request)))

    async def selftest(self, request: web.Request) -> web.Response:
        """``POST /admin/v1/workers/{id}/selftest``: a runner stress-tests its disk tier."""
        return _json(request, await selftest_of(*self._worker(request)))

    async def drain(self, request: web.Request) -> web.Response:
        """``POST /admin/v1/workers/{id}/drain``: no new requests there; running ones go on."""
        pool, worker = self._worker(request)
        pool.drain(worker.id)
        return _json(request, self._row(pool, worker))

    async def reset(self, request: web.Request) -> web.Response:
        """``POST /admin/v1/workers/{id}/reset``: its prefix cache is dropped, there and here."""
        pool, worker = self._worker(request)
        if not await self._fleet.reset_cache(worker):
            raise WorkerFailed(
                f"Worker {worker.id} did not drop its cache: expected an engine that has "
                "/reset_prefix_cache (vLLM: with VLLM_SERVER_DEV_MODE=1) or /flush_cache, and "
                "no running request that keeps it from it.",
                code="cache_not_reset",
            )
        return _json(request, self._row(pool, worker))

    def _worker(self, request: web.Request) -> tuple[Pool, Worker]:
        """Return the worker that a path names, with its pool.

        Raises:
            NotFound: If there is none.
        """
        worker_id = request.match_info["id"]
        for pool in self._fleet.pools:
            if worker_id in pool.workers:
                return pool, pool.workers[worker_id]
        raise NotFound(f"No worker has the id {worker_id!r}; GET /admin/v1/workers lists them.")

    async def explain(self, request: web.Request) -> web.Response:
        """``POST /admin/v1/explain``: where this request would go, and why; nothing is sent."""
        body = await read_body(request, self._limits)
        # The path tells nothing here, so the body does: only completions have a prompt.
        has_messages = b'"messages"' in body
        surface: Surface = "completions" if b'"prompt"' in body and not has_messages else "chat"
        document = parse_body(body, surface)
        if surface == "chat" and is_messages(document):
            document = to_chat(document)
            body = orjson.dumps(document)
        # Who may ask this may ask it for anybody.
        name = request.headers.get("x-tenant-id", "")
        tenant = self._tenancy.named(name)
        if not tenant.may_transfer:
            body, document = without_transfers(body, document)
        inbound = Inbound(
            surface,
            document,
            request.headers,
            document["model"],
            tenant=name,
            request_id=request_id_from(request.headers.get("x-request-id")),
            salt=tenant.salting(document),
        )
        rewrite = await self._planned(inbound, body)
        decision = self._dispatcher.choose(rewrite.plan)
        return _json(request, explain_json(rewrite.plan, decision, canonicalization=rewrite.report))

    async def _planned(self, inbound: Inbound, body: bytes) -> Rewrite:
        """Plan a request for the pool where it would go, as the proxy does."""
        target = target_of(self._dispatcher, inbound)
        rewrite = await self._planned_in(target.pool, inbound, body)
        other = self._dispatcher.redirected(rewrite.plan, target)
        if other.pool is not target.pool:
            rewrite = await self._planned_in(other.pool, inbound, body)
            rewrite.plan.route = other.route
        return rewrite

    async def _planned_in(self, pool: Pool, inbound: Inbound, body: bytes) -> Rewrite:
        rewriter = self._rewriters.get(pool.name)
        if rewriter is None:
            return Rewrite(await self._dispatcher.plan(pool, inbound, in_full=True), body)
        return await rewriter.explain(self._dispatcher, pool, inbound, body)

    def _row(self, pool: Pool, worker: Worker) -> dict[str, Any]:
        return worker_row(self._fleet, pool, worker, self._clock())

    def _guarded(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Let only operators through, and give their errors the usual shape."""
        return _checked(handler, self._check_access)

    def _guarded_page(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Likewise for a page that tells nothing: a browser asks for it without the token."""
        return _checked(handler, self._check_loopback if self._token is None else _anybody)

    def _check_access(self, request: web.Request) -> None:
        if self._token is None:
            self._check_loopback(request)
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not _is_same(given.strip(), self._token):
            raise Unauthorized("The admin token is missing or wrong.", code="invalid_admin_token")

    def _check_loopback(self, request: web.Request) -> None:
        if not _is_loopback(request):
            raise Forbidden(
                "No admin token is configured, so admin endpoints answer loopback only; "
                "set server.access.admin_token_env."
            )


def _checked(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    check: Callable[[web.Request], None],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def checked(request: web.Request) -> web.StreamResponse:
        try:
            check(request)
            return await handler(request)
        except GatewayError as error:
            request_id = request_id_from(request.headers.get("x-request-id"))
            return error_response(error, request_id)

    return checked


def _anybody(_request: web.Request) -> None:
    """Let everybody through."""


def _is_same(given: str, secret: str) -> bool:
    """Compare in a time that tells nothing of the secret, not even its length."""
    digests = (
        hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (given, secret)
    )
    return hmac.compare_digest(*digests)


def _is_loopback(request: web.Request) -> bool:
    """Whether a request comes from this machine itself, and not through a proxy on it."""
    if any(name in request.headers for name in _FORWARDED):
        return False
    try:
        return request.remote is not None and ipaddress.ip_address(request.remote).is_loopback
    except ValueError:
        return False


def _json(request: web.Request, document: object, *, status: int = 200) -> web.Response:
    headers = [("x-request-id", request_id_from(request.headers.get("x-request-id")))]
    return json_response(orjson.dumps(document), headers, status=status)
