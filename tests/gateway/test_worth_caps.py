"""Caps as configured: pool, route and tenant together with what a tier is worth."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.config import Settings
from gateway.routing import segments
from gateway.routing.dispatch import Inbound, Outcome, Usage
from gateway.routing.routes import Route
from gateway.worth.worth import Worth
from tests.gateway.routing_parts import Clock, chat, dispatcher, make_pool

WORKERS = [{"id": "w0", "url": "http://h:1"}]
CONVERSATION = [
    {"role": "system", "content": "Be brief. " * 300},
    {"role": "user", "content": "First question? " * 100},
    {"role": "assistant", "content": "An answer. " * 100},
    {"role": "user", "content": "Second question?"},
]


def settings(*, pool: Any = None, route: Any = None, tenant: Any = None) -> Settings:
    return Settings.model_validate(
        {
            "pools": [
                {"name": "chat", "models": ["m"], "workers": WORKERS, "offload": pool or {}},
            ],
            "routes": [{"pool": "chat", "offload": route}],
            "tenants": [{"name": "acme", "key_env": "KEY", "offload": tenant}],
        }
    )


class Desk:
    def __init__(self, **offload: Any) -> None:
        self.clock, self.pool = Clock(), make_pool(1)
        self.routes = dispatcher(self.pool, self.clock)
        self.worth = Worth(settings(**offload), clock=self.clock)

    async def cap(self, *, route: Route | None = None, tenant: str = "") -> int | None:
        """Return the cap that is sent; None for none."""
        inbound = chat("")
        inbound.body["messages"] = CONVERSATION
        inbound.tenant = tenant
        plan = await self.routes.plan(self.pool, inbound, in_full=True)
        plan.route = route
        put = self.worth.offload_put(plan, orjson.dumps(inbound.body))
        if not put:
            return None
        cap = orjson.loads(put["kv_transfer_params"])["max_offload_tokens"]
        assert isinstance(cap, int)
        return cap

    async def serve(self, inbound: Inbound) -> None:
        plan = await self.routes.plan(self.pool, inbound, in_full=True)
        ticket = self.routes.admit(plan, self.routes.choose(plan))
        ticket.finish(Outcome.OK, Usage(plan.num_tokens, 5, 0))
        self.worth.observe(plan, ticket)


@pytest.mark.parametrize(
    ("pool", "route", "tenant", "expected"),
    [
        (None, None, None, None),
        (1024, None, None, 1024),
        (None, 512, None, 512),
        (None, None, 256, 256),
        (1024, 512, 256, 256),
        (256, 512, 1024, 256),
        (1024, 0, 512, 0),
    ],
)
async def test_pool_route_and_tenant_lower_each_other(
    pool: int | None, route: int | None, tenant: int | None, expected: int | None
) -> None:
    caps = {"pool": pool, "route": route, "tenant": tenant}
    offload = {
        name: None if cap is None else {"max_offload_tokens": cap} for name, cap in caps.items()
    }
    desk = Desk(**offload)
    by = Route(desk.pool, max_offload_tokens=route)

    assert await desk.cap(route=by, tenant="acme") == expected
    # Who has no cap of their own is not capped by others'.
    assert await desk.cap(tenant="other") == pool


async def test_a_routes_scope_wins_over_the_pools() -> None:
    desk = Desk(pool={"max_offload_tokens": 100_000, "scope": "knowledge"})
    knowledge, history = (
        await desk.cap(),
        await desk.cap(route=Route(desk.pool, offload_scope="history")),
    )

    assert knowledge is not None
    assert history is not None
    assert 3000 <= knowledge < 3100 < history


async def test_traffic_that_is_never_asked_again_is_no_longer_offloaded() -> None:
    desk = Desk(pool={"max_offload_tokens": 8192, "scope": "history"})
    assert await desk.cap() not in (None, 0)
    for number in range(12):
        await desk.serve(chat(f"{number} once. " * 300, system=f"{number} is new. " * 300))

    assert await desk.cap() == 0
    assert desk.worth.account.report()["pools"][0]["verdict"] == "no"
    await desk.worth.close()


async def test_a_document_that_is_asked_again_is_offloaded_as_a_whole() -> None:
    desk = Desk(pool={"max_offload_tokens": 100_000})
    handbook = "\n".join(f"Rule {n}: refunds of class {n} take {n} days." for n in range(120))

    def ask(number: int) -> Inbound:
        return chat(f"{handbook}\n\nQuestion {number}: and {number}?", system="Be brief.")

    for number in range(4):
        await desk.serve(ask(number))
        await desk.worth.ends.settled()
        segments.observe(await desk.routes.plan(desk.pool, ask(number), in_full=True))
    inbound = ask(9)
    plan = await desk.routes.plan(desk.pool, inbound, in_full=True)
    put = desk.worth.offload_put(plan, orjson.dumps(inbound.body))

    cap = orjson.loads(put["kv_transfer_params"])["max_offload_tokens"]
    assert len(handbook) - 32 <= cap <= len(handbook) + 64
    await desk.worth.close()
