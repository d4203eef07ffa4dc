"""The operator's endpoints and commands, over a whole gateway on real sockets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin import Admin
from gateway.client import workers_table
from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.proxy.limits import Limits
from gateway.proxy.server import Listener, make_app
from gateway.routing.dispatch import Dispatcher
from gateway.routing.routes import Route, Routes
from gateway.telemetry.requests import Telemetry
from tests.fakes.engine import RawEngine, Script, Seen, answer
from tests.gateway.doctor_parts import CachingEngine, Running, running_gateway
from tests.gateway.miss_parts import HANDBOOK, message
from tests.support import poll_until

WORKER_FIELDS = {
    *("id", "url", "pool", "mode", "state", "ready", "in_flight", "queued_tokens", "blocks"),
    *("capacity_tokens", "block_size", "epoch", "rank", "parity", "cost", "can_pull"),
    *(
        "pull_style",
        "adapters",
        "fingerprint",
        "is_apart",
        "event_age_s",
        "event_health",
        "lag_s",
        "gaps",
    ),
    *("replays", "losses", "decode_errors", "rejected", "orphans"),
}
POOL_FIELDS = {
    *("pool", "models", "engine", "backend", "reads_prompts", "block_size", "blocks"),
    *("max_blocks", "by_tier", "age_s", "unread_prompts", "workers", "shared"),
}


async def warmlane(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmlane", *args]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )


def ask(number: int) -> dict[str, Any]:
    system = "You answer from this. " + HANDBOOK * 3
    return {"model": "m", "messages": [message("system", system), message("user", f"{number}?")]}


async def serve_some(gateway: Running, fake: CachingEngine, requests: int) -> None:
    fake.reader = gateway.fleet.pools[0].reader
    for number in range(requests):
        headers = {"x-document-id": "handbook"}
        status, _ = await gateway.post("/v1/chat/completions", ask(number), headers=headers)
        assert status == 200


async def test_worth_index_and_workers_are_told_and_shown(smollm2_dir: Path) -> None:
    # Slow enough that what is held is worth keeping.
    fake = CachingEngine(prefill_token_s=2e-4)
    async with (
        RawEngine(fake.respond) as engine,
        running_gateway(
            engine.url,
            engine="vllm",
            tokenizer=str(smollm2_dir),
            offload={"max_offload_tokens": 8192},
        ) as gateway,
    ):
        await serve_some(gateway, fake, 1)
        # Its tokens come behind it, and only what was read can be reused.
        index = gateway.fleet.pools[0].index
        assert index is not None
        await poll_until(lambda: index.num_blocks > 0)
        await serve_some(gateway, fake, 9)
        worth = await gateway.get("/admin/v1/worth")
        told = await gateway.get("/admin/v1/index")
        workers = await gateway.get("/admin/v1/workers")
        listed = await warmlane("workers", "list", "--gateway", gateway.url)
        done = await warmlane("doctor", "--gateway", gateway.url, "--json")
        shown = await warmlane("doctor", "--gateway", gateway.url)
        metrics = gateway.telemetry.render().decode()

    (pool,) = worth["pools"]
    assert (pool["pool"], pool["verdict"]) == ("chat", "unknown")  # no restore was seen
    assert pool["reuse_count"] == pytest.approx(9.0, abs=0.1)
    assert pool["shared_prefix_tokens"] >= 512
    (document,) = worth["documents"]
    assert (document["kind"], len(document["document"])) == ("document", 16)

    (row,) = told["pools"]
    assert set(row) >= POOL_FIELDS
    assert (row["backend"], row["blocks"]) == ("memory", row["by_tier"]["gpu"])
    assert row["workers"]["w0"]["mode"] == "approximate"

    (worker,) = workers["workers"]
    assert set(worker) >= WORKER_FIELDS
    assert worker["blocks"]["gpu"] == row["blocks"]
    assert (worker["lag_s"], worker["gaps"]) == (None, None)  # it announces nothing

    assert listed.returncode == 0, listed.stderr
    head, line = listed.stdout.splitlines()
    assert head.split()[:5] == ["id", "pool", "mode", "tokens", "state"]
    assert line.split()[:5] == ["w0", "chat", "approximate", "equal", "ready"]

    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["worth"]["pools"][0]["pool"] == "chat"
    assert "Lower tiers" in shown.stdout

    families = {f.name: f for f in text_string_to_metric_families(metrics)}
    verdicts = {s.labels["verdict"]: s.value for s in families["warmlane_worth_verdict"].samples}
    assert verdicts == {"yes": 0, "no": 0, "unknown": 1}
    assert "warmlane_worth_reuse_gain_seconds" not in {
        s.name for s in families["warmlane_worth_reuse_gain_seconds"].samples
    }


async def test_a_worker_is_drained_by_command(smollm2_dir: Path) -> None:
    fake = CachingEngine()
    async with (
        RawEngine(fake.respond) as first,
        RawEngine(fake.respond) as second,
        running_gateway(
            first.url, second.url, engine="vllm", tokenizer=str(smollm2_dir)
        ) as gateway,
    ):
        done = await warmlane("workers", "drain", "w0", "--gateway", gateway.url)
        as_json = await warmlane("workers", "drain", "w0", "--gateway", gateway.url, "--json")
        unknown = await warmlane("workers", "drain", "w/9", "--gateway", gateway.url)
        await serve_some(gateway, fake, 3)
        sent = [
            len([s for s in e.seen if s.target.startswith("/v1/chat")]) for e in (first, second)
        ]

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].split()[4] == "draining"
    assert json.loads(as_json.stdout)["state"] == "draining"
    assert sent == [0, 3]
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "'w/9'" in unknown.stderr


async def test_without_a_report_there_is_no_such_endpoint() -> None:
    settings = Settings.model_validate({"pools": [{"name": "chat", "models": ["m"]}]})
    fleet = Fleet(settings)
    admin = Admin(Dispatcher(fleet.pools), fleet, Telemetry(), Limits(), None, lambda: 0.0)

    paths = {route.path for route in admin.routes()}

    assert "/admin/v1/worth" not in paths
    assert "/admin/v1/misses" not in paths


async def test_a_shared_index_says_so() -> None:
    config = {"name": "chat", "models": ["m"], "workers": [{"id": "w0", "url": "http://h:1"}]}
    settings = Settings.model_validate({"pools": [config]})
    fleet = Fleet(settings)
    held = {"holder": "g1", "generation": 4}
    state = {"is_up": False, "down_since_s": 3.0, "age_s": 7.5, "workers": {"w0": held, "gone": {}}}
    dispatcher = Dispatcher(fleet.pools)
    admin = Admin(
        dispatcher, fleet, Telemetry(), Limits(), None, lambda: 0.0, shared=lambda _pool: state
    )
    app = make_app(dispatcher, observe=fleet.observe, limits=Limits(), extra_routes=admin.routes())
    listener = await Listener.start(app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{listener.port}/admin/v1/index"
        async with session.get(url) as response:
            (row,) = (await response.json())["pools"]
    await listener.stop(0.0)

    assert (row["backend"], row["shared"]["age_s"]) == ("redis", 7.5)
    assert row["workers"]["w0"]["shared"] == held
    assert set(row["workers"]) == {"w0"}
    await fleet.stop()


async def test_explain_follows_the_routes_of_the_tenant_it_is_asked_for() -> None:
    pools = [{"name": name, "models": ["m"], "weight": 1} for name in ("chat", "batch")]
    fleet = Fleet(Settings.model_validate({"pools": pools}))
    chat, batch = fleet.pools
    chat.weight, batch.weight = 1, 0
    routes = Routes(fleet.pools, [Route(batch, tenant="night", max_offload_tokens=0)])
    dispatcher = Dispatcher(fleet.pools, routes=routes)
    admin = Admin(dispatcher, fleet, Telemetry(), Limits(), None, lambda: 0.0)
    app = make_app(dispatcher, observe=fleet.observe, limits=Limits(), extra_routes=admin.routes())
    listener = await Listener.start(app, "127.0.0.1", 0)
    found = {}
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{listener.port}/admin/v1/explain"
        for tenant in ("night", "day", ""):
            headers = {"x-tenant-id": tenant}
            async with session.post(url, json=ask(1), headers=headers) as response:
                found[tenant] = (await response.json())["pool"]
        async with session.post(url, json=ask(1) | {"model": "unknown"}) as response:
            status = response.status
    await listener.stop(0.0)

    assert found == {"night": "batch", "day": "chat", "": "chat"}
    assert status == 404
    await fleet.stop()


def test_the_table_of_workers_takes_what_older_gateways_answer() -> None:
    row = {
        "id": "w0",
        "pool": "chat",
        "mode": "exact",
        "parity": 1,
        "state": "ready",
        "in_flight": 2,
        "gaps": 1,
        "blocks": {"gpu": 9, "cpu": 4},
        "epoch": 1.7e9,
        "url": "u",
    }
    newer = row | {"lag_s": 1.25, "pull_style": "runner", "is_apart": True, "gaps": None}

    _, old, new = workers_table([row, newer]).splitlines()

    assert old.split() == [
        *("w0", "chat", "exact", "equal", "ready", "2", "-", "1", "9", "4", "0", "0"),
        *("2023-11-14T22:13:20Z", "-", "u"),
    ]
    assert new.split()[4:9] == ["ready", "(apart)", "2", "1.2s", "-"]


async def test_a_worker_drops_its_cache_by_command_and_one_that_cannot_says_so(
    smollm2_dir: Path,
) -> None:
    fake = CachingEngine()
    resets: list[str] = []

    def respond(seen: Seen) -> Script:
        if seen.target != "/reset_prefix_cache":
            return fake.respond(seen)
        resets.append(seen.method)
        if len(resets) > 1:
            return answer(b'{"success": false}')
        fake.held.clear()
        return answer(b"")

    async with (
        RawEngine(respond) as engine,
        running_gateway(engine.url, engine="vllm", tokenizer=str(smollm2_dir)) as gateway,
    ):
        await serve_some(gateway, fake, 3)
        index = gateway.fleet.pools[0].index
        assert index is not None
        assert index.num_blocks
        status, row = await gateway.post("/admin/v1/workers/w0/reset", {})
        assert (status, row["id"], resets) == (200, "w0", ["POST"])
        assert index.num_blocks == 0
        status, refused = await gateway.post("/admin/v1/workers/w0/reset", {})
        assert (status, refused["error"]["code"]) == (502, "cache_not_reset")
        status, _ = await gateway.post("/admin/v1/workers/nobody/reset", {})
        assert status == 404


async def test_a_worker_joins_and_leaves_by_command(smollm2_dir: Path) -> None:
    fake = CachingEngine()
    async with (
        RawEngine(fake.respond) as first,
        RawEngine(fake.respond) as second,
        running_gateway(first.url, engine="vllm", tokenizer=str(smollm2_dir)) as gateway,
    ):
        at = ("--gateway", gateway.url)
        added = await warmlane("workers", "add", second.url, "--id", "new", *at)
        twice = await warmlane("workers", "add", second.url, "--id", "new", *at)
        outside = await warmlane("workers", "add", "http://203.0.113.5:8000", *at)
        listed = json.loads((await warmlane("workers", "list", *at, "--json")).stdout)
        removed = await warmlane("workers", "remove", "new", *at)
        unknown = await warmlane("workers", "remove", "new", *at)

    assert (added.returncode, added.stderr) == (0, "")
    assert added.stdout.splitlines()[1].split()[0] == "new"
    assert [row["id"] for row in listed["workers"]] == ["w0", "new"]
    assert (twice.returncode, outside.returncode, unknown.returncode) == (1, 1, 1)
    assert "worker_allow" in outside.stderr
    assert (removed.returncode, removed.stdout) == (0, "removed new\n")
