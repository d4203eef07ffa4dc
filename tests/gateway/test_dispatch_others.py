"""What other gateways have in flight counts like our own, and old news of it is sampled."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from gateway.routing.candidates import MAX_LOAD_AGE_S, route_input
from gateway.routing.choose import Candidate, RouteInput, choose, compared_positions
from gateway.routing.dispatch import Dispatcher, Outcome, Usage
from gateway.routing.explain import decide_again, explain_json
from gateway.routing.others import OthersLoad, WorkerLoad
from gateway.routing.pool import Pool
from tests.gateway.routing_parts import H100, Clock, chat, dispatcher, hold, make_pool


def shared_pool(num_workers: int = 4) -> tuple[Pool, OthersLoad, Clock, Dispatcher]:
    pool, clock = make_pool(num_workers), Clock()
    pool.others = others = OthersLoad()
    return pool, others, clock, dispatcher(pool, clock)


async def test_loads_add_up_and_the_latest_progress_counts() -> None:
    pool, others, clock, routes = shared_pool(1)
    plan = await routes.plan(pool, chat("a story " * 50))
    ticket = routes.admit(plan, routes.choose(plan))
    own = route_input(plan, clock.now_s).candidates[0]
    load = WorkerLoad(3, 4000, 0.25, 9000, clock.now_s - 0.5, clock.now_s + 0.25)
    others.report("g2", {"w0": load}, clock.now_s)
    both = route_input(plan, clock.now_s).candidates[0]

    assert both.in_flight == own.in_flight + 3 == 4
    assert both.queued_tokens == own.queued_tokens + 4000
    assert both.queued_s == pytest.approx(own.queued_s + 0.25)
    assert both.context_tokens == own.context_tokens + 9000
    # Nobody tells which blocks they share.
    assert both.active_tokens == own.active_tokens + 9000
    assert both.progress_at_s == own.progress_at_s == clock.now_s
    assert both.restore_until_s == clock.now_s + 0.25
    assert ticket.worker.books.in_flight == 1
    ticket.finish(Outcome.OK)
    assert route_input(plan, clock.now_s).candidates[0].in_flight == 3


async def test_a_worker_that_others_filled_is_left_for_an_idle_one() -> None:
    pool, others, clock, routes = shared_pool(2)
    plan = await routes.plan(pool, chat("a story " * 500), in_full=True)
    hold(pool, "w0", plan.prompt)
    assert routes.choose(plan).worker == "w0"
    busy = WorkerLoad(9, 90_000, 3.0, 100_000, clock.now_s, 0.0)
    others.report("g2", {"w0": busy}, clock.now_s)

    assert routes.choose(plan).worker == "w1"


async def test_nothing_is_learned_where_others_had_something_queued() -> None:
    pool, others, clock, routes = shared_pool(1)
    others.report("g2", {"w0": WorkerLoad(1, 500, 0.1, 700, clock.now_s, 0.0)}, clock.now_s)
    plan = await routes.plan(pool, chat("a story " * 200))
    ticket = routes.admit(plan, routes.choose(plan))
    clock.now_s += 9.0
    ticket.first_token()
    ticket.finish(Outcome.OK, Usage(plan.num_tokens, 2, 0))

    assert pool.workers["w0"].learner.model == H100


@pytest.mark.parametrize("age_s", [0.0, MAX_LOAD_AGE_S, 0.151, 5.0])
async def test_candidates_are_drawn_only_while_the_load_is_old_news(age_s: float) -> None:
    pool, others, clock, routes = shared_pool(9)
    plan = await routes.plan(pool, chat("a story " * 50))
    others.report("g2", {"w0": WorkerLoad(1)}, clock.now_s - age_s)
    request = route_input(plan, clock.now_s, rng=Random(1))

    assert len(request.draws) == (3 if age_s > MAX_LOAD_AGE_S else 0)


async def test_while_the_others_cannot_be_heard_candidates_are_drawn_and_explained() -> None:
    pool, others, _, routes = shared_pool(6)
    others.is_connected = False
    plan = await routes.plan(pool, chat("a story " * 50))
    decision = routes.choose(plan)
    assert len(decision.input.draws) == 2
    explain = json.loads(json.dumps(explain_json(plan, decision)))

    assert decide_again(explain) == explain["decision"]
    assert explain["state"]["load_age_s"] is None
    compared = {c["worker"] for c in explain["candidates"] if c["compared"]}
    drawn = {f"w{k}" for k in decision.input.draws}
    assert compared == drawn | set(plan.home)
    assert decision.worker in compared


async def test_equal_seeds_draw_equally_and_a_gateway_alone_draws_nothing() -> None:
    pool, others, clock, routes = shared_pool(12)
    plan = await routes.plan(pool, chat("a story " * 50))
    assert route_input(plan, clock.now_s, rng=Random(1)).draws == []
    others.is_connected = False
    first, again = (
        [route_input(plan, clock.now_s, rng=rng).draws for _ in range(9)]
        for rng in (Random(7), Random(7))
    )

    assert first == again
    assert len({tuple(draws) for draws in first}) > 1
    assert route_input(plan, clock.now_s).draws == []


def sampled(hits: list[int], *, draws: list[int], home: list[str] | None = None) -> list[int]:
    candidates = [Candidate(f"w{k}", hit_gpu=hit, model=H100) for k, hit in enumerate(hits)]
    request = RouteInput(0.0, 1000, candidates, draws=draws, home=home or [])
    assert choose(request).worker in {f"w{k}" for k in compared_positions(request)}
    return compared_positions(request)


def test_the_sample_is_holders_home_and_draws() -> None:
    assert sampled([800, 401, 400, 0, 0, 0], draws=[4, 4]) == [0, 1, 4]
    # Less than a quarter of the prompt is no reason.
    assert sampled([250, 200, 0, 0], draws=[3]) == [3]
    assert sampled([0, 0, 0, 0], draws=[1], home=["w3"]) == [1, 3]
    assert sampled([0, 0], draws=[]) == [0, 1]


def test_a_sample_of_ineligible_workers_falls_back_to_all() -> None:
    candidates = [Candidate(f"w{k}", eligible=k > 0, model=H100) for k in range(3)]
    request = RouteInput(0.0, 1000, candidates, draws=[0])

    assert compared_positions(request) == [1, 2]


def test_gateways_that_see_the_same_old_load_do_not_all_run_to_one_worker() -> None:
    """Sixteen gateways, one idle-looking worker among busy ones, no news of each other."""
    candidates = [
        Candidate(f"w{k}", in_flight=0 if k == 5 else 4, context_tokens=9000, model=H100)
        for k in range(16)
    ]
    blind, sampling = Counter[str | None](), Counter[str | None]()
    for gateway in range(16):
        rng = Random(gateway)
        blind[choose(RouteInput(0.0, 4000, candidates), rotation=gateway).worker] += 1
        draws = [rng.randrange(16) for _ in range(5)]
        request = RouteInput(0.0, 4000, candidates, draws=draws)
        sampling[choose(request, rotation=gateway).worker] += 1

    assert blind["w5"] == 16
    assert max(sampling.values()) <= 8
