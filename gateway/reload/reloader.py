"""Reads the configuration again when its file changes, or when told to.

A file that cannot be used leaves everything as it is, and is said in one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from gateway.discovery.stamps import LOOK_EVERY_S, stamp_of
from gateway.reload.changes import merged
from gateway.settings import ConfigError, Location, load
from gateway.unsupported import unsupported

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.config import Settings

log = structlog.get_logger("warmlane")


class ConfigFile(NamedTuple):
    """Where the configuration is read from.

    Attributes:
        path: Its file; None = flags and environment say everything.
        flags: Command-line values, which stay above the file's.
    """

    path: str | None
    flags: Mapping[Location, Any]

    def load(self) -> Settings:
        """Read and check it.

        Raises:
            ConfigError: If it cannot be used; the message names file and line.
        """
        settings, _ = load(self.path, flags=self.flags)
        errors, _ = unsupported(settings)
        if errors:
            raise ConfigError("\n".join(errors))
        return settings


class Reloader:
    """Keeps a gateway's configuration that of its file; used from one event loop.

    Args:
        file: The file.
        settings: What holds now.
        use: Takes over a configuration, all of it or nothing (then it raises).
        sleep: Waits some seconds.

    Attributes:
        settings: What holds now.
        num_failures: Times that a new configuration could not be used.
        is_last_good: Whether the last one that was read holds.
        kept: Keys whose new value waits for a restart.
    """

    def __init__(
        self,
        file: ConfigFile,
        settings: Settings,
        use: Callable[[Settings], Awaitable[None]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.settings = settings
        self.num_failures = 0
        self.is_last_good = True
        self.kept: list[str] = []
        self._file = file
        self._use = use
        self._sleep = sleep
        self._asked = asyncio.Event()
        # From here on, not from whenever ``run`` begins: what is written meanwhile counts.
        self._stamp = None if file.path is None else stamp_of(file.path)

    def ask(self) -> None:
        """Read again soon, changed or not; for SIGHUP."""
        self._asked.set()

    async def run(self) -> None:
        """Look every second until cancelled."""
        while True:
            stamp = None if self._file.path is None else stamp_of(self._file.path)
            if stamp != self._stamp or self._asked.is_set():
                self._stamp = stamp
                self._asked.clear()
                await self.reload()
            await self._sleep(LOOK_EVERY_S)

    async def reload(self) -> bool:
        """Read and take over; whether what was read holds now."""
        try:
            new = await asyncio.to_thread(self._file.load)
            settings, kept = merged(self.settings, new)
            await self._use(settings)
        except Exception as error:
            self.num_failures += 1
            self.is_last_good = False
            known = isinstance(error, ConfigError | ConnectionError)
            log.error(
                "config_reload_failed",
                reason="; ".join(str(error).splitlines()) or type(error).__name__,
                effect="the configuration stays as it was",
                exc_info=None if known else error,
            )
            return False
        self.settings = settings
        self.is_last_good = True
        self.kept = kept
        if kept:
            log.warning("config_reloaded", needs_restart=kept)
        else:
            log.info("config_reloaded", needs_restart=kept)
        return True
