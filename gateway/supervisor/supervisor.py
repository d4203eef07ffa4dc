"""Start the processes of one gateway, keep them running, and end them together.

The order of starting and stopping stands in ``Supervisor.run``. The kernel spreads connections over
the children, each of which listens on the client port itself (``SO_REUSEPORT``): one that stands
still does not hold up the connections of the others, and nothing passes through the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web

from gateway.reload.metrics import ReloadCollector
from gateway.reload.reloader import Reloader
from gateway.sockets import listening
from gateway.supervisor.child import COMMAND, Child, Role
from gateway.supervisor.exposition import Snapshot, accumulate
from gateway.supervisor.operations import Operations

if TYPE_CHECKING:
    from gateway.config import Settings
    from gateway.reload.reloader import ConfigFile
    from gateway.tls import ServerTls

# Counts of a child that dies are lost since the last scrape; nobody may have scraped for long.
SCRAPE_EVERY_S = 5.0
# Beyond the drain time, for error events and closing; who needs more is killed.
END_S = 10.0

log = structlog.get_logger("warmlane")


class Supervisor:
    """The parent of all processes; one per gateway.

    Args:
        settings: Validated configuration with ``server.processes`` > 1.
        file: Where it was read, and is read again.
        command: What a child runs.
        tls: Certificate of the admin port; None = it speaks plain HTTP.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        file: ConfigFile,
        command: tuple[str, ...] = COMMAND,
        tls: ServerTls | None = None,
    ) -> None:
        self.settings = settings
        self._reloader = Reloader(file, settings, self._use)
        self._telling: set[asyncio.Task[None]] = set()
        self.children: list[Child] = []
        self._command = command
        self._ended: Snapshot = {}
        self._was_ready = False
        self._failed = asyncio.Event()
        self._tls = tls

    async def run(self) -> int:
        """Serve until a signal, then drain; a second signal ends at once.

        Returns:
            0, or 1 if a process could not even start.

        Raises:
            OSError: If an address cannot be listened on.
        """
        server = self.settings.server
        folder = Path(tempfile.mkdtemp(prefix="warmlane-"))
        runners: list[web.AppRunner] = []
        try:
            with listening("server.port", server.host, server.port):
                bound = reserve_port(server.host, server.port)
            with bound as reserved:
                port: int = reserved.getsockname()[1]
                self.children = [self._child(n, port, folder) for n in range(server.processes)]
                operations = Operations(
                    self.children,
                    self._ended,
                    time.monotonic,
                    server.max_body_mb << 20,
                    ReloadCollector(self._reloader).collect,
                    is_reloaded=lambda: self._reloader.is_last_good,
                )
                inside = web.AppRunner(operations.app(is_internal=True), access_log=None)
                runners.append(inside)
                await inside.setup()
                await web.UnixSite(inside, str(folder / "supervisor.sock")).start()
                if server.admin_port is not None:
                    outside = web.AppRunner(operations.app(is_internal=False), access_log=None)
                    runners.append(outside)
                    await outside.setup()
                    ssl = None if self._tls is None else self._tls.context
                    site = web.TCPSite(outside, server.host, server.admin_port, ssl_context=ssl)
                    with listening("server.admin_port", server.host, server.admin_port):
                        await site.start()
                return await self._run_children()
        finally:
            for runner in runners:
                await runner.cleanup()
            for child in self.children:
                await child.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _child(self, number: int, port: int, folder: Path) -> Child:
        has_admin_port = self.settings.server.admin_port is not None
        role = Role(
            name=f"p{number}",
            settings=_dumped(self.settings),
            port=port,
            socket=str(folder / f"p{number}.sock"),
            supervisor=None if has_admin_port else str(folder / "supervisor.sock"),
        )
        return Child(role, command=self._command, on_change=self._changed)

    async def _run_children(self) -> int:
        loop = asyncio.get_running_loop()
        stop, hurry = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (hurry if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        keeping = [asyncio.create_task(child.keep()) for child in self.children]
        loop.add_signal_handler(signal.SIGHUP, self._reloader.ask)
        beside = [asyncio.create_task(self._scrape()), asyncio.create_task(self._reloader.run())]
        if self._tls is not None:
            beside.append(asyncio.create_task(self._tls.run()))
        try:
            await _first(stop, self._failed)
            log.info("draining", processes=len(self.children))
            self._signal(signal.SIGTERM)
            await self._end(keeping, hurry)
        finally:
            for task in (*beside, *self._telling):
                task.cancel()
            self._signal(signal.SIGKILL)
            await asyncio.gather(*keeping, *beside, return_exceptions=True)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
        return 1 if self._failed.is_set() else 0

    async def _end(self, keeping: list[asyncio.Task[None]], hurry: asyncio.Event) -> None:
        """Wait for all children; pass a second signal on."""
        hurried: set[asyncio.Task[Any]] = {asyncio.create_task(hurry.wait())}
        waiting: set[asyncio.Task[Any]] = set(keeping)
        deadline_s = time.monotonic() + self.settings.server.drain_s + END_S
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            done, _ = await asyncio.wait(
                waiting | hurried, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if hurried & done:
                hurried = set()
                self._signal(signal.SIGTERM)
                deadline_s = min(deadline_s, time.monotonic() + END_S)
            waiting -= done
        for task in hurried:
            task.cancel()

    async def _scrape(self) -> None:
        while True:
            await asyncio.sleep(SCRAPE_EVERY_S)
            for child in self.children:
                if child.is_ready:
                    await child.scrape()

    async def _use(self, settings: Settings) -> None:
        """Hand a configuration on to all processes; all have it afterwards, or none.

        Raises:
            ConnectionError: If a process does not answer, or cannot use it.
        """
        before, self.settings = self.settings, settings
        try:
            await self._hand_on()
        except ConnectionError:
            self.settings = before
            with contextlib.suppress(ConnectionError):
                await self._hand_on()
            raise

    async def _hand_on(self) -> None:
        settings = _dumped(self.settings)
        for child in self.children:
            child.role.settings = settings
        ready = [child for child in self.children if child.is_ready]
        told = await asyncio.gather(*(c.tell_settings() for c in ready), return_exceptions=True)
        for child, error in zip(ready, told, strict=True):
            # One that ended meanwhile starts with them.
            if isinstance(error, BaseException) and child.is_ready:
                raise error

    def _signal(self, number: int) -> None:
        for child in self.children:
            child.signal(number)

    def _changed(self, child: Child) -> None:
        """Take note of a child that got ready or ended."""
        if child.is_ready:
            if not child.is_current:
                # The configuration changed while it started.
                task = asyncio.create_task(_catch_up(child))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)
            if not self._was_ready and all(c.is_ready for c in self.children):
                self._was_ready = True
                log.info("ready", port=child.role.port, processes=len(self.children))
            return
        if child.snapshot is not None:
            accumulate(self._ended, child.snapshot)
            child.snapshot = child.windows = None
        if not self._was_ready and child.exit_code:
            # As with one process: what cannot start is said, not tried for ever.
            log.error("process_failed", process=child.role.name, exit_code=child.exit_code)
            self._failed.set()


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind the client port without listening, so that the children share it and nobody else.

    Raises:
        OSError: If it is in use.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # A second gateway with the same port would quietly take half of the connections: somebody who
    # does not share finds out.
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        address = probe.getsockname()
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except BaseException:
        reserved.close()
        raise
    return reserved


async def _catch_up(child: Child) -> None:
    try:
        await child.tell_settings()
    except ConnectionError as error:
        log.error("config_not_handed_on", process=child.role.name, reason=str(error))


def _dumped(settings: Settings) -> dict[str, object]:
    # What is not said stays so: of some values it counts whether they were.
    return settings.model_dump(mode="json", exclude_unset=True)


async def _first(*events: asyncio.Event) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
