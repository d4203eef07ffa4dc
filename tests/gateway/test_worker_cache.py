"""What operators ask of a runner through the gateway, and how they see its configuration."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.fakes.engine import RawEngine, answer
from tests.gateway.tenancy_parts import KEYS, bearer, respond, serving

if TYPE_CHECKING:
    from tests.fakes.engine import Script, Seen

CACHE = {"block_size": 16, "block_bytes": 9216, "tiers": {"gpu": {}, "cpu": {"capacity_bytes": 7}}}
PATHS = ("/admin/v1/workers/w0/cache", "/admin/v1/workers/w0/selftest")


class Runner:
    """Answers as a runner does, where a test does not want something else."""

    def __init__(self, *, status: int = 200, body: bytes | None = None) -> None:
        self.status = status
        self.body = body

    def respond(self, seen: Seen) -> Script:
        if not seen.target.startswith("/cache"):
            return respond(seen)
        found: object = CACHE if seen.method == "GET" else {"disk": None}
        body = json.dumps(found).encode() if self.body is None else self.body
        return answer(body, status=self.status)


async def test_a_runners_cache_and_selftest_are_reached_through_the_gateway() -> None:
    async with (
        RawEngine(Runner().respond) as engine,
        serving(engine, pool={"engine": "runner"}) as gw,
    ):
        cache = await gw.get(PATHS[0])
        selftest = await gw.post(PATHS[1], {})
        nobody = await gw.get("/admin/v1/workers/w9/cache")

    assert (cache[0], cache[1]) == (200, CACHE)
    assert (selftest[0], selftest[1]) == (200, {"disk": None})
    assert nobody[0] == 404


async def test_only_operators_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN", KEYS["ADMIN"])
    server = {"access": {"admin_token_env": "ADMIN"}}
    async with (
        RawEngine(Runner().respond) as engine,
        serving(engine, pool={"engine": "runner"}, server=server) as gw,
    ):
        refused = [
            (await gw.get(PATHS[0]))[0],
            (await gw.post(PATHS[1], {}))[0],
            (await gw.get("/admin/v1/config"))[0],
            # Nor by a client's way: engine administration is not proxied.
            (await gw.post("/cache/selftest", {}))[0],
        ]
        asked = [seen for seen in engine.seen if seen.target == "/cache/selftest"]
        allowed = (await gw.post(PATHS[1], {}, bearer(KEYS["ADMIN"])))[0]

    assert refused == [401, 401, 401, 404]
    assert asked == []
    assert allowed == 200


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (429, b'{"error": {"message": "one runs"}}', "with 429: one runs"),
        (500, b"not json", "with 500: no reason given"),
        (507, b'{"error": "odd"}', "with 507: no reason given"),
        (404, b"[]", "with 404: no reason given"),
    ],
)
async def test_what_a_runner_refuses_is_told_with_its_reason(
    status: int, body: bytes, said: str
) -> None:
    runner = Runner(status=status, body=body)
    async with (
        RawEngine(runner.respond) as engine,
        serving(engine, pool={"engine": "runner"}) as gw,
    ):
        found = await gw.post(PATHS[1], {})

    assert found[0] == 502
    assert said in found[1]["error"]["message"]


async def test_other_engines_have_no_such_report() -> None:
    async with RawEngine(Runner().respond) as engine, serving(engine) as gw:
        found = [await gw.get(PATHS[0]), await gw.post(PATHS[1], {})]

    assert [status for status, _, _ in found] == [404, 404]
    assert "engine 'vllm'" in found[0][1]["error"]["message"]


async def test_the_configuration_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K1", "CANARY-key")
    tenants = [{"name": "t1", "key_env": "K1"}]
    telemetry = {"otlp_endpoint": "http://user:CANARY-pw@10.0.0.1:4318"}
    async with (
        RawEngine(Runner().respond) as engine,
        serving(engine, tenants=tenants, telemetry=telemetry) as gw,
    ):
        status, found, _ = await gw.get("/admin/v1/config")

    assert status == 200
    assert "CANARY" not in json.dumps(found)
    assert found["settings"]["tenants"][0]["key_env"] == "K1"
    assert found["settings"]["routing"]["mode"] == "cost"
    assert found["version"]
