"""Cache salts: made from a secret, sent to engines, and part of what is predicted."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.event_health import EventHealth
from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from gateway.tenancy import Tenant
from gateway.tenancy.salts import salt_of, salt_within
from runner.config import PoolSize, RunnerConfig
from tests.fakes.engine import RawEngine
from tests.gateway.tenancy_parts import (
    CHAT,
    KEYS,
    T1,
    T2,
    Serving,
    asking,
    bearer,
    respond,
    sent,
    serving,
)
from tests.live_runner import LiveRunner
from tests.support import poll_until
from tests.valkey import Valkey, valkey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

__all__ = ["valkey"]

SECURITY = {"salt_secret_env": "SALT"}
ISOLATED = [tenant | {"isolate_cache": True} for tenant in (T1, T2)]
MEMO = "Handbook rule 7: refunds are accepted within thirty days of delivery. " * 12


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


# What a salt is.


def test_a_salt_is_an_hmac_of_the_tenants_name() -> None:
    secret = b"s" * 32

    salt = salt_of(secret, "acme")

    assert salt == hmac.new(secret, b"acme", "sha256").hexdigest()
    assert salt == salt_of(secret, "acme")
    assert salt_of(b"t" * 32, "acme") != salt


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
def test_no_two_tenants_or_parts_of_them_have_one_salt(
    one: str, other: str, part: str, another: str
) -> None:
    secret = b"s" * 32
    try:
        salts = [salt_of(secret, one), salt_of(secret, other)]
    except UnicodeEncodeError:  # names are ASCII
        return
    wholes = {(one, ""): salts[0], (other, ""): salts[1]}
    parts = {
        (one, part): salt_within(salts[0], part),
        (one, another): salt_within(salts[0], another),
        (other, part): salt_within(salts[1], part),
    }
    found = wholes | parts
    assert len(set(found.values())) == len(found)


PLAIN, SALTED = Tenant("t"), Tenant("t", salt="ours")
TRUSTED, TRUSTED_SALTED = Tenant("t", may_salt=True), Tenant("t", salt="ours", may_salt=True)
CASES: list[tuple[Tenant, dict[str, Any], str | None]] = [
    (PLAIN, {}, None),
    (PLAIN, {"cache_salt": "theirs"}, ""),
    (PLAIN, {"extra_key": "theirs"}, ""),
    (PLAIN, {"cache_salt": 5}, ""),
    (SALTED, {}, "ours"),
    (SALTED, {"cache_salt": "theirs", "extra_key": "x"}, "ours"),
    (TRUSTED, {}, None),
    (TRUSTED, {"cache_salt": "theirs"}, None),
    (TRUSTED_SALTED, {}, "ours"),
    (TRUSTED_SALTED, {"cache_salt": ""}, "ours"),
    (TRUSTED_SALTED, {"cache_salt": ["x"]}, "ours"),
    (TRUSTED_SALTED, {"cache_salt": "theirs"}, salt_within("ours", "theirs")),
]


@pytest.mark.parametrize(("tenant", "body", "salt"), CASES)
def test_whose_salt_is_forwarded(tenant: Tenant, body: dict[str, Any], salt: str | None) -> None:
    assert tenant.salting(body) == salt


# What engines get.


@pytest.mark.parametrize(
    "given",
    [{}, {"cache_salt": "mine"}, {"extra_key": "mine"}, {"cache_salt": "mine", "extra_key": "x"}],
    ids=str,
)
async def test_engines_get_the_tenants_salt_and_never_a_clients(given: dict[str, Any]) -> None:
    tenants = [ISOLATED[0], T2]
    async with (
        RawEngine(respond) as engine,
        serving(engine, tenants=tenants, security=SECURITY) as gw,
    ):
        body = asking("q", seed=2**63 - 1, temperature=1.0, **given)
        for key in ("key-t1", "key-t2"):
            assert await gw.ask(key, body) == 200
        isolated, plain = (seen.json() for seen in sent(engine))
        rest = {name: value for name, value in body.items() if name not in given}

        assert isolated == rest | {"cache_salt": salt_of(KEYS["SALT"].encode(), "t1")}
        assert plain == rest


async def test_all_gateways_and_restarts_have_the_same_salts() -> None:
    salts = set()
    for _ in range(2):
        async with (
            RawEngine(respond) as engine,
            serving(engine, tenants=ISOLATED, security=SECURITY) as gw,
        ):
            await gw.ask("key-t1")
            salts.add(sent(engine)[0].json()["cache_salt"])

    assert len(salts) == 1


# With a real engine.


@pytest.fixture(scope="module")
def runner(smollm2_dir: Path) -> Iterator[LiveRunner]:
    config = RunnerConfig(
        model=str(smollm2_dir),
        port=0,
        pool=PoolSize(tokens=8192),
        kv_events="tcp://127.0.0.1:0",
        kv_replay="tcp://127.0.0.1:0",
        served_model_name="m",
    )
    with LiveRunner.start(config) as live:
        yield live


@asynccontextmanager
async def over(
    runner: LiveRunner, *, is_second: bool = False, **config: Any
) -> AsyncIterator[Serving]:
    """Serve over the runner, emptied, once its events are followed."""
    pool = {
        "name": "chat",
        "models": ["m"],
        "engine": "runner",
        "workers": [{"id": "w0", "url": runner.url}],
    }
    flags = {("pools",): [pool]} | {(name,): value for name, value in config.items()}
    settings, _ = load(None, flags=flags, environ={})
    gateway = Gateway(settings)
    async with aiohttp.ClientSession() as session:
        async with session.post(runner.url + "/reset_prefix_cache") as response:
            assert response.status == 200
        await gateway.start()
        listener = await Listener.start(gateway.app, "127.0.0.1", 0)
        try:
            (worker,) = gateway.fleet.pools[0].workers.values()
            await poll_until(
                lambda: (
                    # Of gateways that share an index, one follows.
                    worker.mode == "exact" and (bool(gateway.fleet.feeds) or is_second)
                ),
                deadline_s=30.0,
                what="it is followed",
            )
            yield Serving(gateway, f"http://127.0.0.1:{listener.port}", session)
        finally:
            await listener.stop(0.0)
            await gateway.close()


async def hits(gw: Serving, key: str, body: dict[str, Any]) -> tuple[int, int]:
    """Ask; return the hit tokens that were predicted and those that were."""
    headers = bearer(key) | {"x-warmlane-explain": "1"}
    status, document, given = await gw.post(CHAT, body | {"max_tokens": 1}, headers)
    assert status == 200, document
    observed = document["usage"]["prompt_tokens_details"]["cached_tokens"]
    return int(given["x-warmlane-hit-tokens"]), observed


async def settled(gw: Serving) -> int:
    """Return the blocks in the index once there are no more to come."""
    index, number = gw.gateway.fleet.pools[0].index, -1
    assert index is not None
    while index.num_blocks != number or not number:
        number = index.num_blocks
        await asyncio.sleep(0.2)
    return number


async def test_isolated_tenants_share_no_kv_and_hits_are_predicted_exactly(
    runner: LiveRunner,
) -> None:
    async with over(runner, tenants=ISOLATED, security=SECURITY) as gw:
        body = {"model": "m", "messages": [{"role": "system", "content": MEMO},
                                           {"role": "user", "content": "Summarise"}]}  # fmt: skip
        first = await hits(gw, "key-t1", body)
        await settled(gw)
        other = await hits(gw, "key-t2", body)
        await settled(gw)
        again = await hits(gw, "key-t1", body)
        others = await hits(gw, "key-t2", body)

        assert first == other == (0, 0)
        assert again == others
        assert again[0] == again[1] > 150
        # What the engine says of salted blocks is believed, since it says the salt with them.
        (feed,) = gw.gateway.fleet.feeds.values()
        assert feed.health is EventHealth.OK


async def test_warm_up_is_for_the_tenant_it_names(runner: LiveRunner) -> None:
    async with over(runner, tenants=ISOLATED, security=SECURITY) as gw:
        body = {"messages": [{"role": "system", "content": MEMO},
                             {"role": "user", "content": "\0question\0"}]}  # fmt: skip
        item = {"id": "memo", "tenant": "t1", "body": body, "marker": "\0question\0"}
        async with gw.session.post(
            gw.url + "/admin/v1/warm", json={"model": "m", "items": [item]}
        ) as response:
            events = await response.text()
        assert '"warm":1' in events, events
        await settled(gw)
        asked = body | {"model": "m"}
        asked["messages"][1]["content"] = "Who decides?"
        warm = await hits(gw, "key-t1", asked)
        cold = await hits(gw, "key-t2", asked)

        assert warm[0] == warm[1] > 150
        assert cold == (0, 0)
        # It was the tenant's salt, and is told to nobody.
        assert salt_of(KEYS["SALT"].encode(), "t1") not in events


async def test_explain_tells_what_a_tenants_request_will_meet(runner: LiveRunner) -> None:
    async with over(runner, tenants=ISOLATED, security=SECURITY) as gw:
        body = asking(MEMO)
        await hits(gw, "key-t1", body)
        await settled(gw)
        told = {}
        for name in ("t1", "t2"):
            status, document, _ = await gw.post("/admin/v1/explain", body, {"x-tenant-id": name})
            assert status == 200
            told[name] = document
        predicted, observed = await hits(gw, "key-t1", body)

    assert told["t1"]["decision"]["hit_tokens"] == predicted == observed > 0
    assert told["t2"]["decision"]["hit_tokens"] == 0
    assert told["t1"]["block_hashes"] != told["t2"]["block_hashes"]


# Over Redis.


async def test_gateways_share_budgets_and_tell_redis_no_salt_and_no_key(
    runner: LiveRunner, valkey: Valkey
) -> None:
    tenants = [tenant | {"tokens_per_min": 5000} for tenant in ISOLATED]
    shared = {"index": {"backend": "redis", "url": valkey.url, "timeout_ms": 1000}}
    config = {"tenants": tenants, "security": SECURITY} | shared
    async with over(runner, **config) as first, over(runner, is_second=True, **config) as second:
        for gw in (first, second):
            spending = gw.gateway.spending
            assert spending is not None
            await poll_until(lambda s=spending: s.num_gateways == 2, what="both are heard")
        asked = asking(MEMO) | {"max_tokens": 1}
        await hits(first, "key-t1", asked)
        await hits(first, "key-t1", asked)
        budgets = second.gateway.tenancy.budgets
        budget = budgets.get("t1")
        assert budget is not None
        await poll_until(lambda: budgets.remaining(budget)["tokens"] < 4900, what="it is told")
        _, metrics, _ = await second.get("/metrics")
        assert b"warmlane_budget_gateways 2.0" in metrics
        assert b"warmlane_budget_connected 1.0" in metrics
        told = int((await second.post(CHAT, asked, bearer("key-t1")))[2]
                   ["x-ratelimit-remaining-tokens"])  # fmt: skip
        assert told < 4700
        # The other gateway's blocks are known here, under the tenant's salt and no other.
        predicted, observed = await hits(second, "key-t1", asked)
        assert predicted == observed > 150
        await settled(first)
        dump = b""
        with valkey.client() as client:
            for key in client.scan_iter():
                dump += key + (client.dump(key) or b"")

    assert b"warmlane" in dump
    secrets = [salt_of(KEYS["SALT"].encode(), name) for name in ("t1", "t2")]
    for secret in (*secrets, *KEYS.values()):
        assert secret.encode() not in dump
        with contextlib.suppress(ValueError):
            assert bytes.fromhex(secret) not in dump
