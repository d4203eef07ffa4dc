"""Several processes on one port, as a client and an operator see them: real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.engine import DONE, FINISH, ROLE, RawEngine, content, openai_engine, stream
from tests.fakes.gateway import RawClient, chat, wire
from tests.gateway.warm_parts import Caching, byte_tokenizer_dir, end, item
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]


def parent_of(process: Path) -> int | None:
    try:
        # Behind the name in parentheses, which may itself hold anything.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


class Serving:
    """A supervised gateway in front of one engine."""

    def __init__(
        self, process: asyncio.subprocess.Process, port: int, admin_port: int | None
    ) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = self.url if admin_port is None else f"http://127.0.0.1:{admin_port}"

    @property
    def children(self) -> set[int]:
        return {
            int(path.name)
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and parent_of(path) == self.process.pid
        }

    async def get(self, path: str, *, admin: bool = True) -> httpx.Response:
        # A connection each: the kernel spreads connections, not requests.
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            return await client.get((self.admin_url if admin else self.url) + path)

    async def ask(self, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            return await client.post(self.url + "/v1/chat/completions", json=chat(**more))

    async def count(self, name: str) -> float:
        text = (await self.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def is_ready(self) -> bool:
        try:
            return "warmlane_processes 2.0\n" in (await self.get("/metrics")).text
        except httpx.TransportError:
            return False

    async def ended(self) -> int | None:
        async with asyncio.timeout(20):
            return await self.process.wait()


@asynccontextmanager
async def serving(
    folder: Path,
    valkey: Valkey,
    engine_url: str,
    *,
    wait: bool = True,
    pool: dict[str, Any] | None = None,
    **server: Any,
) -> AsyncIterator[Serving]:
    port = server.setdefault("port", free_port())
    config = {
        "server": {"host": "127.0.0.1", "processes": 2, "drain_s": 20, **server},
        "index": {"backend": "redis", "url": valkey.url},
        "pools": [
            {"name": "chat", "models": ["m"], "workers": [{"id": "w0", "url": engine_url}]}
            | (pool or {})
        ],
    }
    path = folder / "warmlane.json"
    path.write_text(json.dumps(config))
    with (folder / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "serve", "--config", str(path)),
            stderr=log,
            start_new_session=True,
        )
    found = Serving(process, port, server.get("admin_port"))
    try:
        if wait:
            await poll_until(
                found.is_ready, deadline_s=40, what=(folder / "log").read_text()[-2000:]
            )
        yield found
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_processes_share_a_port_and_look_like_one_gateway(
    tmp_path: Path, valkey: Valkey
) -> None:
    async with openai_engine() as engine, serving(tmp_path, valkey, engine.url) as gw:
        answers = [await gw.ask() for _ in range(40)]
        assert {answer.status_code for answer in answers} == {200}
        assert await gw.count("warmlane_requests_total") == 40
        workers = (await gw.get("/admin/v1/workers")).json()["workers"]
        index = (await gw.get("/admin/v1/index")).json()["pools"]
        misses = (await gw.get("/admin/v1/misses")).json()
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            explained = await client.post(gw.url + "/admin/v1/explain", json=chat())
            drained = await client.post(gw.url + "/admin/v1/workers/w0/drain")
        states = [
            (await gw.get("/admin/v1/workers")).json()["workers"][0]["state"] for _ in range(6)
        ]
        refused = [(await gw.ask()).status_code for _ in range(8)]

    assert [row["id"] for row in workers] == ["w0"]
    assert [row["pool"] for row in index] == ["chat"]
    assert misses["causes"] == []
    assert explained.json()["pool"] == "chat"
    assert drained.status_code == 200
    assert set(states) == {"draining"}
    assert set(refused) == {503}, "all processes were told"


async def test_a_process_that_is_killed_comes_back_and_no_counter_goes_back(
    tmp_path: Path, valkey: Valkey
) -> None:
    async with openai_engine() as engine, serving(tmp_path, valkey, engine.url) as gw:
        for _ in range(20):
            await gw.ask()
        assert await gw.count("warmlane_requests_total") == 20
        before = gw.children
        os.kill(min(before), signal.SIGKILL)
        await poll_until(lambda: len(gw.children - before) == 1)
        counted = await gw.count("warmlane_requests_total")
        await poll_until(gw.is_ready, deadline_s=30)
        for _ in range(10):
            assert (await gw.ask()).status_code == 200
        restarts = [
            line for line in (await gw.get("/metrics")).text.splitlines()
            if line.startswith("warmlane_process_restarts_total")
        ]  # fmt: skip

        assert counted == 20
        assert await gw.count("warmlane_requests_total") == 30
        assert restarts == ["warmlane_process_restarts_total 1.0"]


async def test_with_an_admin_port_operators_have_no_way_in_on_the_client_port(
    tmp_path: Path, valkey: Valkey
) -> None:
    async with (
        openai_engine() as engine,
        serving(tmp_path, valkey, engine.url, admin_port=free_port()) as gw,
    ):
        await gw.ask()
        outside = [
            (await gw.get(path, admin=False)).status_code
            for path in ("/metrics", "/admin/v1/workers", "/admin/v1/explain")
        ]
        inside = [
            (await gw.get(path)).status_code
            for path in ("/metrics", "/admin/v1/workers", "/health/ready", "/health/live")
        ]
        nowhere = await gw.get("/nowhere")

    assert nowhere.json()["error"]["message"] == "No such path: GET /nowhere."
    assert outside == [404, 404, 404]
    assert inside == [200, 200, 200, 200]


async def test_the_admin_token_is_asked_for_although_others_pass_the_request_on(
    tmp_path: Path, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WL_TEST_TOKEN", "secret")
    access = {"admin_token_env": "WL_TEST_TOKEN"}
    async with (
        openai_engine() as engine,
        serving(tmp_path, valkey, engine.url, access=access) as gw,
        httpx.AsyncClient(timeout=10, trust_env=False) as client,
    ):
        headers = {"x-warmlane-peer": "127.0.0.1"}
        answers = [
            await client.get(
                gw.url + "/admin/v1/workers", headers={**headers, "authorization": given}
            )
            for given in ("", "Bearer wrong", "Bearer secret")
        ]

    assert [answer.status_code for answer in answers] == [401, 401, 200]


async def test_sigterm_lets_streams_end_in_all_processes(tmp_path: Path, valkey: Valkey) -> None:
    go_on = asyncio.Event()
    script = [ROLE, content("some"), go_on, FINISH, DONE]
    async with (
        RawEngine(lambda _: stream(*script)) as engine,
        serving(tmp_path, valkey, engine.url) as gw,
    ):
        clients = []
        for _ in range(8):
            client = await RawClient.connect(gw.port)
            await client.send(wire(json.dumps(chat(stream=True)).encode()))
            await client.reader.readuntil(b"some")
            clients.append(client)
        os.kill(gw.process.pid, signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert gw.process.returncode is None
        go_on.set()
        rests = [await client.rest() for client in clients]
        for client in clients:
            await client.close()

        assert all(DONE in rest for rest in rests)
        assert await gw.ended() == 0


async def test_a_second_signal_ends_at_once(tmp_path: Path, valkey: Valkey) -> None:
    async with (
        RawEngine(lambda _: stream(ROLE, content("some"), asyncio.Event())) as engine,
        serving(tmp_path, valkey, engine.url, drain_s=60) as gw,
    ):
        client = await RawClient.connect(gw.port)
        await client.send(wire(json.dumps(chat(stream=True)).encode()))
        await client.reader.readuntil(b"some")
        os.kill(gw.process.pid, signal.SIGINT)
        await asyncio.sleep(0.3)
        os.kill(gw.process.pid, signal.SIGINT)
        rest = await client.rest()
        await client.close()

        assert b'"code":"shutting_down"' in rest
        assert await gw.ended() == 0


async def test_when_the_supervisor_is_killed_its_processes_end(
    tmp_path: Path, valkey: Valkey
) -> None:
    async with openai_engine() as engine, serving(tmp_path, valkey, engine.url) as gw:
        children = gw.children
        assert len(children) == 2
        gw.process.kill()
        await poll_until(
            lambda: not any(Path(f"/proc/{child}/cmdline").exists() for child in children),
            deadline_s=20,
        )


async def test_a_port_in_use_is_said_and_ends_the_start(tmp_path: Path, valkey: Valkey) -> None:
    async with (
        openai_engine() as engine,
        serving(tmp_path, valkey, engine.url, port=engine.port, wait=False) as gw,
    ):
        assert await gw.ended() == 1

    assert "in use" in (tmp_path / "log").read_text()


async def test_a_configuration_that_no_process_can_use_ends_the_start(
    tmp_path: Path, valkey: Valkey
) -> None:
    async with serving(
        tmp_path, valkey, "http://127.0.0.1:9", wait=False,
        access={"admin_token_env": "WL_NOT_SET"},
    ) as gw:  # fmt: skip
        assert await gw.ended() == 1

    assert "WL_NOT_SET" in (tmp_path / "log").read_text()


async def test_a_warm_up_streams_through_the_supervisor(tmp_path: Path, valkey: Valkey) -> None:
    engine = Caching(prefill_token_s=5e-4)
    pool = {"engine": "vllm", "tokenizer": str(byte_tokenizer_dir(tmp_path)), "block_size": 16}
    body = {"model": "m", "items": [item(f"d{k}") for k in range(4)]}
    async with (
        RawEngine(engine.respond) as raw,
        serving(tmp_path, valkey, raw.url, pool=pool) as gateway,
        httpx.AsyncClient(timeout=30, trust_env=False) as client,
    ):
        async with client.stream("POST", gateway.url + "/admin/v1/warm", json=body) as answer:
            assert answer.status_code == 200
            events = [json.loads(line) async for line in answer.aiter_lines() if line]
        assert end(events)["warm"] == 4
        # A client that leaves ends the run in the process that does it.
        engine.held.clear()
        async with client.stream(
            "POST", gateway.url + "/admin/v1/warm", json=body | {"run_id": "left"}
        ) as answer:
            await anext(answer.aiter_lines())

        async def is_over() -> bool:
            runs = (await gateway.get("/admin/v1/warm")).json()["runs"]
            return bool(runs[0]["run_id"] == "left" and runs[0]["state"] == "stopped")

        await poll_until(is_over, deadline_s=20.0, what="the run is stopped")
        found = (await gateway.get("/admin/v1/documents")).json()
        assert found["total"]["warmed"] == 4
        url = gateway.url + "/admin/v1/purge"
        assert (await client.post(url, json={})).status_code == 400
        told = (await client.post(url, json={"document": "d0"})).json()
        assert told["removed"]["warmed_prefixes"] == 1
