"""``warmlane doctor``: three faulty clients on real sockets, and every finding about workers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from gateway.client import NotThereError
from gateway.doctor.diagnosis import ask, diagnose
from gateway.doctor.table import table
from gateway.misses.causes import ADVICE, Cause
from tests.fakes.engine import RawEngine
from tests.gateway.doctor_parts import CachingEngine, running_gateway
from tests.gateway.miss_parts import HANDBOOK, TEMPLATE, message, tool
from tests.gateway.routing_parts import BLOCK
from tests.support import poll_until

if TYPE_CHECKING:
    from pathlib import Path

TOTALS = {
    "requests": 10,
    "prompt_tokens": 10_000,
    "hit_tokens": 5000,
    "requests_with_loss": 0,
    "tokens_lost": 0,
    "compared": 10,
    "not_compared": 0,
    "failed": 0,
    "window_s": 600.0,
}
NO_MISSES: dict[str, Any] = {"causes": [], "totals": TOTALS}
TOOLS = [tool(name) for name in ("search_docs", "read_file", "create_ticket", "send_mail")]
RULES = "Orders: " + HANDBOOK.replace("refunds", "orders")
GUIDE = "Travel: " + HANDBOOK.replace("refunds of class", "trips of kind")


async def doctor(url: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmlane", "doctor", "--gateway", url, *args]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )


def clock_client(n: int) -> dict[str, Any]:
    """Prints the minute before its handbook."""
    system = f"You are a support bot. It is 2026-11-30 10:{n + 10}. {HANDBOOK}"
    return {"messages": [message("system", system), message("user", f"Refund {n}?")]}


def flipping_client(n: int) -> dict[str, Any]:
    """Sends its last tools in an order of its own each time."""
    tools = TOOLS if n % 2 == 0 else [TOOLS[0], *reversed(TOOLS[1:])]
    messages = [message("system", RULES), message("user", f"Order {n}?")]
    return {"messages": messages, "tools": tools}


def trimming_client(n: int) -> dict[str, Any]:
    """Keeps the last twelve turns, so that each turn drops one from the front."""
    messages = [message("system", GUIDE)]
    for turn in range(n, n + 12):
        messages.append(message("user", f"Where do I go on day {turn}, and what is there to see?"))
        messages.append(message("assistant", f"On day {turn} the train goes to town {turn * 3}."))
    messages.append(message("user", f"And on day {n + 12}?"))
    return {"messages": messages}


def healthy_client(n: int) -> dict[str, Any]:
    """Asks about one text in one way."""
    text = "Garden: " + HANDBOOK.replace("refunds of class", "plants of kind")
    return {"messages": [message("system", text), message("user", f"Plant {n}?")]}


async def test_three_faulty_clients_are_named_with_what_they_lose(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    rounds, fake = 6, CachingEngine()
    faulty = {
        "datetime": clock_client,
        "tool_order": flipping_client,
        "history_trimmed": trimming_client,
    }
    missed = dict.fromkeys([*faulty, "healthy"], 0)
    async with (
        RawEngine(fake.respond) as engine,
        running_gateway(
            engine.url,
            engine="vllm",
            tokenizer=str(smollm2_dir),
            template=str(tmp_path / "template.jinja"),
        ) as gateway,
    ):
        fake.reader = gateway.fleet.pools[0].reader
        for n in range(rounds):
            for name, client in {**faulty, "healthy": healthy_client}.items():
                body = {"model": "m", **client(n)}
                status, _ = await gateway.post("/v1/chat/completions", body)
                assert status == 200
                if n:
                    missed[name] += fake.missed_tokens[-1]
        await gateway.report.settled()
        done = await doctor(gateway.url, "--json")
        shown = await doctor(gateway.url)

    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    rows = {row["cause"]: row for row in found["causes"]}
    assert set(rows) == set(faulty)
    # The engine counted what it had to compute; new is only what each client changed and asked,
    # and a block around each place where known text begins or ends.
    new = {"datetime": 2 * BLOCK, "tool_order": 5 * BLOCK, "history_trimmed": 5 * BLOCK}
    requests = {"datetime": rounds - 1, "tool_order": 1, "history_trimmed": rounds - 1}
    for name, row in rows.items():
        assert row["requests"] == requests[name], name
        lost = missed[name]
        assert lost - requests[name] * new[name] <= row["tokens_lost"] <= lost, name
        assert row["advice"] == ADVICE[Cause(name)]
    assert rows["datetime"]["segment"] == "system"
    assert rows["tool_order"]["example"]["place"] == "tools[1]"
    assert rows["history_trimmed"]["example"]["place"] == "messages[1]"
    assert found["totals"]["tokens_lost"] == sum(row["tokens_lost"] for row in rows.values())
    assert found["findings"] == []
    tokens = [row["tokens_lost"] for row in found["causes"]]
    assert tokens == sorted(tokens, reverse=True)
    # The table: the most expensive cause first, each with what to do.
    assert shown.returncode == 3
    lines = [line for line in shown.stdout.splitlines() if line]
    names = [row["cause"] for row in found["causes"]]
    assert [name for line in lines for name in line.split() if name in rows] == names
    for row in found["causes"]:
        assert f"{row['tokens_lost']:,}" in shown.stdout
        assert row["advice"] in shown.stdout
    assert shown.stderr == ""


async def test_a_healthy_gateway_exits_with_0(smollm2_dir: Path) -> None:
    fake = CachingEngine()
    async with (
        RawEngine(fake.respond) as engine,
        running_gateway(engine.url, engine="vllm", tokenizer=str(smollm2_dir)) as gateway,
    ):
        fake.reader = gateway.fleet.pools[0].reader
        for n in range(3):
            await gateway.post("/v1/chat/completions", {"model": "m", **healthy_client(n)})
        await gateway.report.settled()
        done = await doctor(gateway.url)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("Nothing to mend.\n")


async def test_a_worker_with_another_template_is_found(smollm2_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("user", "human") + "\n\n")
    fake = CachingEngine()
    async with (
        running_gateway(
            "http://127.0.0.1:1",
            engine="vllm",
            tokenizer=str(smollm2_dir),
            template=str(tmp_path / "template.jinja"),
        ) as other,
        RawEngine(fake.respond) as engine,
    ):
        fake.reader = other.fleet.pools[0].reader
        async with running_gateway(
            engine.url, engine="vllm", tokenizer=str(smollm2_dir)
        ) as gateway:
            parity = gateway.fleet.parities["w0"]
            await poll_until(lambda: parity.result != -1, what="a verdict")
            body = {"model": "m", **healthy_client(0)}
            status, _ = await gateway.post("/v1/chat/completions", body)
            explained = await gateway.post("/admin/v1/explain", body)
            done = await doctor(gateway.url, "--json")
            (worker,) = (await gateway.get("/admin/v1/workers"))["workers"]

    assert status == 200
    assert explained[1]["candidates"][0]["mode"] == "text"
    assert (worker["mode"], worker["parity"]) == ("text", 0)
    assert worker["divergence"]["position"] >= 0
    assert done.returncode == 3
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["kind"], finding["subject"]) == ("parity_diverged", "worker w0")
    assert "at token" in finding["what"]


def worker_row(**changes: Any) -> dict[str, Any]:
    row = {
        "id": "w0",
        "url": "http://h:1",
        "pool": "chat",
        "mode": "exact",
        "blocks": {"gpu": 100},
        "state": "ready",
        "ready": True,
        "block_size": 16,
        "pool_block_size": 16,
        "parity": 1,
        "divergence": None,
        "has_events": True,
        "gaps": 0,
        "decode_errors": 0,
    }
    return row | changes


def pool_row(**changes: Any) -> dict[str, Any]:
    row = {
        "pool": "chat",
        "engine": "vllm",
        "reads_prompts": True,
        "block_size": 16,
        "blocks": 100,
        "max_blocks": 1000,
        "unread_prompts": {},
    }
    return row | changes


def worth_row(**changes: Any) -> dict[str, Any]:
    row = {
        "pool": "chat",
        "verdict": "no",
        "requests": 100.0,
        "reuse_count": 80.0,
        "shared_prefix_tokens": 4096.0,
        "recompute_s": 0.2,
        "restore_s": 0.8,
        "reuse_gain_s": -0.605,
        "saved_s": -48.0,
        "store_s": 2.0,
        "eviction_s": 0.0,
        "is_measured": True,
    }
    return row | changes


def worth_report(*pools: dict[str, Any], advice: list[dict[str, Any]] | None = None) -> Any:
    tenants = [{"tenant": "acme"} | row for row in pools]
    return {"pools": list(pools), "tenants": tenants, "documents": [], "advice": advice or []}


WORKERS = {
    "apart": {"is_apart": True, "differences": ["w0: weights is 'a', most of its pool has 'b'"]},
    "kv_events_mismatch": {
        "event_health": "kv_events_mismatch",
        "event_why": "not of the prompts that are sent there",
        "mode": "approximate",
    },
    "not_ready": {"ready": False},
    "no_events": {"mode": "approximate"},
    "parity_diverged": {"parity": 0},
    "event_gaps": {"gaps": 2},
    "decode_errors": {"decode_errors": 1},
    "block_size": {"block_size": 24},
}
POOLS = {
    "no_tokenizer": {"reads_prompts": False, "block_size": None, "blocks": 0, "max_blocks": None},
    "unread_prompts": {"unread_prompts": {"TemplateRefusedError": 3}},
    "index_full": {"blocks": 960},
    "shared_index_down": {"shared": {"is_up": False, "down_s": 4.0}},
}


@pytest.mark.parametrize(("kind", "changes"), WORKERS.items(), ids=WORKERS)
def test_each_fault_of_a_worker_is_a_finding(kind: str, changes: dict[str, Any]) -> None:
    diagnosis = diagnose([worker_row(**changes)], [pool_row()], {"causes": [], "totals": TOTALS})

    assert [(f.kind, f.subject) for f in diagnosis.findings] == [(kind, "worker w0")]
    assert not diagnosis.is_healthy
    assert diagnosis.findings[0].advice in table(diagnosis)


@pytest.mark.parametrize(("kind", "changes"), POOLS.items(), ids=POOLS)
def test_each_fault_of_a_pool_is_a_finding(kind: str, changes: dict[str, Any]) -> None:
    diagnosis = diagnose([worker_row()], [pool_row(**changes)], {"causes": [], "totals": TOTALS})

    assert [(f.kind, f.subject) for f in diagnosis.findings] == [(kind, "pool chat")]


HARMLESS = {
    "events that are believed": {"event_health": "ok", "event_why": None, "is_apart": False},
    "as it should be": {},
    "no events configured": {"mode": "approximate", "has_events": False, "gaps": None},
    "a block size nobody told": {"block_size": None},
    "blocks of several of the pool's": {"block_size": 528},
    "parity unknown": {"parity": -1},
}


@pytest.mark.parametrize("shared", [None, {}, {"is_up": True, "down_s": None}], ids=str)
def test_a_shared_index_that_is_there_is_no_finding(shared: dict[str, Any] | None) -> None:
    diagnosis = diagnose([worker_row()], [pool_row(shared=shared)], NO_MISSES)

    assert diagnosis.is_healthy


@pytest.mark.parametrize("changes", HARMLESS.values(), ids=HARMLESS)
def test_what_is_harmless_is_no_finding(changes: dict[str, Any]) -> None:
    diagnosis = diagnose([worker_row(**changes)], [pool_row()], {"causes": [], "totals": TOTALS})

    assert diagnosis.is_healthy


TIERED = {"blocks": {"gpu": 100, "cpu": 7, "disk": 9}}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (worth_row(), "takes 0.800 s, computing them 0.200 s"),
        (
            worth_row(reuse_count=0.4, restore_s=0.0, recompute_s=0.0, saved_s=0.0),
            "saves 0.00 s an hour and costs 2.00 s",
        ),
    ],
    ids=["slower than computing", "never asked for again"],
)
def test_a_tier_that_is_used_and_loses_time_is_a_finding(row: dict[str, Any], said: str) -> None:
    diagnosis = diagnose([worker_row(**TIERED)], [pool_row()], NO_MISSES, worth_report(row))

    (finding,) = diagnosis.findings
    assert (finding.kind, finding.subject) == ("offload_not_worth", "pool chat")
    assert said in finding.what
    assert "cpu and disk" in finding.what
    assert not diagnosis.is_healthy
    assert diagnosis.to_json()["worth"]["pools"] == [row]


@pytest.mark.parametrize(
    ("row", "worker"),
    [
        (worth_row(), {"blocks": {"gpu": 100}}),
        (worth_row(verdict="yes"), TIERED),
        (worth_row(verdict="unknown", is_measured=False), TIERED),
        (worth_row(pool="other"), TIERED),
    ],
    ids=["no tier in use", "worth it", "not known", "another pool"],
)
def test_what_a_tier_is_worth_is_shown_without_being_a_fault(
    row: dict[str, Any], worker: dict[str, Any]
) -> None:
    advice = {"kind": "separate_pool", "text": "A pool of its own may help."}
    report = worth_report(row, advice=[advice])
    diagnosis = diagnose([worker_row(**worker)], [pool_row()], NO_MISSES, report)

    assert diagnosis.is_healthy
    shown = table(diagnosis)
    assert "worth it" in shown
    assert f"pool {row['pool']}" in shown
    assert f"tenant acme in {row['pool']}" in shown
    assert ("800 ms?" in shown) is not row["is_measured"]
    assert advice["text"] in shown


def test_whose_cache_is_worth_least_is_shown_and_is_no_fault() -> None:
    advice = {"kind": "scale_down", "pool": "chat", "worker": "w1", "text": "w1 is missed least."}
    report = worth_report(worth_row(verdict="yes")) | {"scale_down": [advice]}
    diagnosis = diagnose([worker_row()], [pool_row()], NO_MISSES, report)

    assert diagnosis.is_healthy
    assert advice["text"] in table(diagnosis)
    assert diagnosis.to_json()["worth"]["scale_down"] == [advice]


async def test_a_gateway_without_a_worth_report_is_diagnosed_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {
        "/admin/v1/workers": {"workers": [worker_row()]},
        "/admin/v1/index": {"pools": [pool_row()]},
        "/admin/v1/misses": NO_MISSES,
    }

    def get(_base: str, path: str, _token: str | None) -> Any:
        if path not in answers:
            raise NotThereError(path)
        return answers[path]

    monkeypatch.setattr("gateway.doctor.diagnosis.get_json", get)
    diagnosis = ask("http://old", None)

    assert diagnosis.is_healthy
    assert diagnosis.worth is None
    assert "worth" not in table(diagnosis)


@pytest.mark.parametrize(("lost", "ok"), [(99, True), (100, False)])
def test_a_loss_in_passing_is_shown_and_is_no_reason_to_act(lost: int, ok: bool) -> None:
    row = {
        "cause": "not_cached",
        "segment": "cache",
        "tokens_lost": lost,
        "requests": 1,
        "share": 1.0,
        "example": {"place": "", "char": None, "token": 0},
        "advice": "Add capacity.",
    }
    diagnosis = diagnose([], [], {"causes": [row], "totals": TOTALS})

    assert diagnosis.is_healthy is ok
    assert "not_cached" in table(diagnosis)
    assert ("Nothing to mend." in table(diagnosis)) is ok


async def test_no_gateway_exits_with_1() -> None:
    done = await doctor("http://127.0.0.1:1")

    assert (done.returncode, done.stdout) == (1, "")
    assert "no answer from the gateway" in done.stderr
