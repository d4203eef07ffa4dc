"""The console's data: who may read it, what it holds, and what several processes make of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from hatchling.builders.wheel import WheelBuilder

from gateway.console.decisions import MAX_CHARS, MAX_DECISIONS, Decisions
from gateway.console.page import load_page
from gateway.supervisor.console import merge_console
from gateway.telemetry.record import RequestRecord
from tests.fakes.engine import openai_engine
from tests.gateway.console_parts import TOKEN, consoled
from tests.gateway.test_supervisor import serving
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]

REPOSITORY = Path(__file__).resolve().parents[2]
WITH_TOKEN: dict[str, Any] = {"server": {"access": {"admin_token_env": "CONSOLE_TOKEN"}}}


def record(number: int = 0, **more: Any) -> RequestRecord:
    given = {"pool": "chat", "worker": "w0", "outcome": "ok", "prompt_tokens": 100} | more
    return RequestRecord(f"r{number}", "chat", **given)


async def test_without_a_token_only_this_machine_reads_it(tmp_path: Path) -> None:
    async with consoled(tmp_path) as running:
        for path in ("/console", "/console/data"):
            assert await running.status(path) == 200
            # A proxy on this machine asks for somebody else.
            assert await running.status(path, **{"x-forwarded-for": "198.51.100.7"}) == 403


async def test_with_a_token_the_page_is_open_and_its_data_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONSOLE_TOKEN", TOKEN)
    async with consoled(tmp_path, **WITH_TOKEN) as running:
        assert await running.status("/console", **{"x-forwarded-for": "198.51.100.7"}) == 200
        assert await running.status("/console/data") == 401
        assert await running.status("/console/data", authorization="Bearer other") == 401
        assert await running.status("/console/data", authorization=f"Bearer {TOKEN}") == 200
        # Where it would stand in logs of proxies, it does not count.
        assert await running.status(f"/console/data?token={TOKEN}") == 401
        async with running.session.get(running.url + "/console") as response:
            page = await response.text()
    assert 'data-access="token"' in page
    assert "w0" not in page


async def test_with_an_admin_port_it_lives_only_there(tmp_path: Path) -> None:
    admin_port = free_port()
    server = {"host": "127.0.0.1", "admin_port": admin_port}
    async with consoled(tmp_path, server=server) as running:
        admin = f"http://127.0.0.1:{admin_port}"
        for path in ("/console", "/console/data"):
            assert await running.status(path) == 404
            assert await running.status(path, url=admin) == 200


async def test_nothing_but_its_own_script_runs_in_the_page(tmp_path: Path) -> None:
    async with (
        consoled(tmp_path) as running,
        running.session.get(running.url + "/console") as response,
    ):
        page, headers = await response.text(), response.headers
        etag = {"if-none-match": headers["etag"]}
        assert await running.status("/console", **etag) == 304
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-[^']{44}'", policy)) == 2
    assert headers["x-frame-options"] == "DENY"
    assert len(page) < 64 << 10
    # Self-contained: it names no other place, and no markup is made from text.
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", page)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    assert not re.findall(r"""\s(?:on\w+|style)=["']""", page)


def test_an_installed_wheel_has_the_page() -> None:
    files = WheelBuilder(str(REPOSITORY)).recurse_included_files()
    assert "gateway/console/console.html" in {file.distribution_path for file in files}
    assert b"<title>warmlane</title>" in load_page(needs_token=False).body


async def test_it_tells_what_the_fleet_holds_and_what_was_decided(tmp_path: Path) -> None:
    async with consoled(tmp_path) as running:
        for number in range(6):
            await running.ask(number, **{"x-request-id": f"asked-{number}"})
        data = await running.data()
        before = data["decided_until_s"]
        await running.ask(6, **{"x-request-id": "asked-6"})
        url = f"{running.url}/console/data?after={before}"
        async with running.session.get(url) as response:
            later = await response.json()
        wrong = [
            await running.status(f"/console/data?after={text}")
            for text in ("nan", "inf", "-1", "x", "")
        ]

    (pool,) = data["pools"]
    assert (pool["pool"], pool["requests"], pool["recent_errors"]) == ("chat", 6, 0)
    workers = {worker["id"]: worker for worker in data["workers"]}
    assert list(workers) == ["w0", "w1"]
    (holder,) = (worker for worker in data["workers"] if worker["blocks"])
    assert holder["blocks"]["gpu"] == pool["blocks"]
    assert holder["hit_tokens"] == data["fleet"]["hit_tokens"] > 0
    assert [row["request_id"] for row in data["decisions"]] == [
        f"asked-{number}" for number in range(5, -1, -1)
    ]
    newest = data["decisions"][0]
    assert newest["reason"] == "longest_prefix"
    assert newest["observed_hit_tokens"] == newest["predicted_hit_tokens"] > 0
    (document,) = data["documents"]["documents"]
    assert (document["id"], document["copies"][0]["worker"]) == ("handbook", holder["id"])
    assert data["worth"]["pools"][0]["pool"] == "chat"
    assert not [row for row in data["alerts"]["active"] if row["state"] == "firing"]
    assert [row["request_id"] for row in later["decisions"]] == ["asked-6"]
    assert wrong == [400, 400, 400, 400, 400]


async def test_no_text_of_prompts_and_no_key_is_in_it(tmp_path: Path) -> None:
    async with consoled(tmp_path) as running:
        for number in range(3):
            await running.ask(number, "CANARY-DOCUMENT", authorization="Bearer sk-CANARY-KEY")
        text = orjson.dumps(await running.data()).decode()
    # The name of a document is what operators know it by; its text is not.
    assert "section" not in text
    assert "Question" not in text
    assert "CANARY-KEY" not in text


def test_the_last_decisions_are_kept_and_no_more() -> None:
    decisions, last = Decisions(), MAX_DECISIONS + 49
    for number in range(last + 1):
        decisions.add(float(number), record(number))
    decisions.add(float(last), record(pool="", outcome="refused"))
    rows = decisions.rows()
    assert len(rows) == MAX_DECISIONS
    assert rows[0]["request_id"] == f"r{last}"
    assert decisions.requests == {"chat": last + 1}
    assert len(decisions.rows(last - 3.0)) == 3
    decisions.add(last + 1.0, record(model="m" * 10_000, outcome="failed"))
    assert len(decisions.rows()[0]["model"]) == MAX_CHARS
    assert decisions.errors == {"chat": 1}


async def test_two_processes_are_one_in_it(tmp_path: Path) -> None:
    async with consoled(tmp_path) as one, consoled(tmp_path) as other:
        for number in range(3):
            await one.ask(number)
        for number in range(2):
            await other.ask(number)
        documents = [await one.data(), await other.data()]
    merged = merge_console(documents, is_reloaded=False)
    assert merged["processes"] == 2
    assert merged["pools"][0]["requests"] == 5
    assert len(merged["workers"]) == 2
    assert len(merged["decisions"]) == 5
    times = [row["at_unix_s"] for row in merged["decisions"]]
    assert times == sorted(times, reverse=True)
    assert merged["decided_until_s"] == documents[0]["decided_until_s"]
    hit_tokens = [document["fleet"]["hit_tokens"] for document in documents]
    assert merged["fleet"]["hit_tokens"] == sum(hit_tokens)
    held = [sum(w["hit_tokens"] or 0 for w in d["workers"]) for d in (*documents, merged)]
    assert held[0] + held[1] == held[2]
    (alert,) = merged["alerts"]["active"]
    assert (alert["alert"], alert["state"]) == ("WarmlaneConfigReloadFailed", "firing")
    # The page reads nothing that one process would not have told.
    assert set(merged) == set(documents[0])
    assert {*merged["workers"][0]} == {*documents[0]["workers"][0]}


async def test_several_processes_answer_it_on_one_port(tmp_path: Path, valkey: Valkey) -> None:
    async with openai_engine() as engine, serving(tmp_path, valkey, engine.url) as gateway:
        for _ in range(20):
            assert (await gateway.ask()).status_code == 200
        page = await gateway.get("/console")
        found: dict[str, Any] = {}

        async def is_told() -> bool:
            answer = await gateway.get("/console/data")
            assert answer.status_code == 200
            found.update(answer.json())
            return len(found["decisions"]) == 20

        await poll_until(is_told, what="all decisions")
        assert (await gateway.get("/console/data?after=x")).status_code == 400
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert found["processes"] == 2
    assert found["pools"][0]["requests"] == 20
