"""Start a gateway: as one process, as several, or as one of several.

One process is a ``Gateway``. Several are children of ``gateway/supervisor/``, each of which runs
this module with a ``Role`` on its standard input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
import structlog

from gateway.config import Settings
from gateway.parts import admin_token, make_tls
from gateway.reload.metrics import ReloadCollector
from gateway.reload.reloader import Reloader
from gateway.runtime import configure_logs, run_loop
from gateway.serve import Gateway
from gateway.settings import ConfigError
from gateway.supervisor.child import Role
from gateway.supervisor.supervisor import Supervisor
from gateway.unsupported import unsupported

if TYPE_CHECKING:
    from gateway.reload.reloader import ConfigFile


def serve_forever(file: ConfigFile) -> int:
    """Run the gateway, in as many processes as configured, until a signal.

    Args:
        file: Its configuration, which is read again when it changes.

    Returns:
        The exit code.

    Raises:
        ConfigError: If something configured cannot be used.
        ConnectionError: If an address cannot be listened on.
    """
    settings = file.load()
    configure_logs(settings.telemetry.log_level)
    _, warnings = unsupported(settings)
    if settings.server.processes > 1:
        admin_token(settings.server)
        _warn(settings, warnings)
        # The children have the client port's; the operators' port is the supervisor's.
        tls = make_tls(settings.server) if settings.server.admin_tls else None
        return run_loop(Supervisor(settings, file=file, tls=tls).run())
    gateway = Gateway(settings)
    _warn(settings, warnings)
    run_loop(_run_alone(gateway, file))
    return 0


async def _run_alone(gateway: Gateway, file: ConfigFile) -> None:
    reloader = Reloader(file, gateway.settings, gateway.reload)
    gateway.telemetry.register(ReloadCollector(reloader))
    gateway.observing.console.is_reloaded = lambda: reloader.is_last_good
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reloader.ask)
    task = loop.create_task(reloader.run())
    try:
        await gateway.run()
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def serve_child() -> int:
    """Run one of several processes, as told on the standard input; return the exit code."""
    # The configuration comes from the supervisor, whom a terminal's end is meant for, too.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    role = msgspec.json.decode(sys.stdin.buffer.readline(), type=Role)
    settings = Settings.model_validate(role.settings)
    configure_logs(settings.telemetry.log_level)
    try:
        run_loop(_run_child(Gateway(settings, role=role)))
    except (ConfigError, ConnectionError) as error:
        print(f"warmlane: {error}", file=sys.stderr)
        return 1
    return 0


async def _run_child(gateway: Gateway) -> None:
    # The supervisor keeps this open as long as it lives.
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _end_if_alone)
    await gateway.run(ready=_tell_ready)


def _end_if_alone() -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        os.kill(os.getpid(), signal.SIGTERM)


def _tell_ready(port: int) -> None:
    print(msgspec.json.encode({"ready": port}).decode(), flush=True)


def _warn(settings: Settings, warnings: list[str]) -> None:
    log = structlog.get_logger("warmlane")
    for warning in warnings:
        log.warning("not_supported", what=warning)
    if settings.telemetry.log_prompts:
        log.warning("prompts_are_logged", why="telemetry.log_prompts", where="logs, traces, misses")


if __name__ == "__main__":
    sys.exit(serve_child())
