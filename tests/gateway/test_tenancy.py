"""API keys, where they come from, what they open, and where they never go."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import TenantConfig
from gateway.settings import ConfigError, describe, load, redacted
from gateway.tenancy import keyring as keyring_module
from gateway.tenancy.keyring import Keyring
from gateway.tenancy.keys import (
    MAX_FILE_BYTES,
    KeysError,
    KeyTable,
    digest_of,
    keys_in_file,
    keys_in_variable,
)
from tests.fakes.engine import RawEngine
from tests.gateway.tenancy_parts import (
    CHAT,
    KEYS,
    T1,
    T2,
    asking,
    bearer,
    respond,
    sent,
    serving,
)
from tests.support import poll_until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def hex_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


# Reading keys.


def test_a_variable_holds_keys_and_hashes_of_keys() -> None:
    environ = {"K": f"one, two ,sha256:{hex_of('three')},"}

    assert keys_in_variable("K", environ) == {digest_of(key) for key in (b"one", b"two", b"three")}


@pytest.mark.parametrize("value", [None, "", " , ", "sha256:12", "ok,sha256:" + "g" * 64])
def test_a_variable_without_keys_is_refused_and_its_value_not_shown(value: str | None) -> None:
    environ = {} if value is None else {"K": value}

    with pytest.raises(KeysError) as refused:
        keys_in_variable("K", environ)

    assert "K" in str(refused.value)
    assert "ok" not in str(refused.value)


def test_a_file_holds_a_hash_a_line_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"# of the old team\n{hex_of('one')}  # till May\n\nsha256:{hex_of('two').upper()}\r\n"
    )

    assert keys_in_file(str(path)) == {digest_of(b"one"), digest_of(b"two")}


BROKEN_FILES = {
    "a key itself": b"sk-secret-key\n",
    "half a hash": b"ab" * 16,
    "two hashes": b"ab" * 32 + b" " + b"cd" * 32,
    "no text": b"\xff\xfe\x00",
    "too long": b"#" * (MAX_FILE_BYTES + 1),
}


@pytest.mark.parametrize("data", BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_any_other_file_is_refused_and_its_lines_not_shown(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(data)

    with pytest.raises(KeysError) as refused:
        keys_in_file(str(path))

    assert str(path) in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "ab" * 16 not in str(refused.value)


@given(st.dictionaries(st.sampled_from("abc"), st.sets(st.binary(max_size=20), max_size=5)))
def test_a_key_is_its_tenants_and_nobody_elses(keys: dict[str, set[bytes]]) -> None:
    hashed = {tenant: {digest_of(key) for key in owned} for tenant, owned in keys.items()}
    owners = [key for owned in keys.values() for key in owned]
    if len(set(owners)) != len(owners):
        with pytest.raises(KeysError, match="in common"):
            KeyTable(hashed)
        return
    table = KeyTable(hashed)
    for tenant, owned in keys.items():
        for key in owned:
            assert table.tenant_of(key) == tenant
            # Its hash is not a key.
            assert table.tenant_of(digest_of(key)) is None
            assert table.tenant_of(key + b"x") not in (tenant, *keys) or key + b"x" in owners


# Rotation.


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring_module, "CHECK_S", 0.01)


async def test_keys_in_a_file_change_without_a_restart(tmp_path: Path, fast: None) -> None:
    path = tmp_path / "keys"
    path.write_text(hex_of("old"))
    tenant = {"name": "t1", "keys_file": str(path)}
    async with RawEngine(respond) as engine, serving(engine, tenants=[tenant]) as gw:
        assert (await gw.ask("old"), await gw.ask("new")) == (200, 401)
        path.write_text(f"{hex_of('old')}\n{hex_of('new')}\n")
        keyring = gw.gateway.tenancy.keyring
        await poll_until(lambda: keyring.num_reloads["t1"] == 1, what="it is read again")
        assert (await gw.ask("old"), await gw.ask("new")) == (200, 200)

        # As mounted secrets are replaced: another file under the same name.
        replace(path, hex_of("new").encode())
        await poll_until(lambda: keyring.num_reloads["t1"] == 2, what="it is read again")
        assert (await gw.ask("old"), await gw.ask("new")) == (401, 200)


def replace(path: Path, data: bytes) -> None:
    """Replace a file at once: one seen while it is written is broken in a way of its own."""
    other = path.with_name("other")
    other.write_bytes(data)
    os.replace(other, path)


@pytest.mark.parametrize("broken", [b"sk-secret-key\n", b"\xff", None], ids=repr)
async def test_a_broken_file_leaves_the_keys_as_they_were_and_is_said_once(
    tmp_path: Path, fast: None, broken: bytes | None
) -> None:
    path = tmp_path / "keys"
    path.write_text(hex_of("old"))
    tenant = {"name": "t1", "keys_file": str(path)}
    with structlog.testing.capture_logs() as logs:
        async with RawEngine(respond) as engine, serving(engine, tenants=[tenant]) as gw:
            if broken is None:
                path.unlink()
            else:
                replace(path, broken)
            keyring = gw.gateway.tenancy.keyring
            await poll_until(lambda: keyring.num_errors["t1"] > 3, what="it is seen")
            assert await gw.ask("old") == 200
            _, metrics, _ = await gw.get("/metrics")
            assert b'warmlane_tenant_keys_errors_total{tenant="t1"}' in metrics
            replace(path, hex_of("new").encode())
            await poll_until(lambda: keyring.num_reloads["t1"] == 1, what="it is read again")
            assert (await gw.ask("old"), await gw.ask("new")) == (401, 200)

    said = [line for line in logs if line["event"] == "tenant_keys_not_reloaded"]
    assert len(said) == 1
    assert "secret" not in repr(logs)


async def test_a_key_that_two_tenants_come_to_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(hex_of("one"))
    keyring = Keyring({"K": "two"})
    keyring.reload(
        (TenantConfig(name="a", key_env="K"), TenantConfig(name="b", keys_file=str(path)))
    )
    path.write_text(hex_of("two") + "\n")

    await keyring._look("b", str(path))

    assert keyring.num_errors["b"] == 1
    assert (keyring.table.tenant_of(b"one"), keyring.table.tenant_of(b"two")) == ("b", "a")


WRONG_STARTS: dict[str, dict[str, Any]] = {
    "key_env: the environment variable NOT_THERE": {
        "tenants": [{"name": "t", "key_env": "NOT_THERE"}]
    },
    "keys_file: /not/there": {"tenants": [{"name": "t", "keys_file": "/not/there"}]},
    "have a key in common": {"tenants": [T1, T2 | {"key_env": "K1"}]},
    "salt_secret_env: the environment variable NOT_THERE": {
        "security": {"salt_secret_env": "NOT_THERE"}
    },
    "is shorter": {"security": {"salt_secret_env": "K1"}},
    "api_key_env: the environment variable NOT_THERE is not set": {
        "pool": {"api_key_env": "NOT_THERE"}
    },
    "needs security.salt_secret_env": {"tenants": [T1 | {"isolate_cache": True}]},
    "takes no cache salt": {
        "tenants": [T1 | {"isolate_cache": True}],
        "security": {"salt_secret_env": "SALT"},
        "pool": {"engine": "openai"},
    },
    "tenants.0.key_env: expected the name of an environment variable": {
        "tenants": [{"name": "t", "key_env": "sk-a-key-itself"}]
    },
}


@pytest.mark.parametrize(("message", "config"), WRONG_STARTS.items(), ids=WRONG_STARTS)
async def test_what_would_not_protect_is_refused_at_start(
    message: str, config: dict[str, Any]
) -> None:
    async with RawEngine(respond) as engine:
        with pytest.raises(ConfigError) as refused:
            async with serving(engine, **config):
                pass

    assert message in str(refused.value)
    for secret in ("key-t1", "sk-a-key-itself"):
        assert secret not in str(refused.value)


# Who gets in.

BAD_KEYS = {
    "none": {},
    "empty": {"authorization": "Bearer "},
    "unknown": bearer("key-t3"),
    "another scheme": {"authorization": "Basic a2V5LXQx"},
    "no scheme": {"authorization": "key-t1"},
    "its hash": bearer(hex_of("key-t1")),
    "with more": bearer("key-t1x"),
    "two in one": bearer("key-t1,key-t2"),
    "not ascii": {"x-api-key": "kéy"},
    "long": {"x-api-key": "k" * 10_000},
}


@pytest.mark.parametrize("headers", BAD_KEYS.values(), ids=BAD_KEYS)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages"])
async def test_without_a_key_nothing_is_asked_of_a_worker(
    path: str, headers: dict[str, str]
) -> None:
    async with RawEngine(respond) as engine, serving(engine, tenants=[T1, T2]) as gw:
        body = asking(prompt="q", max_tokens=5)
        status, document, given = await gw.post(path, body, headers)

        assert status == 401
        assert given["www-authenticate"].startswith("Bearer")
        assert document["error"]["type"] == "authentication_error"
        assert "key-t" not in json.dumps(document)
        assert sent(engine) == []


@pytest.mark.parametrize(
    "headers",
    [
        bearer("key-t1"),
        {"Authorization": "bearer  key-t1"},
        {"x-api-key": "key-t1"},
        {"X-API-Key": "key-t1", "authorization": "Bearer not-ours"},
    ],
    ids=str,
)
async def test_keys_come_as_openai_and_as_anthropic_send_them(headers: dict[str, str]) -> None:
    async with RawEngine(respond) as engine, serving(engine, tenants=[T1, T2]) as gw:
        status, _, _ = await gw.post(CHAT, asking(), headers)
        models, _, _ = await gw.get("/v1/models", headers)

        assert (status, models) == (200, 200)
        (seen,) = sent(engine)
        # The gateway's keys are the gateway's.
        assert not seen.headers.keys() & {"authorization", "x-api-key"}


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize"])
async def test_other_paths_ask_for_a_key_too(path: str) -> None:
    async with RawEngine(respond) as engine, serving(engine, tenants=[T1]) as gw:
        if path == "/tokenize":
            status, _, _ = await gw.post(path, {"model": "m", "prompt": "q"})
        else:
            status, _, _ = await gw.get(path)

        assert status == 401
        assert sent(engine) == []


async def test_without_tenants_nobody_is_asked_and_the_clients_key_is_the_workers() -> None:
    async with RawEngine(respond) as engine, serving(engine) as gw:
        assert await gw.ask("the engine's own") == 200
        assert sent(engine)[0].headers["authorization"] == "Bearer the engine's own"


async def test_a_workers_own_key_goes_with_every_request_and_no_clients() -> None:
    async with (
        RawEngine(respond) as engine,
        serving(engine, pool={"api_key_env": "K2"}) as gw,
    ):
        assert await gw.ask("a client's") == 200
        authorizations = {seen.headers.get("authorization") for seen in engine.seen}

    assert authorizations == {"Bearer key-t2"}


async def test_a_tenant_gets_its_own_models_only() -> None:
    tenant = T1 | {"models": ["small"]}
    async with RawEngine(respond) as engine:
        pool = {"models": ["m"], "aliases": {"small": "m"}}
        async with serving(engine, pool=pool, tenants=[tenant, T2]) as gw:
            status, document, _ = await gw.post(CHAT, asking(), bearer("key-t1"))
            own = await gw.ask("key-t1", asking() | {"model": "small"})
            _, listed, _ = await gw.get("/v1/models", bearer("key-t1"))
            _, others, _ = await gw.get("/v1/models", bearer("key-t2"))

    assert (status, document["error"]["code"]) == (403, "model_not_allowed")
    assert document["error"]["type"] == "permission_error"
    assert own == 200
    assert [card["id"] for card in listed["data"]] == ["small"]
    assert {card["id"] for card in others["data"]} == {"m", "small"}


# Limits, as clients see them.


async def test_answers_say_what_is_left_and_a_budget_ends() -> None:
    tenant = T1 | {"requests_per_min": 2, "tokens_per_min": 1000}
    async with RawEngine(respond) as engine, serving(engine, tenants=[tenant, T2]) as gw:
        body = asking("x" * 40, max_tokens=100)
        _, _, first = await gw.post(CHAT, body, bearer("key-t1"))
        _, _, second = await gw.post(CHAT, body, bearer("key-t1"))
        status, document, third = await gw.post(CHAT, body, bearer("key-t1"))
        other = await gw.ask("key-t2")
        _, _, others = await gw.post(CHAT, body, bearer("key-t2"))
        count = len(sent(engine))

    assert first["x-ratelimit-limit-requests"] == "2"
    assert [h["x-ratelimit-remaining-requests"] for h in (first, second, third)] == ["1", "0", "0"]
    assert first["x-ratelimit-remaining-tokens"] == "890"
    # The first one took 50 tokens, as its worker told, not the 110 that were estimated.
    assert 840 <= int(second["x-ratelimit-remaining-tokens"]) <= 850
    assert (status, document["error"]["type"]) == (429, "rate_limit_error")
    assert 1 <= int(third["retry-after"]) <= 31
    assert third["x-ratelimit-reset-requests"].endswith("s")
    assert other == 200
    assert "x-ratelimit-limit-requests" not in others
    assert count == 4


async def test_anthropics_clients_read_their_own_headers() -> None:
    tenant = T1 | {"requests_per_min": 1}
    async with RawEngine(respond) as engine, serving(engine, tenants=[tenant]) as gw:
        body = asking(max_tokens=5)
        key = {"x-api-key": "key-t1"}
        await gw.post("/v1/messages", body, key)
        status, document, headers = await gw.post("/v1/messages", body, key)

    assert status == 429
    assert document == {"type": "error", "error": document["error"]}
    assert document["error"]["type"] == "rate_limit_error"
    assert headers["anthropic-ratelimit-requests-limit"] == "1"
    assert headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert int(headers["retry-after"]) >= 1


async def test_what_no_worker_answered_costs_no_tokens() -> None:
    tenant = T1 | {"tokens_per_min": 1000}
    async with RawEngine(respond) as engine, serving(engine, tenants=[tenant]) as gw:
        assert await gw.ask("key-t1", asking() | {"model": "unknown"}) == 404
        budget = gw.gateway.tenancy.budgets.get("t1")
        assert budget is not None
        await poll_until(
            lambda: gw.gateway.tenancy.budgets.remaining(budget)["tokens"] > 999,
            what="it is given back",
        )


# Nothing of it is shown.


async def test_keys_and_salts_are_in_no_log_metric_error_or_report() -> None:
    tenants = [T1 | {"isolate_cache": True, "requests_per_min": 100}, T2]
    with structlog.testing.capture_logs() as logs:
        async with (
            RawEngine(respond) as engine,
            serving(engine, tenants=tenants, security={"salt_secret_env": "SALT"}) as gw,
        ):
            await gw.ask("key-t1")
            await gw.ask("key-wrong")
            (seen,) = sent(engine)
            salt = seen.json()["cache_salt"]
            found: list[Any] = [
                (await gw.get("/metrics"))[1],
                *[
                    (await gw.get(f"/admin/v1/{name}"))[1]
                    for name in ("workers", "index", "documents", "worth", "misses", "warm")
                ],
                (await gw.post("/admin/v1/explain", asking(), {"x-tenant-id": "t1"}))[1],
                (await gw.post(CHAT, asking(), bearer("key-wrong")))[1:],
            ]
    text = repr(found) + repr(logs)
    for secret in ("key-t1", "key-t2", "key-wrong", salt, KEYS["SALT"]):
        assert secret not in text


URLS = {
    "redis://user:pa@ss@h:1/0": "redis://***@h:1/0",
    "redis+sentinel://:pw@a:1,b:2/s": "redis+sentinel://***@a:1,b:2/s",
    "http://h:1/v1?api_key=abc&x=1": "http://h:1/v1?api_key=***&x=1",
    "http://h:1": "http://h:1",
    "/a/path@2": "/a/path@2",
}


@pytest.mark.parametrize(("given", "shown"), URLS.items(), ids=URLS)
def test_urls_are_shown_without_their_secrets(given: str, shown: str) -> None:
    assert redacted(given) == shown


def test_config_show_has_no_password() -> None:
    flags = {
        ("pools",): [{"name": "p", "models": ["m"]}],
        ("index",): {"backend": "redis", "url": "redis://:hunter2@h:1/0"},
        ("telemetry",): {"otlp_endpoint": "http://u:hunter2@h/v1?token=hunter2"},
    }
    settings, layered = load(None, flags=flags, environ={})

    assert "hunter2" not in repr(describe(settings, layered))
