"""Who may be chosen: adapters, fingerprints, health, and who is relented when nobody is left."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.routing.choose import Candidate, Decision, Reason, RouteInput, choose
from gateway.routing.dispatch import Dispatcher, Plan
from gateway.routing.pool import Pool
from tests.gateway.routing_parts import H100, Clock, chat, dispatcher, make_pool


async def planned(num_workers: int = 3, *, adapter: str = "") -> tuple[Pool, Dispatcher, Plan]:
    pool = make_pool(num_workers)
    routes = dispatcher(pool, Clock())
    plan = await routes.plan(pool, chat("a story " * 20))
    plan.adapter = adapter
    return pool, routes, plan


def whys(decision: Decision) -> list[str]:
    return [c.why for c in decision.input.candidates]


async def test_an_adapter_is_served_only_by_those_that_have_it() -> None:
    pool, routes, plan = await planned(adapter="sql")
    pool.workers["w1"].adapters = frozenset({"sql", "law"})
    decision = routes.choose(plan)

    assert (decision.worker, decision.reason) == ("w1", Reason.ONLY_CANDIDATE)
    assert whys(decision) == ["adapter", "ok", "adapter"]


async def test_no_emergency_sends_an_adapter_where_it_is_not() -> None:
    pool, routes, plan = await planned(adapter="sql")
    pool.workers["w1"].adapters = frozenset({"sql"})
    pool.workers["w1"].health.ready = False
    assert routes.choose(plan).worker == "w1"
    assert whys(routes.choose(plan)) == ["adapter", "panic", "adapter"]
    pool.workers["w1"].adapters = frozenset()

    assert routes.choose(plan).worker is None


async def test_a_worker_apart_serves_only_when_none_of_the_others_can() -> None:
    pool, routes, plan = await planned()
    pool.workers["w2"].is_apart = True
    assert whys(routes.choose(plan)) == ["ok", "ok", "fingerprint"]
    for worker_id in ("w0", "w1"):
        pool.workers[worker_id].health.ready = False
    decision = routes.choose(plan)

    assert decision.worker == "w2"
    assert whys(decision) == ["not_ready", "not_ready", "apart"]
    assert decision.mode == "text"


async def test_ill_workers_come_back_when_there_is_nobody_else_and_drained_ones_do_not() -> None:
    pool, routes, plan = await planned()
    pool.drain("w0")
    for worker_id in ("w1", "w2"):
        pool.workers[worker_id].health.ready = False
    decision = routes.choose(plan)

    assert whys(decision) == ["draining", "panic", "panic"]
    assert decision.worker in ("w1", "w2")


@pytest.mark.parametrize("num_ejected", range(6))
async def test_failed_requests_put_out_at_most_half_of_a_pool_that_says_it_is_well(
    num_ejected: int,
) -> None:
    pool, routes, plan = await planned(5)
    for worker in list(pool.workers.values())[:num_ejected]:
        for _ in range(3):
            worker.health.failed(Clock().now_s)
    decision = routes.choose(plan)
    is_most = 2 * num_ejected > 5

    expected = ["panic" if is_most else "ejected"] * num_ejected + ["ok"] * (5 - num_ejected)
    assert whys(decision) == expected
    # Who is let back in is tried when the others have queues, and not before.
    assert num_ejected == 5 or decision.worker not in list(pool.workers)[:num_ejected]


@pytest.mark.parametrize("why", ["check", "asked"])
async def test_who_fails_its_check_or_asks_for_time_stays_out_however_many_they_are(
    why: str,
) -> None:
    pool, routes, plan = await planned(4)
    for worker in list(pool.workers.values())[:3]:
        for _ in range(3):
            worker.health.failed(Clock().now_s)
        if why == "check":
            worker.health.check_failed(Clock().now_s, timed_out=False, is_streaming=False)
        else:
            worker.health.asked_to_wait(Clock().now_s, 5.0)

    assert whys(routes.choose(plan)) == ["ejected"] * 3 + ["ok"]
    assert routes.choose(plan).worker == "w3"


# The kill switch


def loaded(*loads: tuple[int, int], **options: Any) -> RouteInput:
    candidates = [
        Candidate(f"w{k}", in_flight=n, queued_tokens=queued, hit_gpu=900 * (k == 0), model=H100)
        for k, (n, queued) in enumerate(loads)
    ]
    return RouteInput(0.0, 1000, candidates, mode="least_load", **options)


def test_least_load_looks_at_nothing_but_the_load() -> None:
    decision = choose(loaded((2, 0), (1, 500), (1, 400)))

    assert (decision.worker, decision.reason) == ("w2", Reason.LEAST_LOAD)
    assert decision.tied == ["w2"]


@pytest.mark.parametrize("rotation", range(4))
def test_equal_loads_take_turns(rotation: int) -> None:
    decision = choose(loaded((1, 0), (0, 0), (0, 0)), rotation=rotation)

    assert decision.worker == f"w{1 + rotation % 2}"


def test_least_load_wins_over_home_ring_and_sample_and_prices_everybody_on_demand() -> None:
    decision = choose(loaded((0, 0), (0, 1), (0, 1), home=["w1"], ring=["w2"], draws=[1]))

    assert decision.worker == "w0"
    assert len(decision.candidates) == 3
    assert decision.ttft_s is not None
