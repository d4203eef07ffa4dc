"""Usage of several gateways added up, and purges that reach all: real processes and Valkey."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.replicas.orders import VERSION, Orders, _encode
from prefix_index.replica.link import Link
from tests.fakes.engine import RawEngine
from tests.gateway.test_supervisor import serving as supervised
from tests.gateway.test_usage import PROMPT, respond
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]

MODEL = Path(__file__).parents[2] / "models" / "smollm2"

# Questions differ, so that each is kept.
NUMBERS = itertools.count()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@dataclass
class Running:
    """One gateway of its own."""

    url: str
    process: asyncio.subprocess.Process

    async def ask(self, tenant: str = "acme") -> None:
        question = f"Question {next(NUMBERS)}: what does the handbook say about doors? " * 8
        body = {"model": "m", "messages": [{"role": "user", "content": question}]}
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            found = await client.post(
                f"{self.url}/v1/chat/completions", json=body, headers={"x-tenant-id": tenant}
            )
        assert found.status_code == 200, found.text

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            return await client.get(self.url + path)

    async def usage(self) -> dict[str, Any]:
        document: dict[str, Any] = (await self.get("/admin/v1/usage")).json()
        return document

    async def purge(self, **order: str) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            answer = await client.post(f"{self.url}/admin/v1/purge", json=order)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told


@asynccontextmanager
async def gateways(
    folder: Path, engine: RawEngine, num: int, redis_url: str | None
) -> AsyncIterator[list[Running]]:
    """Run gateways in processes of their own, and wait until they know each other."""
    async with AsyncExitStack() as stack:
        found = []
        for number in range(num):
            port = free_port()
            config: dict[str, Any] = {
                "server": {
                    "host": "127.0.0.1",
                    "port": port,
                    "access": {"trusted_peers": ["127.0.0.1"]},
                },
                "pools": [
                    {
                        "name": "chat",
                        "models": ["m"],
                        "engine": "openai",
                        "tokenizer": str(MODEL),
                        "capacity_tokens": 100_000,
                        "workers": [{"id": "w0", "url": engine.url}],
                    }
                ],
                "tenants": [{"name": "acme", "keys_file": str(folder / "keys")}],
            }
            (folder / "keys").write_text("0" * 64 + "\n")
            if redis_url is not None:
                config["index"] = {"backend": "redis", "url": redis_url}
            path = folder / f"{number}.json"
            path.write_text(json.dumps(config))
            log = stack.enter_context((folder / f"{number}.log").open("wb"))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", "serve", "--config", str(path)),
                stdout=log,
                stderr=log,
            )
            stack.push_async_callback(_end, process)
            found.append(Running(f"http://127.0.0.1:{port}", process))
        for gateway in found:
            await poll_until(lambda gateway=gateway: _is_ready(gateway), deadline_s=90)
        if redis_url is not None:
            await _wait_for_each_other(found)
        yield found


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def _is_ready(gateway: Running) -> bool:
    try:
        return (await gateway.get("/health/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def _wait_for_each_other(found: list[Running]) -> None:
    for gateway in found:
        await told_by(gateway, len(found))


async def told_by(gateway: Running, num: int) -> dict[str, Any]:
    """Return the usage as soon as so many processes are added up: a busy one may answer late."""
    told: dict[str, Any] = {}

    async def is_whole() -> bool:
        told.update(await gateway.usage())
        return bool(told["replicas"]["added_up"] == num and told["replicas"]["missing"] == 0)

    await poll_until(is_whole, deadline_s=60)
    return told


async def purged(gateway: Running, tenant: str, num_prompts: int) -> None:
    """Purge a tenant until so many prompts of it were forgotten: they are kept a moment later."""
    total = 0

    async def are_all() -> bool:
        nonlocal total
        told = await gateway.purge(tenant=tenant)
        assert told["replicas"] == {"purged": 2, "missing": 0}
        assert told["note"].startswith("All gateway processes")
        total += told["removed"]["miss_prompts"]
        assert total <= num_prompts
        return total == num_prompts

    await poll_until(are_all, deadline_s=60)


def row_of(document: dict[str, Any], tenant: str) -> dict[str, Any]:
    return next(row for row in document["tenants"] if row["tenant"] == tenant)


async def test_two_gateways_tell_the_fleets_usage_and_forget_together(
    tmp_path: Path, valkey: Valkey
) -> None:
    async with (
        RawEngine(respond) as engine,
        gateways(tmp_path, engine, 2, valkey.url) as (one, other),
    ):
        for _ in range(3):
            await one.ask()
        for _ in range(4):
            await other.ask()
        await other.ask("stranger")
        for gateway in (one, other):
            document = await told_by(gateway, 2)
            assert row_of(document, "acme")["requests"] == 7
            assert row_of(document, "acme")["prompt_tokens"] == 7 * PROMPT
            assert row_of(document, "other")["requests"] == 1
            assert document["totals"]["requests"] == 8
            assert document["replicas"]["note"].startswith("All gateway processes")
        text = (await one.get("/admin/v1/usage?format=csv")).text
        rows = list(csv.DictReader(io.StringIO(text)))
        assert [(row["replicas"], row["missing_replicas"]) for row in rows] == [("2", "0")] * 2
        own = (await one.get("/admin/v1/usage?scope=process")).json()
        assert own["totals"]["requests"] == 3

        # Whoever is asked, those that the other one keeps are forgotten as well.
        await purged(one, "acme", 7)
        await purged(one, "stranger", 1)


async def test_who_does_not_answer_is_missing_and_so_are_all_without_redis(
    tmp_path: Path, valkey: Valkey
) -> None:
    async with (
        RawEngine(respond) as engine,
        gateways(tmp_path, engine, 2, valkey.url) as (one, other),
    ):
        for gateway in (one, other):
            await gateway.ask()
        other.process.send_signal(signal.SIGSTOP)
        told = await one.purge(tenant="acme")
        assert told["replicas"] == {"purged": 1, "missing": 1}
        assert "1 gateway processes did not answer" in told["note"]
        document = await one.usage()
        assert document["totals"]["requests"] == 1
        assert document["replicas"]["missing"] == 1
        assert document["replicas"]["note"].startswith("Too low")
        other.process.send_signal(signal.SIGCONT)

        # Whose server is away knows only itself, and says so; it finds the other one again.
        valkey.stop()
        for gateway in (one, other):
            document = await gateway.usage()
            assert document["totals"]["requests"] == 1
            assert document["replicas"]["missing"] is None
            assert "Redis is away" in document["replicas"]["note"]
        told = await one.purge(tenant="acme")
        assert told["replicas"] == {"purged": 1, "missing": None}
        assert "Redis is away" in told["note"]
        valkey.start()
        assert (await told_by(one, 2))["totals"]["requests"] == 2


async def test_without_redis_a_gateway_says_that_it_speaks_for_itself(tmp_path: Path) -> None:
    async with RawEngine(respond) as engine, gateways(tmp_path, engine, 1, None) as (one,):
        await one.ask()
        document = await one.usage()
        assert document["totals"]["requests"] == 1
        assert (document["replicas"]["added_up"], document["replicas"]["missing"]) == (1, 0)
        assert "without index.backend: redis" in document["replicas"]["note"]
        told = await one.purge(tenant="acme")
        assert told["replicas"] == {"purged": 1, "missing": 0}
        assert "ask each of them" in told["note"]


async def test_processes_of_one_gateway_are_counted_once_beside_another_gateway(
    tmp_path: Path, valkey: Valkey
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    async with (
        RawEngine(respond) as engine,
        gateways(tmp_path, engine, 1, valkey.url) as (one,),
        supervised(folder, valkey, engine.url, admin_port=free_port()) as many,
    ):
        await one.ask()
        for _ in range(6):
            assert (await many.ask()).status_code == 200
        assert (await told_by(one, 3))["totals"]["requests"] == 7

        async def is_whole() -> bool:
            told = (await many.get("/admin/v1/usage")).json()
            if (told["replicas"]["added_up"], told["replicas"]["missing"]) != (3, 0):
                return False
            assert told["totals"]["requests"] == 7
            return True

        await poll_until(is_whole, deadline_s=60)


@asynccontextmanager
async def two_of_them(valkey: Valkey) -> AsyncIterator[tuple[Orders, Orders, list[Link]]]:
    """Two that count what they are asked for."""
    async with AsyncExitStack() as stack:
        made, links = [], []
        for name in ("a", "b"):
            link = Link(valkey.url, namespace="t", timeout_s=1.0)
            await stack.enter_async_context(running(link))
            orders = Orders(link, gateway=name)
            orders.handlers["count"] = lambda body: {"n": body["n"] + 1}
            made.append(orders)
            links.append(link)
        await poll_until(lambda: all(link.is_up for link in links))
        yield made[0], made[1], links


async def test_what_is_no_order_or_no_answer_changes_nothing(valkey: Valkey) -> None:
    async with two_of_them(valkey) as (one, other, (link, _)), running(one), running(other):
        await present(one, {"b"})
        stream = link.key("gateways", "orders")
        for data in (b"", b"\xff" * 64, _encode([VERSION, "x", "../..", "count", {}]), b"\xc1"):
            await link.client.xadd(stream, {b"o": data})
        await link.client.xadd(stream, {b"what": b"else"})
        answers = await one.ask("count", {"n": 41})
        assert (answers.documents, answers.num_missing) == ({"b": {"n": 42}}, 0)
        answers = await one.ask("nobody does this", {})
        assert (answers.documents, answers.num_missing) == ({}, 1)
        # What operators asked for is not kept for ever.
        assert 0 < await link.client.ttl(stream) <= 86_400


async def test_who_was_away_obeys_when_it_is_back_and_who_left_is_not_waited_for(
    valkey: Valkey,
) -> None:
    done: list[int] = []
    async with two_of_them(valkey) as (one, other, (link, _)), running(one):
        other.handlers["count"] = lambda body: {"n": done.append(body["n"])}
        async with running(other):
            await present(one, {"b"})
            await one.ask("count", {"n": 1})
        # It said goodbye; then as if it had not: it only lost its connection.
        await present(one, set())
        await link.client.zadd(link.key("gateways", "present"), {"b": time.time()})
        assert (await one.ask("count", {"n": 2})).num_missing == 1
        assert done == [1]
        async with running(other):
            await poll_until(lambda: done == [1, 2])


@asynccontextmanager
async def running(part: Orders | Link) -> AsyncIterator[None]:
    task = asyncio.create_task(part.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def present(orders: Orders, names: set[str]) -> None:
    async def are_there() -> bool:
        return await orders._others() == names

    await poll_until(are_there)
