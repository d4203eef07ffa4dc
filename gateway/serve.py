"""Build the gateway from its settings and run it: the order of starting and stopping is here."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import TYPE_CHECKING

import structlog

from gateway.admin import Admin
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import FleetCollector
from gateway.misses.metrics import MissCollector
from gateway.misses.report import MissReport
from gateway.proxy.limits import Limits
from gateway.proxy.rewrite import Rewriter
from gateway.proxy.server import LIFECYCLE, make_app, serve
from gateway.routing import segments
from gateway.routing.dispatch import Dispatcher
from gateway.settings import ConfigError
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.requests import Telemetry
from gateway.tokenize import Tokenize
from gateway.unsupported import unsupported
from prefix_index.canonical import FirstSeenMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from gateway.config import ServerConfig, Settings
    from gateway.routing.dispatch import Plan, Ticket
    from gateway.telemetry.record import RequestRecord


# At most 100 prompts a second are looked at for text that recurs across conversations: half a
# percent of a core where they are known.
RECURRENCE_EVERY_S = 0.01


class Gateway:
    """Fleet, dispatcher, telemetry and application of one process.

    Args:
        settings: Validated configuration.

    Raises:
        ConfigError: If something configured cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        errors, self.warnings = unsupported(settings)
        if errors:
            raise ConfigError("\n".join(errors))
        self.settings = settings
        self.fleet = Fleet(settings)
        self.misses = MissReport(log_prompts=settings.telemetry.log_prompts)
        self.dispatcher = Dispatcher(
            self.fleet.pools, seed=settings.routing.seed, on_finish=self._finished
        )
        self.telemetry = Telemetry()
        self.telemetry.register(MissCollector(self.misses))
        self.telemetry.register(FleetCollector(self.fleet, self.telemetry, time.monotonic))
        logs_requests = settings.telemetry.log_level in ("debug", "info")
        self.request_log = RequestLog(sys.stderr.buffer) if logs_requests else None
        self.rewriters = _rewriters(settings)
        self._recurrence_due_s = 0.0
        self.app = self._make_app()

    async def run(self) -> None:
        """Serve until a signal, then drain and stop everything.

        Raises:
            OSError: If the address cannot be listened on.
        """
        server = self.settings.server
        self.app[LIFECYCLE].not_ready = "starting"
        try:
            await self.fleet.start()
            self.app[LIFECYCLE].not_ready = ""
            await serve(
                self.app,
                server.host,
                server.port,
                drain_s=server.drain_s,
                ready=_ready,
                front=server.front,
            )
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop what runs beside the requests; a second call does nothing more."""
        for rewriter in self.rewriters.values():
            await rewriter.settle()
        await self.misses.close()
        await self.fleet.stop()
        if self.request_log is not None:
            self.request_log.flush()

    def _make_app(self) -> web.Application:
        server = self.settings.server
        limits = _limits(self.settings)
        admin = Admin(
            self.dispatcher,
            self.fleet,
            self.telemetry,
            limits,
            _admin_token(server),
            time.monotonic,
            self.misses,
            self.rewriters,
        )
        tokenize = Tokenize(self.dispatcher, limits)
        return make_app(
            self.dispatcher,
            observe=self._observe,
            limits=limits,
            rewriters=self.rewriters,
            extra_routes=[*admin.routes(), *tokenize.routes()],
        )

    def _finished(self, plan: Plan, ticket: Ticket) -> None:
        self.fleet.finished(plan, ticket)
        self.misses.observe(plan, ticket)
        # What recurs is seen in a sample as well, and every request would pay for more.
        now_s = time.monotonic()
        if now_s >= self._recurrence_due_s:
            self._recurrence_due_s = now_s + RECURRENCE_EVERY_S
            segments.observe(plan)

    def _observe(self, record: RequestRecord) -> None:
        self.telemetry.observe(record)
        self.fleet.observe(record)
        if self.request_log is not None:
            self.request_log.add(record)


def serve_forever(settings: Settings) -> int:
    """Run the gateway in this process until a signal; return the exit code."""
    _configure_logs(settings.telemetry.log_level)
    gateway = Gateway(settings)
    log = structlog.get_logger("warmlane")
    for warning in gateway.warnings:
        log.warning("not_supported", what=warning)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(gateway.run())
    except OSError as error:
        raise ConnectionError(f"cannot listen: {error}") from error
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's, or None for asyncio's own, which serves as well with more CPU."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _rewriters(settings: Settings) -> dict[str, Rewriter]:
    # One memory: first-seen forms are kept per tenant, whatever pool the tenant's requests go to.
    memory = FirstSeenMemory(time.monotonic)
    return {
        pool.name: Rewriter(
            pool.canonicalize.mode, pool.canonicalize.rules, memory, clock=time.monotonic
        )
        for pool in settings.pools
        if pool.canonicalize.mode != "off"
    }


def _ready(port: int) -> None:
    structlog.get_logger("warmlane").info("ready", port=port)


def _limits(settings: Settings) -> Limits:
    server, limits = settings.server, settings.server.limits
    # One retry policy for the process: the strictest of the pools.
    retries = [pool.retry for pool in settings.pools]
    return Limits(
        body_bytes=server.max_body_mb << 20,
        head_bytes=limits.head_kb << 10,
        headers=limits.headers,
        head_s=limits.head_s,
        decompressed_bytes=limits.decompressed_mb << 20,
        body_s=limits.body_s,
        idle_s=limits.idle_s,
        first_byte_s=limits.first_byte_s,
        request_s=limits.request_s,
        retry_ratio=min(retry.budget for retry in retries),
        attempts=min(retry.attempts for retry in retries),
    )


def _admin_token(server: ServerConfig) -> str | None:
    name = server.access.admin_token_env
    if name is None:
        return None
    token = os.environ.get(name)
    if not token:
        raise ConfigError(
            f"server.access.admin_token_env: the environment variable {name} is not set"
        )
    return token


def _configure_logs(level: str) -> None:
    """One JSON line per event on stderr."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
