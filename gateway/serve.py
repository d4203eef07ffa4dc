"""Build a process of the gateway from its settings: the order of starting and stopping is here.

Who starts it stands in ``gateway/launch.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from math import isinf
from typing import TYPE_CHECKING

import structlog

from gateway.admin import Admin
from gateway.discovery.discovery import Discovery
from gateway.fleet.fleet import Fleet
from gateway.fleet.sharing import Sharing
from gateway.fleet.sharing.constants import SharedConstants
from gateway.fleet.sharing.orders import SharedFirstSeen
from gateway.misses.report import MissReport
from gateway.observing import Observing
from gateway.operators import Operators
from gateway.parts import (
    admin_context,
    admin_token,
    make_limits,
    make_link,
    make_rewriters,
    make_tls,
)
from gateway.proxy.server import API, LIFECYCLE, make_app, serve
from gateway.replicas.load import LoadExchange
from gateway.replicas.orders import Orders
from gateway.routing.configured import make_dispatcher, reconfigure
from gateway.settings import ConfigError
from gateway.tenancy import Tenancy
from gateway.tenancy.exchange import BudgetExchange
from gateway.tokenize import Tokenize
from gateway.unsupported import unsupported
from gateway.warm.warmer import Warmer
from gateway.worth.tier import write_per_read
from gateway.worth.worth import Worth
from prefix_index.canonical import FirstSeenMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any, Protocol

    from aiohttp import web

    from gateway.config import Settings
    from gateway.routing.pool import Worker
    from gateway.supervisor.child import Role
    from prefix_index.replica.link import Link

    class Runs(Protocol):
        """Runs beside the requests until cancelled."""

        async def run(self) -> None:
            """Run."""


# Reading a million blocks takes seconds; longer than this no client waits for them at a start.
FIRST_VIEW_S = 3.0
FIRST_VIEW_CHECK_S = 0.02


class Gateway:
    """Fleet, dispatcher, telemetry and applications of one process.

    Args:
        settings: Validated configuration.
        role: What the supervisor told this process; None = it is the only one.

    Raises:
        ConfigError: If something configured cannot be used.
    """

    def __init__(self, settings: Settings, *, role: Role | None = None) -> None:
        errors, self.warnings = unsupported(settings)
        if errors:
            raise ConfigError("\n".join(errors))
        self.settings = settings
        self.limits = make_limits(settings)
        self._role = role
        self.tenancy = Tenancy(settings)
        self.fleet = Fleet(settings)
        self.misses = MissReport(log_prompts=settings.telemetry.log_prompts)
        self.observing = Observing(settings, self)
        self.telemetry = self.observing.telemetry
        self.dispatcher = make_dispatcher(
            settings, self.fleet.pools, on_finish=self.observing.onlookers.finished
        )
        self.link = make_link(settings)
        self.tls = make_tls(settings.server)
        self.exchange: LoadExchange | None = None
        self.sharing: Sharing | None = None
        self.spending: BudgetExchange | None = None
        self.orders: Orders | None = None
        self._sharers: list[Runs] = []
        memory = FirstSeenMemory(time.monotonic)
        if self.link is not None:
            memory = self._share_over(self.link)
        self.rewriters = make_rewriters(settings, memory)
        self._unfollow, self.fleet.on_gone = self.fleet.on_gone, self._gone
        self.fleet.on_left = self._left
        self.discovery = Discovery(self.fleet, settings)
        self.worth = Worth(settings, write_per_read=write_per_read(self.fleet))
        self.warmer = self._make_warmer()
        self.observing.watch()
        self._shared: list[asyncio.Task[Any]] = []
        self.app = self._make_app()

    async def run(self, *, ready: Callable[[int], None] | None = None) -> None:
        """Serve until a signal, then drain and stop everything.

        Args:
            ready: Called with the client port once requests are served; None logs it.

        Raises:
            OSError: If an address cannot be listened on.
        """
        server, role = self.settings.server, self._role
        self.app[LIFECYCLE].not_ready = "starting"
        try:
            await self.start()
            self.app[LIFECYCLE].not_ready = ""
            await serve(
                self.app,
                server.host,
                server.port if role is None else role.port,
                drain_s=server.drain_s,
                ready=ready or _ready,
                ssl=None if self.tls is None else self.tls.context,
                front=server.front,
                reuse_port=role is not None,
            )
        finally:
            await self.close()

    async def reload(self, settings: Settings) -> None:
        """Take over another configuration, all of it or nothing; no request notices.

        Args:
            settings: Validated, and with the values of now where they cannot change.

        Raises:
            ConfigError: If something configured cannot be used.
        """
        before = self.settings
        try:
            self._use(settings)
        except BaseException:
            self._use(before)
            raise

    def _use(self, settings: Settings) -> None:
        # First, who may refuse.
        self.tenancy.reload(settings)
        self.fleet.reconfigure(settings)
        self.discovery.reload(settings)
        reconfigure(self.dispatcher, settings)
        self.worth.reconfigure(settings)
        self.limits.change(make_limits(settings))
        self.settings = settings

    async def start(self) -> None:
        """Start what runs beside the requests, in the order in which one part needs another.

        Raises:
            OSError: If the operators' address cannot be listened on.
        """
        if self.link is not None:
            self._share(self.link.run())
        for sharer in self._sharers:
            self._share(sharer.run())
        self._share(self.tenancy.keyring.run())
        self._share(self.observing.run())
        await self.fleet.start()
        self._share(self.discovery.run())
        await self.discovery.first_answers()
        if self.warmer.is_keeping:
            self._share(self.warmer.keeper.run())
        if self.tls is not None:
            self._share(self.tls.run())
        await self.operators.start()
        await self._first_view()

    async def _first_view(self) -> None:
        """Wait a moment for what other gateways know, so that the first request profits from it."""
        sharing, link = self.sharing, self.link
        if sharing is None or link is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_VIEW_S):
                # Without a server there is nothing to wait for.
                while isinf(sharing.age_s()) and (link.is_up or not link.errors):  # noqa: ASYNC110  # no event to wait for
                    await asyncio.sleep(FIRST_VIEW_CHECK_S)

    async def close(self) -> None:
        """Stop what runs beside the requests; a second call does nothing more."""
        for rewriter in self.rewriters.values():
            await rewriter.settle()
        self.observing.onlookers.settle()  # who is told may begin something that is stopped here
        await self.misses.close()
        await self.worth.close()
        # The last one first: what goes over the link says goodbye before it closes.
        while self._shared:
            task = self._shared.pop()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.warmer.close()
        await self.fleet.stop()
        await self.operators.close()
        if self.observing.tracing is not None:
            await self.observing.tracing.export.close()
        self.observing.close()

    def _share_over(self, link: Link) -> SharedFirstSeen:
        """Make what is shared with other gateways; before the fleet starts.

        Returns:
            The memory of tool orders.
        """
        # Ours alone, and another one after a restart: nobody may take us for who died.
        name = secrets.token_hex(8)
        self.exchange = LoadExchange(link, self.fleet.pools, gateway=name, clock=time.monotonic)
        self.sharing = Sharing(self.fleet, link, name=name)
        memory = SharedFirstSeen(time.monotonic, link)
        constants = SharedConstants(self.fleet.pools, link)
        # In the order in which they start.
        self.spending = BudgetExchange(
            link,
            self.tenancy.budgets,
            gateway=name,
            clock=time.monotonic,
            processes=self.settings.server.processes,
        )
        self.orders = Orders(link, gateway=name)
        self._sharers = [
            *(self.exchange, memory.map, constants, self.spending, self.orders, self.sharing)
        ]
        return memory

    def _share(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run something over the link until ``close``."""
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(_say_why)
        self._shared.append(task)

    def _make_app(self) -> web.Application:
        server = self.settings.server
        admin = Admin(
            self.dispatcher,
            self.fleet,
            self.telemetry,
            self.limits,
            admin_token(server),
            time.monotonic,
            self.misses,
            self.rewriters,
            worth=self.worth.account,
            shared=self._shared_index,
            warmer=self.warmer,
            tenancy=self.tenancy,
            usage=self.observing.usage,
            orders=self.orders,
            console=self.observing.console,
            settings=lambda: self.settings,
        )
        tokenize = Tokenize(self.dispatcher, self.limits, self.tenancy)
        app = make_app(
            self.dispatcher,
            observe=self.observing.onlookers.observe,
            limits=self.limits,
            rewriters=self.rewriters,
            extra_routes=tokenize.routes(),
            tenancy=self.tenancy,
            pass_through=server.pass_through,
        )
        app[API].proxy.offload_put = self.worth.offload_put
        app[API].tracing = self.observing.tracing
        ssl = admin_context(server, self.tls)
        self.operators = Operators(server, self._role, admin, self.telemetry, self.reload, ssl)
        self.operators.place(app)
        return app

    def _make_warmer(self) -> Warmer:
        return Warmer(
            self.settings,
            self.dispatcher,
            self.fleet,
            self.worth.account,
            rewriters=self.rewriters,
            limits=self.limits,
            on_finish=self.observing.onlookers.warmed,
            is_mine=lambda pool, worker: (
                self.exchange is None or self.exchange.is_first(pool, worker)
            ),
        )

    def _shared_index(self, pool: str) -> dict[str, Any] | None:
        """Return what the shared index says of a pool; None where the index is our own."""
        if self.sharing is None:
            return None
        state = self.sharing.state()
        names = ("is_up", "down_s", "index_age_s")
        return {**{name: state[name] for name in names}, **state["pools"].get(pool, {})}

    def _gone(self, worker: Worker) -> None:
        self._unfollow(worker)
        self.observing.forget_worker(worker)

    def _left(self, worker: Worker) -> None:
        self.observing.forget_worker(worker)
        self.warmer.forget_worker(worker.id)


def _say_why(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        structlog.get_logger("warmlane").error("background_task_failed", exc_info=error)


def _ready(port: int) -> None:
    structlog.get_logger("warmlane").info("ready", port=port)
