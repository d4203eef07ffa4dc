"""The support bundle: all that can be had, nothing that must not leave, for its owner alone."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import stat
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from gateway.doctor.redact import Redactor
from tests.fakes.engine import RawEngine, openai_engine
from tests.gateway.routing_parts import H100
from tests.gateway.tenancy_parts import CHAT, KEYS, asking, bearer, serving
from tests.gateway.test_supervisor import serving as supervised
from tests.gateway.test_usage import respond
from tests.gateway.worth_parts import Fixed
from tests.support import free_port
from tests.valkey import Valkey, valkey

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["valkey"]

CANARIES = {name: f"CANARY-{name}-{'x' * 24}" for name in ("K1", "SALT", "ADMIN")}
PROMPT, DOCUMENT, SESSION, PASSWORD = (
    f"CANARY-{name}" for name in ("PROMPT", "DOCUMENT", "SESSION", "PASSWORD")
)
ALL = (*CANARIES.values(), PROMPT, DOCUMENT, SESSION, PASSWORD)
TENANT = {"name": "t1", "key_env": "K1", "isolate_cache": True}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (KEYS | CANARIES).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WARMLANE_ADMIN_TOKEN", CANARIES["ADMIN"])


async def doctor(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "warmlane", "doctor", *args]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive.getmembers():
            content = archive.extractfile(entry)
            assert content is not None
            found[entry.name.removeprefix("warmlane-bundle/")] = content.read()
        return found


def uncompressed(path: Path) -> bytes:
    """Return all bytes of the archive: names and heads too."""
    return gzip.decompress(path.read_bytes())


async def test_a_bundle_has_everything_but_keys_prompts_and_names(
    tmp_path: Path, smollm2_dir: Path
) -> None:
    target = tmp_path / "bundle.tar.gz"
    local = tmp_path / "warmlane.yaml"
    local.write_text(
        "index: {backend: redis, url: 'redis://user:" + PASSWORD + "@10.0.0.1:6379/0'}\n"
        "pools: [{name: chat, models: [m], workers: [{id: w0, url: 'http://10.0.0.2:1'}]}]\n"
    )
    config: dict[str, Any] = {
        "server": {"access": {"admin_token_env": "ADMIN"}},
        "tenants": [TENANT],
        "security": {"salt_secret_env": "SALT"},
        "telemetry": {"log_prompts": True},
    }
    system = {"role": "system", "content": f"{PROMPT} rules the house. " * 60}
    async with (
        RawEngine(respond) as engine,
        serving(engine, pool={"tokenizer": str(smollm2_dir), "block_size": 16}, **config) as gw,
    ):
        for worker in gw.gateway.fleet.pools[0].workers.values():
            worker.learner = Fixed(H100)  # so that what is reused has a price, and a row
        for n in range(6):
            text = f"{PROMPT} asks on 2026-11-30T10:0{n}:11Z what is {n}"
            user = {"role": "user", "content": text}
            # The clock in front spoils the prefix, so that the miss report has something to say.
            clock = {"role": "system", "content": f"It is 10:0{n}:59. {system['content']}"}
            body = asking(text, messages=[clock, user], warmlane={"documents": [{"id": DOCUMENT}]})
            names = {"x-session-id": SESSION, "x-document-id": DOCUMENT}
            status, _, _ = await gw.post(CHAT, body, bearer(CANARIES["K1"]) | names)
            assert status == 200
        await gw.gateway.misses.settled()
        _, told, _ = await gw.get("/admin/v1/documents", bearer(CANARIES["ADMIN"]))
        done = await doctor(
            *("--bundle", str(target), "--gateway", gw.url, "--config", str(local), "--json")
        )

    assert done.returncode == 0, done.stderr
    assert DOCUMENT in json.dumps(told), "or nothing had to be taken out"
    content = uncompressed(target)
    assert [canary for canary in ALL if canary.encode() in content] == []
    assert [canary for canary in ALL if canary in done.stdout + done.stderr] == []
    found = members(target)
    manifest = json.loads(found["manifest.json"])
    assert manifest["missing"] == {}
    assert json.loads(done.stdout)["files"] == manifest["files"]
    for name in ("workers", "index", "worth", "misses", "documents", "usage", "config", "console"):
        assert json.loads(found[f"{name}.json"]), name
    assert "# TYPE warmlane_requests_total counter" in found["metrics.txt"].decode()
    assert json.loads(found["versions.json"])["packages"]["warmlane"]
    assert "redis://***@10.0.0.1:6379/0" in found["config-local.json"].decode()
    # The last decisions are there, and still say who served what.
    assert b'"reason"' in found["console.json"]
    assert b'"w0"' in found["console.json"]
    # One name has one replacement.
    (row,) = [r for r in json.loads(found["documents.json"])["documents"] if r["id"]]
    assert row["id"].startswith("name-")


async def test_several_processes_are_bundled_and_gone_through_as_one(
    tmp_path: Path, valkey: Valkey
) -> None:
    target = tmp_path / "b.tar.gz"
    async with openai_engine() as engine, supervised(tmp_path, valkey, engine.url) as gw:
        for _ in range(12):
            assert (await gw.ask()).status_code == 200
        bundled = await doctor("--bundle", str(target), "--gateway", gw.url)
        listed = await doctor("--checklist", "--json", "--gateway", gw.url)

    assert bundled.returncode == 0, bundled.stderr
    found = members(target)
    assert json.loads(found["usage.json"])["totals"]["requests"] == 12
    assert b"warmlane_processes 2" in found["metrics.txt"]
    lines = {line["name"]: line for line in json.loads(listed.stdout)["lines"]}
    assert lines["metrics"]["status"] == "pass", lines["metrics"]
    assert lines["cache_aware_routing"]["is_known"]


async def test_without_a_gateway_it_has_what_is_here_and_says_what_is_not(tmp_path: Path) -> None:
    target, local = tmp_path / "b.tar.gz", tmp_path / "broken.yaml"
    local.write_text("pools: [{name: 5}]\n")
    gateway = f"http://127.0.0.1:{free_port()}"
    done = await doctor("--bundle", str(target), "--gateway", gateway, "--config", str(local))

    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == str(target)
    found = members(target)
    manifest = json.loads(found["manifest.json"])
    assert set(found) == {"manifest.json", "versions.json"}
    missing = {"workers.json", "metrics.txt", "config.json", "config-local.json", "health.txt"}
    assert missing <= set(manifest["missing"])
    assert "no answer" in manifest["missing"]["workers.json"]
    assert "broken.yaml:1" in manifest["missing"]["config-local.json"]
    assert "missing: workers.json" in done.stderr


async def test_it_is_its_owners_alone_and_overwrites_nothing(tmp_path: Path) -> None:
    target = tmp_path / "b.tar.gz"
    gateway = f"http://127.0.0.1:{free_port()}"
    before = os.umask(0)
    try:
        await doctor("--bundle", str(target), "--gateway", gateway)
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600

    first = target.read_bytes()
    again = await doctor("--bundle", str(target), "--gateway", gateway)
    assert again.returncode == 1
    assert "File exists" in again.stderr
    assert target.read_bytes() == first
    nowhere = await doctor("--bundle", str(tmp_path / "no" / "b.tar.gz"), "--gateway", gateway)
    assert (nowhere.returncode, nowhere.stdout) == (1, "")


@pytest.mark.parametrize(
    "args",
    [
        ("--checklist", "--bundle"),
        ("somewhere.tar.gz",),
        ("--config", "f.yaml"),
        ("--prometheus", "http://127.0.0.1:1"),
    ],
)
async def test_what_does_not_go_together_is_a_usage_error(args: tuple[str, ...]) -> None:
    assert (await doctor(*args)).returncode == 2


async def test_a_checklist_needs_a_gateway() -> None:
    done = await doctor("--checklist", "--gateway", f"http://127.0.0.1:{free_port()}")

    assert (done.returncode, done.stdout) == (1, "")
    assert "no answer" in done.stderr


def test_names_and_texts_are_replaced_wherever_they_stand() -> None:
    redactor = Redactor(b"of this bundle")
    document = {
        "documents": [{"id": "a.pdf", "document": "h1", "version": "7", "copies": [{"id": "w0"}]}],
        "workers": [{"id": "w0", "url": "http://u:p@w0", "divergence": {"text": "secret"}}],
        "by": [{"document": "document:a.pdf"}, {"document": ""}],
        "advice": [{"text": "Do this.", "tenant": "acme"}],
        "segments": [{"volatile": [{"text_hint": "10:02"}]}],
        "n": None,
    }
    found = redactor.document(document)
    text = json.dumps(found)

    assert [word for word in ("a.pdf", "secret", "u:p", "10:02") if word in text] == []
    assert found["workers"][0]["id"] == "w0"
    assert found["advice"] == document["advice"], "that text is ours"
    assert found["by"][1]["document"] == ""
    assert found["documents"][0]["id"] == redactor.name("a.pdf")
    assert Redactor(b"of another").name("a.pdf") != redactor.name("a.pdf")
