"""Another configuration for a gateway that runs: nothing is dropped, nothing is half applied."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import structlog
import yaml
from structlog.testing import capture_logs

from gateway.proxy.server import Listener
from gateway.reload.changes import merged
from gateway.reload.reloader import ConfigFile, Reloader
from gateway.serve import Gateway
from gateway.settings import ConfigError, load
from tests.fakes.engine import RawEngine, answer, content, openai_engine, stream
from tests.fakes.gateway import chat
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from gateway.config import Settings

    Start = Callable[..., AbstractAsyncContextManager["Running"]]


def document(url: str = "http://127.0.0.1:1", **sections: Any) -> dict[str, Any]:
    pool = {"name": "chat", "models": ["m"], "workers": [{"id": "w0", "url": url}]}
    return {"server": {"host": "127.0.0.1"}, "pools": [pool], **sections}


def settings_of(document: dict[str, Any]) -> Settings:
    from gateway.config import Settings

    return Settings.model_validate(document)


def with_pool(document: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**document, "pools": [{**document["pools"][0], **more}]}


FIXED: list[tuple[dict[str, Any], str]] = [
    (document(server={"port": 1}), "server.port"),
    (document(server={"host": "0.0.0.0"}), "server.host"),  # noqa: S104
    (document(server={"admin_port": 1}), "server.admin_port"),
    (
        document(server={"admin_port": 1, "admin_tls": True, "tls": {"cert": "c", "key": "k"}}),
        "server.admin_tls",
    ),
    (document(server={"front": "raw"}), "server.front"),
    (document(server={"drain_s": 1}), "server.drain_s"),
    (document(server={"access": {"admin_token_env": "X"}}), "server.access.admin_token_env"),
    (document(routing={"seed": 1}), "routing.seed"),
    (document(index={"max_blocks": 1}), "index"),
    (document(telemetry={"log_level": "error"}), "telemetry"),
    (with_pool(document(), engine="vllm"), "pools[chat].engine"),
    (with_pool(document(), tokenizer="elsewhere"), "pools[chat].tokenizer"),
    (with_pool(document(), block_size=32), "pools[chat].block_size"),
    (with_pool(document(), canonicalize={"mode": "off"}), "pools[chat].canonicalize"),
    (with_pool(document(), keep_warm={"enabled": True}), "pools[chat].keep_warm"),
    (with_pool(document(), models=["n", "m"]), "pools[chat].models"),
]


@pytest.mark.parametrize(("new", "name"), FIXED, ids=[name for _, name in FIXED])
def test_what_cannot_change_keeps_its_value_and_is_named(new: dict[str, Any], name: str) -> None:
    old = settings_of(document(server={"host": "127.0.0.1", "front": "aiohttp"}))
    new["server"] = {"host": "127.0.0.1", "front": "aiohttp", **new["server"]}
    settings, kept = merged(old, settings_of(new))
    assert name in kept
    assert settings == old
    assert merged(settings, settings_of(new)) == (settings, kept)


CHANGING: list[dict[str, Any]] = [
    document(server={"limits": {"head_s": 1}}),
    document(server={"max_body_mb": 1}),
    document(server={"access": {"trusted_peers": ["10.0.0.1"]}}),
    document(routing={"mode": "observe", "share": 10, "max_wait_s": 9}),
    document(routes=[{"match": {"tenant": "a"}, "pool": "chat"}]),
    document(tenants=[{"name": "a", "weight": 3}]),
    with_pool(document(), models=["m", "n"], aliases={"x": "n"}),
    with_pool(document(), workers=[]),
    with_pool(document(), discovery={"type": "file", "path": "x"}),
    with_pool(document(), affinity={"set_size": 3}, offload={"max_offload_tokens": 7}),
    with_pool(document(), admission={"max_queue": 5}, retry={"attempts": 3}),
]


@pytest.mark.parametrize("new", CHANGING, ids=[str(n) for n in range(len(CHANGING))])
def test_everything_else_changes(new: dict[str, Any]) -> None:
    new["server"] = {"host": "127.0.0.1", **new["server"]}
    settings, kept = merged(settings_of(document()), settings_of(new))
    assert kept == []
    assert settings == settings_of(new)


def test_pools_come_and_go_with_a_restart_only() -> None:
    other = {"name": "other", "models": ["n"]}
    old = document()
    new = {**old, "pools": [other, *old["pools"]]}
    settings, kept = merged(settings_of(old), settings_of(new))
    assert (settings, kept) == (settings_of(old), ["pools[other]"])
    settings, kept = merged(settings_of(new), settings_of(old))
    assert (settings, kept) == (settings_of(new), ["pools[other]"])
    turned = {**old, "pools": [*old["pools"], other]}
    assert merged(settings_of(new), settings_of(turned))[1] == ["pools (their order)"]


def test_what_needs_a_new_pool_is_refused_as_a_whole() -> None:
    new = document(routes=[{"match": {"tenant": "a"}, "pool": "other"}])
    new["pools"] = [*new["pools"], {"name": "other", "models": ["m"]}]
    with pytest.raises(ConfigError) as error:
        merged(settings_of(document()), settings_of(new))
    assert "routes.0.pool: there is no pool 'other'" in str(error.value)
    assert "what needs a restart: pools[other]" in str(error.value)


class File:
    """A configuration file and who reads it again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.used: list[Settings] = []
        self.refuses: Exception | None = None
        self.write(document())
        file = ConfigFile(str(path), {("server", "port"): 1234})
        self.reloader = Reloader(file, file.load(), self._use, sleep=lambda _s: asyncio.sleep(0.01))

    async def _use(self, settings: Settings) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.used.append(settings)

    def write(self, what: dict[str, Any] | str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(what if isinstance(what, str) else yaml.safe_dump(what))
        os.replace(new, self.path)


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[File]:
    found = File(tmp_path / "warmlane.yaml")
    task = asyncio.create_task(found.reloader.run())
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_changed_file_is_read_once_and_flags_stay_above_it(file: File) -> None:
    file.write(document(routing={"share": 10}))
    await poll_until(lambda: len(file.used) == 1)
    await asyncio.sleep(0.05)
    assert [used.routing.share for used in file.used] == [10]
    assert file.used[0].server.port == 1234


async def test_asked_it_reads_a_file_that_did_not_change(file: File) -> None:
    file.reloader.ask()
    await poll_until(lambda: len(file.used) == 1)


BROKEN = {
    "no YAML": ("pools: [", ":1: not valid YAML"),
    "unknown key": ("serverr: {}\npools: []", ":1: serverr: unknown key"),
    "wrong value": ("pools:\n- name: chat\n  models: [m]\n  weight: x\n", ":4: pools.0.weight"),
    "cross check": (
        "routes: [{pool: x}]\npools:\n- {name: chat, models: [m]}\n",
        ":1: routes.0.pool: there is no pool 'x'",
    ),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN)
async def test_a_broken_file_changes_nothing_and_is_said_in_one_line(
    file: File, text: str, reason: str
) -> None:
    structlog.reset_defaults()
    with capture_logs() as logs:
        file.write(text)
        await poll_until(lambda: file.reloader.num_failures == 1)
        await asyncio.sleep(0.05)
    said = [line for line in logs if line["event"] == "config_reload_failed"]
    assert len(said) == 1
    assert f"{file.path}{reason}" in said[0]["reason"]
    assert not file.reloader.is_last_good
    assert file.used == []
    file.write(document(routing={"share": 10}))
    await poll_until(lambda: len(file.used) == 1)
    assert file.reloader.is_last_good
    assert file.reloader.num_failures == 1


async def test_what_waits_for_a_restart_is_named_counted_and_forgotten_with_its_reason(
    file: File,
) -> None:
    structlog.reset_defaults()
    other = {"name": "embed", "models": ["e"], "workers": [{"id": "e0", "url": "http://x:1"}]}
    more = document(routing={"share": 10})
    with capture_logs() as logs:
        file.write({**more, "pools": [*more["pools"], other]})
        await poll_until(lambda: len(file.used) == 1)
    assert [pool.name for pool in file.used[0].pools] == ["chat"]
    assert file.used[0].routing.share == 10
    assert [(line["log_level"], line["needs_restart"]) for line in logs] == [
        ("warning", ["pools[embed]"])
    ]
    assert file.reloader.kept == ["pools[embed]"]

    # A route to it cannot be had before; nothing of that configuration is.
    routed = {**more, "pools": [*more["pools"], other], "routes": [{"pool": "embed"}]}
    with capture_logs() as logs:
        file.write(routed)
        await poll_until(lambda: file.reloader.num_failures == 1)
    assert "what needs a restart: pools[embed]" in logs[0]["reason"]

    file.write(more)
    await poll_until(lambda: len(file.used) == 2)
    assert file.reloader.kept == []


async def test_a_file_that_vanishes_changes_nothing(file: File) -> None:
    file.path.unlink()
    await poll_until(lambda: file.reloader.num_failures == 1)
    assert file.used == []


async def test_what_cannot_be_used_leaves_the_settings_as_they_were(file: File) -> None:
    before = file.reloader.settings
    file.refuses = ConfigError("tenants[a].key_env: not set")
    file.write(document(routing={"share": 10}))
    await poll_until(lambda: file.reloader.num_failures == 1)
    assert file.reloader.settings is before


class Running:
    """A gateway in this process."""

    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway = gateway
        self.url = url

    async def ask(self, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            return await client.post(self.url + "/v1/chat/completions", json=chat(**more))

    async def use(self, new: dict[str, Any]) -> None:
        settings, _ = merged(self.gateway.settings, settings_of(new))
        await self.gateway.reload(settings)


@pytest.fixture
def start() -> Start:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def running(first: dict[str, Any]) -> AsyncIterator[Running]:
        settings, _ = load(None, flags={(name,): part for name, part in first.items()}, environ={})
        gateway = Gateway(settings)
        await gateway.start()
        listener = await Listener.start(gateway.app, "127.0.0.1", 0, front=settings.server.front)
        yield Running(gateway, f"http://127.0.0.1:{listener.port}")
        await listener.stop(1.0)
        await gateway.close()

    return running


@pytest.mark.parametrize("front", ["aiohttp", "raw"])
async def test_a_stream_goes_on_while_its_worker_route_and_pool_change(
    start: Start, front: str
) -> None:
    go_on = asyncio.Event()

    def respond(seen: Any) -> Any:
        if seen.method == "POST":
            return stream(content("a"), go_on, content("b", "stop"), b"data: [DONE]\n\n")
        return answer(b"{}")

    async with RawEngine(respond) as old, openai_engine() as new:
        server = {"host": "127.0.0.1", "front": front}
        async with (
            start(document(old.url, server=server)) as running,
            httpx.AsyncClient(timeout=10, trust_env=False) as client,
            client.stream(
                "POST", running.url + "/v1/chat/completions", json=chat(stream=True)
            ) as streaming,
        ):
            lines = streaming.aiter_lines()
            assert '"a"' in await anext(lines)
            changed = document(
                server={**server, "limits": {"idle_s": 1}},
                routes=[{"match": {"tenant": "t"}, "pool": "chat"}],
                routing={"mode": "least_load"},
            )
            more = [{"id": "w1", "url": new.url}]
            await running.use(with_pool(changed, workers=more, aliases={"x": "m"}))
            assert (await running.ask(model="x")).status_code == 200
            assert [seen.method for seen in new.seen].count("POST") == 1
            go_on.set()
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert '"b"' in rest[0]


async def test_each_change_counts_from_the_next_request_on(start: Start) -> None:
    async with openai_engine() as engine, start(document(engine.url)) as running:
        assert (await running.ask(model="x")).status_code == 404
        await running.use(with_pool(document(engine.url), aliases={"x": "m"}))
        assert (await running.ask(model="x")).status_code == 200
        await running.use(with_pool(document(engine.url), workers=[]))
        assert (await running.ask()).status_code == 503
        small = document(engine.url, server={"host": "127.0.0.1", "max_body_mb": 1})
        await running.use(small)
        long = [{"role": "user", "content": "x" * (1 << 21)}]
        assert (await running.ask(messages=long)).status_code == 413
        await running.use(document(engine.url))
        assert (await running.ask(messages=long)).status_code == 200
        dispatcher = running.gateway.dispatcher
        tenants = [{"name": "a", "weight": 7, "priority": 2}]
        routing = {"mode": "observe", "share": 5, "max_wait_s": 9}
        changed = document(engine.url, tenants=tenants, routing=routing)
        await running.use(with_pool(changed, admission={"max_queue": 3}, retry={"attempts": 5}))
        assert dispatcher.gate.standings["a"].weight == 7
        assert (dispatcher.rollout.mode, dispatcher.rollout.share) == ("observe", 5)
        assert dispatcher.gate.max_wait_s == 9
        pool = dispatcher.pools["chat"]
        assert pool.max_queue == 3
        assert pool.retry is not None
        assert pool.retry.attempts == 5


async def test_a_key_that_is_missing_changes_nothing_at_all(start: Start) -> None:
    async with openai_engine() as engine, start(document(engine.url)) as running:
        before = running.gateway.settings
        new = with_pool(document(tenants=[{"name": "a", "key_env": "WL_NOT_SET"}]), workers=[])
        with pytest.raises(ConfigError):
            await running.use(new)
        assert running.gateway.settings is before
        assert (await running.ask()).status_code == 200


async def test_what_was_discovered_stays_until_another_source_has_answered(
    start: Start, tmp_path: Path
) -> None:
    async with openai_engine() as first, openai_engine() as second:
        files = []
        for name, engine in (("one", first), ("two", second)):
            path = tmp_path / name
            path.write_text(json.dumps([{"id": name, "url": engine.url}]))
            files.append({"type": "file", "path": str(path)})
        base = with_pool(document(), workers=[])
        async with start(with_pool(base, discovery=files[0])) as running:
            pool = running.gateway.fleet.pools[0]
            assert list(pool.workers) == ["one"]
            await running.use(with_pool(base, discovery=files[1]))
            assert list(pool.workers) == ["one"]
            await poll_until(lambda: list(pool.workers) == ["two"])
            await running.use(base)
            assert list(pool.workers) == []
