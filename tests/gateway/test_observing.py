"""What is over is told of many at a time, and nothing that anybody can ask shows the wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.telemetry import finished
from tests.fakes.engine import RawEngine
from tests.gateway.tenancy_parts import KEYS, T1, T2, Serving, asking, respond, serving

TENANTS = {"tenants": [T1, T2]}
LONG = "Refunds are accepted within thirty days of delivery. " * 20


@pytest.fixture(autouse=True)
def only_who_asks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    # Nothing is told of by itself: what a test sees was told because something read it.
    monkeypatch.setattr(finished, "WAIT_S", 3600.0)
    monkeypatch.setattr(finished, "MAX_WAITING", 1_000_000)


def pool(models: Path) -> dict[str, Any]:
    return {"tokenizer": str(models), "block_size": 16}


async def told(gw: Serving, path: str) -> Any:
    status, document, _ = await gw.get(path)
    assert status == 200
    return document


async def test_every_report_has_what_ended_the_moment_before(smollm2_dir: Path) -> None:
    reads = {
        "/admin/v1/misses": lambda document: document["totals"]["requests"],
        "/admin/v1/worth": lambda document: document["hints"][0]["requests"],
        "/admin/v1/usage": lambda document: document["tenants"][0]["requests"],
        "/console/data": lambda document: len(document["decisions"]),
        "/metrics": lambda text: requests_counted(text),
    }
    async with (
        RawEngine(respond) as engine,
        serving(engine, pool=pool(smollm2_dir), **TENANTS) as gw,
    ):
        for number, (path, read) in enumerate(reads.items(), 1):
            assert await gw.ask(KEYS["K1"], asking(f"{LONG} {path}?")) == 200
            assert read(await told(gw, path)) == number, path


async def test_what_a_purged_tenant_asked_a_moment_ago_is_forgotten_too(smollm2_dir: Path) -> None:
    async with (
        RawEngine(respond) as engine,
        serving(engine, pool=pool(smollm2_dir), **TENANTS) as gw,
    ):
        for key in ("K1", "K2"):
            assert await gw.ask(KEYS[key], asking(f"{key}: {LONG}")) == 200
        status, document, _ = await gw.post("/admin/v1/purge", {"tenant": "t1"})
        assert status == 200
        assert document["removed"]["miss_prompts"] == 1
        await gw.gateway.misses.settled()
        # The other one's stays, whether it was compared by then or not.
        assert gw.gateway.misses.forget("t1", "") == 0
        assert gw.gateway.misses.forget("t2", "") == 1


async def test_what_waits_when_a_gateway_ends_is_counted_and_written(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "decisions"
    telemetry = {"decision_log": str(log)}
    async with (
        RawEngine(respond) as engine,
        serving(engine, pool=pool(smollm2_dir), telemetry=telemetry) as gw,
    ):
        for number in range(3):
            status, _, _ = await gw.post("/v1/chat/completions", asking(f"{LONG} {number}?"))
            assert status == 200
        assert log.read_bytes() == b""
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    assert [line["outcome"] for line in lines] == ["ok"] * 3
    assert gw.gateway.misses.report()["totals"]["requests"] == 3


async def test_a_worker_that_leaves_takes_what_waits_of_it_along(smollm2_dir: Path) -> None:
    async with RawEngine(respond) as engine, serving(engine, pool=pool(smollm2_dir)) as gw:
        status, _, _ = await gw.post("/v1/chat/completions", asking(f"{LONG}?"))
        assert status == 200
        assert gw.gateway.fleet.remove("w0")
        assert requests_counted(await told(gw, "/metrics")) == 0
        assert (await told(gw, "/admin/v1/misses"))["totals"]["requests"] == 1


def requests_counted(text: bytes) -> float:
    lines = [line for line in text.splitlines() if line.startswith(b"warmlane_requests_total{")]
    return sum(float(line.split()[-1]) for line in lines)
