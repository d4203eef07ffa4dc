"""One child: a gateway process of its own, started, watched and started again.

The supervisor hands it a ``Role`` on its standard input and keeps that open: when it closes, the
supervisor is gone and the child drains. The child says on its standard output when it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
import structlog

from gateway.supervisor.exposition import reading
from gateway.supervisor.peers import Peer
from gateway.supervisor.windows import ProcessWindows, unpack
from gateway.telemetry.exposition import OPEN_TYPE
from gateway.telemetry.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.supervisor.exposition import Snapshot

# A fresh interpreter, so that nothing is shared by accident.
COMMAND = (sys.executable, "-m", "gateway.launch")
# After a crash; doubles with each one in a row.
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0
# A child that lived this long did not die of its start.
STEADY_S = 30.0
# A scrape must not wait long for a child that is busy; what it said last counts then.
SCRAPE_TIMEOUT_S = 2.0

WINDOWS_PATH = "/internal/windows"
SETTINGS_PATH = "/internal/settings"

log = structlog.get_logger("warmlane")


class Role(msgspec.Struct):
    """What a child is told: everything that it cannot read from its environment.

    Attributes:
        name: Its name among the children.
        settings: The configuration as JSON values.
        port: The client port, shared by all children.
        socket: Where it answers the supervisor.
        supervisor: Where it asks for what operators want on the client port; None = they have a
            port of their own.
    """

    name: str
    settings: dict[str, object]
    port: int
    socket: str
    supervisor: str | None


class Child:
    """One of the processes; used from the supervisor's event loop.

    Args:
        role: What it is told at every start.
        command: What is started.
        on_change: Called when it got ready or ended.

    Attributes:
        is_ready: Whether it takes requests.
        num_restarts: Times it was started again.
        snapshot: Its metrics as scraped last; None = never.
        windows: Its windows as scraped last.
        exit_code: Of the process that ended last.
    """

    def __init__(
        self,
        role: Role,
        *,
        command: tuple[str, ...] = COMMAND,
        on_change: Callable[[Child], None],
    ) -> None:
        self.role = role
        self.peer = Peer(role.socket)
        self.is_ready = False
        self.num_restarts = 0
        self.snapshot: Snapshot | None = None
        self.windows: ProcessWindows | None = None
        self.exit_code: int | None = None
        self._scrapes = Peer(role.socket, timeout_s=SCRAPE_TIMEOUT_S)
        self._scraping = asyncio.Lock()
        self._command = command
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        # What the process that runs has.
        self._settings: dict[str, object] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """Of the running process, if there is one."""
        return None if self._process is None else self._process.pid

    async def keep(self) -> None:
        """Run the process, again and again with growing pauses, until ``stop``."""
        backoff_s = FIRST_BACKOFF_S
        clock = asyncio.get_running_loop().time
        while not self._has_to_stop():
            started_s = clock()
            await self._run()
            self._on_change(self)
            if self._has_to_stop():
                return
            if clock() - started_s > STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            log.warning(
                "process_ended",
                process=self.role.name,
                exit_code=self.exit_code,
                restart_in_s=backoff_s,
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            self.num_restarts += 1

    def signal(self, number: int) -> None:
        """Send a signal; after one that ends the process it is not started again."""
        if number in (signal.SIGTERM, signal.SIGKILL):
            self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def scrape(self) -> None:
        """Read its metrics; if it does not answer, what it said last stays."""
        # One after the other, so that what is known never goes back.
        async with self._scraping:
            process = self._process
            try:
                text = await self._scrapes.ask("GET", "/metrics", {"accept": OPEN_TYPE})
                windows = unpack((await self._scrapes.ask("GET", WINDOWS_PATH, {})).body)
                snapshot: Snapshot = {}
                await in_slices(reading(text.body.decode(), snapshot))
            except (ConnectionError, ValueError) as error:
                log.warning("process_not_scraped", process=self.role.name, error=str(error))
                return
            # What a process said that died meanwhile is counted already, as far as anybody saw it.
            if process is not None and process is self._process:
                self.snapshot, self.windows = snapshot, windows

    @property
    def is_current(self) -> bool:
        """Whether the process has the settings of its role, which may be others by now."""
        return self._settings is self.role.settings

    async def tell_settings(self) -> None:
        """Have the process that runs take over the settings of its role.

        Raises:
            ConnectionError: If it does not answer, or cannot use them.
        """
        settings = self.role.settings
        answer = await self.peer.ask("POST", SETTINGS_PATH, {}, msgspec.json.encode(settings))
        if answer.status != 200:
            raise ConnectionError(f"process {self.role.name}: {answer.body.decode()}")
        self._settings = settings

    async def close(self) -> None:
        """Drop the connections to it."""
        await self.peer.close()
        await self._scrapes.close()

    def _has_to_stop(self) -> bool:
        return self._is_stopping

    async def _run(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal is for the supervisor, which tells the children in order.
            start_new_session=True,
        )
        self._process = process
        if self._is_stopping:  # it was told to while it began
            self.signal(signal.SIGTERM)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            self._settings = self.role.settings
            process.stdin.write(msgspec.json.encode(self.role) + b"\n")
            await process.stdin.drain()
            async for line in process.stdout:
                if line.startswith(b'{"ready"'):
                    self.is_ready = True
                    self._on_change(self)
        except ConnectionError:
            pass  # it died before it read its role
        finally:
            self.is_ready = False
            self.exit_code = await process.wait()
            process.stdin.close()
            self._process = None
