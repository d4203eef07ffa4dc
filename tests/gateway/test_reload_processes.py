"""Another configuration for processes that run: by itself, on SIGHUP, and all of several."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml

from tests.fakes.engine import openai_engine
from tests.fakes.gateway import chat
from tests.gateway.test_reload import document, with_pool
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["valkey"]


class Process:
    """``warmlane serve`` as operators start it."""

    def __init__(self, process: asyncio.subprocess.Process, server: dict[str, Any]) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{server['port']}"
        self.admin_url = f"http://127.0.0.1:{server.get('admin_port', server['port'])}"

    async def answers(self, status: int, **more: Any) -> bool:
        try:
            # A connection each: the kernel spreads connections, not requests.
            async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
                path = "/v1/chat/completions"
                return (await client.post(self.url + path, json=chat(**more))).status_code == status
        except httpx.TransportError:
            return False

    async def always(self, status: int, **more: Any) -> bool:
        return all([await self.answers(status, **more) for _ in range(12)])

    async def shows(self, line: str) -> bool:
        try:
            async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
                return line in (await client.get(self.admin_url + "/metrics")).text.splitlines()
        except httpx.TransportError:
            return False

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]


@asynccontextmanager
async def process(path: Path, server: dict[str, Any], log: Path) -> AsyncIterator[Process]:
    with log.open("ab") as file:
        found = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "serve", "--config", str(path)),
            stderr=file,
            start_new_session=True,
        )
    try:
        yield Process(found, server)
    finally:
        found.terminate()
        async with asyncio.timeout(20):
            assert await found.wait() == 0


async def test_a_process_reloads_on_sighup_and_by_itself(tmp_path: Path) -> None:
    port = free_port()
    path = tmp_path / "warmlane.yaml"
    async with openai_engine() as engine:
        server = {"host": "127.0.0.1", "port": port}
        base = document(engine.url, server=server)
        path.write_text(yaml.safe_dump(base))
        async with process(path, server, tmp_path / "log") as running:
            await poll_until(lambda: running.answers(200), deadline_s=30)
            path.write_text(yaml.safe_dump(with_pool(base, models=["m", "n"])))
            await poll_until(lambda: running.answers(200, model="n"))
            path.write_text("pools: [")
            await poll_until(lambda: running.shows("warmlane_config_last_reload_success 0.0"))
            assert await running.shows("warmlane_config_reload_failures_total 1.0")
            running.process.send_signal(signal.SIGHUP)
            await poll_until(lambda: running.shows("warmlane_config_reload_failures_total 2.0"))
            assert await running.answers(200, model="n")
            path.write_text(yaml.safe_dump(base))
            await poll_until(lambda: running.answers(404, model="n"))
            assert await running.shows("warmlane_config_last_reload_success 1.0")
    assert f"{path}:1: not valid YAML" in (tmp_path / "log").read_text()


async def test_several_processes_reload_together_and_restarted_ones_too(
    tmp_path: Path, valkey: Valkey
) -> None:
    path = tmp_path / "warmlane.yaml"
    async with openai_engine() as engine:
        server: dict[str, Any] = {"host": "127.0.0.1", "port": free_port(), "processes": 2}
        server["admin_port"] = free_port()
        index = {"backend": "redis", "url": valkey.url}
        base = document(engine.url, server=server, index=index)
        path.write_text(yaml.safe_dump(base))
        async with process(path, server, tmp_path / "log") as running:
            await poll_until(lambda: running.shows("warmlane_processes 2.0"), deadline_s=40)
            path.write_text(yaml.safe_dump(with_pool(base, models=["m", "n"])))
            await poll_until(lambda: running.always(200, model="n"))
            path.write_text("pools: [")
            await poll_until(lambda: running.shows("warmlane_config_last_reload_success 0.0"))
            assert await running.always(200, model="n")
            path.write_text(yaml.safe_dump(with_pool(base, models=["m", "n"])))
            await poll_until(lambda: running.shows("warmlane_config_last_reload_success 1.0"))
            for pid in running.children():
                os.kill(pid, signal.SIGKILL)
            await poll_until(lambda: running.shows("warmlane_processes 0.0"))
            await poll_until(lambda: running.shows("warmlane_processes 2.0"), deadline_s=40)
            assert await running.always(200, model="n")
