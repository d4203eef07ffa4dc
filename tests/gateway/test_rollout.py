"""How much of the traffic goes by the rule, and what is known of the rest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway.routing.choose import Decision, Reason, choose
from gateway.routing.dispatch import Dispatcher, Outcome
from gateway.routing.metrics import DispatchCollector
from gateway.routing.pool import Pool
from gateway.routing.rollout import RollOut, fraction
from tests.gateway.routing_parts import Clock, chat, hold, make_pool

TEXT = "a document that one worker holds " * 40


def routes_of(pool: Pool, rollout: RollOut) -> Dispatcher:
    return Dispatcher([pool], clock=Clock(), seed=1, rollout=rollout)


async def held_by_a_busy_worker(pool: Pool, routes: Dispatcher) -> None:
    """Let w0 hold the document, and have one request in flight."""
    plan = await routes.plan(pool, chat(TEXT), in_full=True)
    hold(pool, "w0", plan.prompt)
    pool.workers["w0"].books.charge(1000.0, prompt_tokens=20, uncached_tokens=20)


@pytest.mark.parametrize("mode", ["observe", "least_load"])
async def test_what_is_not_routed_by_the_rule_goes_to_the_least_busy(mode: str) -> None:
    pool = make_pool(2)
    routes = routes_of(pool, RollOut(mode))  # type: ignore[arg-type]
    await held_by_a_busy_worker(pool, routes)
    plan = await routes.plan(pool, chat(TEXT), in_full=True)
    decision = routes.choose(plan)

    assert (decision.worker, decision.reason) == ("w1", Reason.LEAST_LOAD)


async def test_observing_says_what_the_rule_would_have_done_and_saved() -> None:
    pool = make_pool(2)
    rollout = RollOut("observe")
    routes = routes_of(pool, rollout)
    await held_by_a_busy_worker(pool, routes)
    plan = await routes.plan(pool, chat(TEXT), in_full=True)
    decision = routes.choose(plan)
    rule = plan.rule

    assert rule is not None
    assert (rule.worker, rule.reason) == ("w0", "longest_prefix")
    assert rule.hit_tokens == rule.saved_tokens > 1000
    assert rule.saved_s is not None
    assert rule.saved_s > 0
    ticket = routes.admit(plan, decision)
    assert rollout.num_routed == {("chat", "least_load"): 1}
    ticket.finish(Outcome.OK)


async def test_the_kill_switch_does_not_even_look_at_the_rule() -> None:
    pool = make_pool(2)
    rollout = RollOut("least_load")
    routes = routes_of(pool, rollout)
    plan = await routes.plan(pool, chat(TEXT))
    routes.admit(plan, routes.choose(plan)).finish(Outcome.OK)

    assert plan.rule is None


async def test_the_mode_may_be_changed_between_two_requests() -> None:
    pool = make_pool(2)
    rollout = RollOut()
    routes = routes_of(pool, rollout)
    await held_by_a_busy_worker(pool, routes)
    workers = []
    for mode in ("cost", "least_load", "cost"):
        rollout.mode = mode  # type: ignore[assignment]
        plan = await routes.plan(pool, chat(TEXT), in_full=True)
        workers.append(routes.choose(plan).worker)

    assert workers == ["w0", "w1", "w0"]


@pytest.mark.parametrize("share", [0, 1, 20, 50, 99, 100])
async def test_a_share_is_routed_by_the_rule_and_the_rest_is_observed(share: int) -> None:
    pool = make_pool(2)
    rollout = RollOut("cost", share)
    routes = routes_of(pool, rollout)
    num_observed = 0
    for i in range(400):
        plan = await routes.plan(pool, chat("q", headers={"x-session-id": f"s{i}"}))
        routes.admit(plan, routes.choose(plan)).finish(Outcome.OK)
        num_observed += plan.rule is not None
    by_cost, rest = (rollout.num_routed["chat", policy] for policy in ("cost", "least_load"))  # type: ignore[index]

    assert by_cost + rest == 400
    assert abs(by_cost / 4 - share) <= (0 if share in (0, 100) else 8)
    assert num_observed == rest


async def test_a_session_stays_on_its_side_and_grows_only_over_to_the_rule() -> None:
    pool = make_pool(2)
    plans = []
    for i in range(50):
        inbound = chat("q", headers={"x-session-id": f"s{i}"})
        plans.append(await routes_of(pool, RollOut()).plan(pool, inbound))
    sides = [
        {i for i, plan in enumerate(plans) if RollOut("cost", share).policy(plan) == "cost"}
        for share in (10, 30, 60, 90)
    ]

    assert all(small < large for small, large in pairwise(sides))
    other = {
        i for i, plan in enumerate(plans) if RollOut("cost", 30, seed=7).policy(plan) == "cost"
    }
    assert other != sides[1]


@pytest.mark.parametrize("options", [{"is_strict": True}, {"reads": False}], ids=str)
async def test_the_kill_switch_also_takes_over_what_goes_by_the_ring(
    options: dict[str, bool],
) -> None:
    pool = make_pool(3, **options)  # type: ignore[arg-type]
    routes = routes_of(pool, RollOut("least_load"))
    for worker in ("w0", "w2"):
        pool.workers[worker].books.charge(1000.0, prompt_tokens=20, uncached_tokens=20)
    decisions = [routes.choose(await routes.plan(pool, chat(f"q{i}"))) for i in range(8)]

    assert {decision.worker for decision in decisions} == {"w1"}


@pytest.mark.parametrize("mode", ["observe", "least_load", "cost"])
async def test_every_decision_can_be_taken_again_from_its_json(mode: str) -> None:
    pool = make_pool(3)
    routes = routes_of(pool, RollOut(mode, 50))  # type: ignore[arg-type]
    for i in range(20):
        decision = routes.choose(await routes.plan(pool, chat(f"question {i}")))
        read = Decision.from_json(decision.to_json())
        again = choose(read.input, rotation=read.rotation)
        assert (again.worker, again.reason) == (decision.worker, decision.reason)


async def test_nobody_eligible_is_nobody_in_every_mode() -> None:
    pool = make_pool(1)
    pool.drain("w0")
    for mode in ("observe", "least_load", "cost"):
        routes = routes_of(pool, RollOut(mode))  # type: ignore[arg-type]
        plan = await routes.plan(pool, chat("q"))
        assert routes.choose(plan).worker is None
        assert plan.rule is None


def test_fractions_are_even_and_the_same_for_ever() -> None:
    found = [fraction(f"key {i}") for i in range(4000)]

    assert all(0 <= x < 1 for x in found)
    assert abs(sum(found) / 4000 - 0.5) < 0.02
    assert fraction("key 1") == pytest.approx(0.759787, abs=1e-6)


async def test_metrics_show_both_sides_and_those_who_wait() -> None:
    pool = make_pool(2)
    routes = routes_of(pool, RollOut("observe"))
    await held_by_a_busy_worker(pool, routes)
    pool.workers["w1"].is_apart = True
    plan = await routes.plan(pool, chat(TEXT), in_full=True)
    routes.admit(plan, routes.choose(plan)).finish(Outcome.OK)
    registry = CollectorRegistry()
    registry.register(DispatchCollector(routes))
    text = generate_latest(registry).decode()

    assert 'warmlane_routed_requests_total{policy="least_load",pool="chat"} 1.0' in text
    assert 'warmlane_gate_waiting{pool="chat"} 0.0' in text
    assert 'warmlane_gate_refused_total{pool="chat",why="full"} 0.0' in text
    assert 'warmlane_worker_apart{pool="chat",worker="w1"} 1.0' in text
