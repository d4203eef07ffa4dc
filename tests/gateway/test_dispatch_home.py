"""Affinity to a home set of workers, by every kind of identity, soft and strict."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from gateway.routing.choose import Reason
from gateway.routing.dispatch import Inbound, Outcome
from tests.gateway.routing_parts import H100, Clock, chat, dispatcher, hold, make_pool

KINDS = ["document", "knowledge_base", "session", "tenant", "prefix"]


def text(seed: int) -> str:
    return "".join(Random(seed).choices("abcdefgh ", k=400))


def inbound(kind: str, who: int, turn: int) -> Inbound:
    """A request of one of many identities; turns of one identity are about different text."""
    if kind == "prefix":
        return chat(f"{text(who)} question {turn}", system="Be brief.")
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    if kind == "document":
        headers["x-document-id"] = f"d{who}"
    elif kind == "knowledge_base":
        headers["x-knowledge-base-id"] = f"k{who}"
    elif kind == "session":
        body["warmlane"] = {"session": f"s{who}"}
    request = chat(text(1000 * who + turn), headers=headers, **body)
    request.tenant = f"t{who}" if kind == "tenant" else "acme"
    return request


@pytest.mark.parametrize("set_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_soft_affinity_brings_a_cold_prompt_home_while_the_home_is_as_cheap(
    kind: str, set_size: int
) -> None:
    pool, clock = make_pool(8, affinity_keys=(kind,), set_size=set_size), Clock()
    routes = dispatcher(pool, clock)
    used: Counter[str] = Counter()
    for who in range(40):
        plan = await routes.plan(pool, inbound(kind, who, 0))
        ticket = routes.admit(plan, routes.choose(plan))
        assert ticket.decision.reason is Reason.HOME
        assert ticket.worker.id in plan.home
        assert len(set(plan.home)) == set_size
        assert plan.key.kind == kind
        used[ticket.worker.id] += 1
        ticket.finish(Outcome.OK)
    assert len(used) >= 6, used


@pytest.mark.parametrize("kind", KINDS)
async def test_a_home_that_is_busy_is_passed_over_within_its_set_first(kind: str) -> None:
    pool, clock = make_pool(8, affinity_keys=(kind,), set_size=2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, inbound(kind, 1, 0))
    first, second = plan.home
    for busy, expected in ((first, {second}), (second, set(pool.workers) - {first, second})):
        books = pool.workers[busy].books
        books.charge(clock.now_s, prompt_tokens=9000, uncached_tokens=9000, prefill_s=0.5)

        assert routes.choose(plan).worker in expected


@pytest.mark.parametrize("kind", KINDS)
async def test_strict_affinity_keeps_to_the_ring_whatever_is_cached(kind: str) -> None:
    pool, clock = make_pool(8, affinity_keys=(kind,), set_size=2, is_strict=True), Clock()
    routes = dispatcher(pool, clock)
    for who in range(10):
        for turn in range(3):
            plan = await routes.plan(pool, inbound(kind, who, turn))
            away = next(w for w in pool.workers if w not in plan.home)
            hold(pool, away, plan.prompt)
            ticket = routes.admit(plan, routes.choose(plan))
            assert (ticket.worker.id, ticket.decision.reason) == (plan.home[0], Reason.STRICT_HOME)
            ticket.finish(Outcome.OK)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_hot_key_of_a_strict_pool_spills_first_to_the_rest_of_its_home(kind: str) -> None:
    pool, clock = make_pool(8, affinity_keys=(kind,), set_size=2, is_strict=True), Clock()
    routes = dispatcher(pool, clock)
    tickets = []
    for turn in range(40):
        plan = await routes.plan(pool, inbound(kind, 1, turn))
        tickets.append(routes.admit(plan, routes.choose(plan)))
    order = pool.ring.order(plan.key.ring_key)
    served = Counter(ticket.worker.id for ticket in tickets)

    assert order[:2] == plan.home
    assert tickets[0].worker.id == order[0]
    spills = [t.worker.id for t in tickets if t.decision.reason is Reason.STRICT_SPILL]
    assert spills[0] == order[1]
    # Bounded load: 1.25 times the mean, and one more for the request that is let in.
    assert max(served.values()) <= 1.25 * 41 / 8 + 1


async def test_a_prefix_held_somewhere_is_stronger_than_a_soft_home() -> None:
    pool, clock = make_pool(8, model=H100), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, inbound("session", 1, 0))
    away = next(w for w in pool.workers if w not in plan.home)
    hold(pool, away, plan.prompt)

    assert routes.choose(plan).worker == away
