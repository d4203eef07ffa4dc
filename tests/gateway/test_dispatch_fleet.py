"""What a fleet of simulated engines gets from the dispatcher, in bursts and over time."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

import pytest

from gateway.routing.choose import Reason
from gateway.routing.cost import CostModel
from gateway.routing.dispatch import Dispatcher, Outcome, Plan
from gateway.routing.pool import Pool
from tests.gateway.engine_sim import Fleet
from tests.gateway.routing_parts import H100, Clock, chat, dispatcher, is_idle, make_pool

DOCUMENT = "".join(Random(1).choices("abcdefgh ", k=8000))
SYSTEM = "".join(Random(2).choices("abcdefgh ", k=2000))
# A small model on a CPU.
CPU = CostModel(0.003, 1e-6, 0.02, 1e-6)
SPEEDS = [pytest.param(H100, id="H100"), pytest.param(CPU, id="CPU"), pytest.param(None, id="new")]


def fleet(
    model: CostModel | None, *, slots: int = 64, decode_s: float = 1.0, **options: object
) -> tuple[Pool, Dispatcher, Fleet]:
    pool, clock = make_pool(4, model=model, **options), Clock()  # type: ignore[arg-type]
    clock.now_s += 3600.0
    routes = dispatcher(pool, clock)
    return (
        pool,
        routes,
        Fleet(pool, routes, clock, speed=model or H100, slots=slots, decode_s=decode_s),
    )


async def plans(routes: Dispatcher, pool: Pool, texts: list[str], system: str = "") -> list[Plan]:
    return [await routes.plan(pool, chat(text, system=system), in_full=True) for text in texts]


@pytest.mark.parametrize("model", SPEEDS)
@pytest.mark.parametrize("requests", [40, 50])
async def test_a_burst_of_different_prompts_after_idleness_spreads_evenly(
    model: CostModel | None, requests: int
) -> None:
    pool, routes, sim = fleet(model)
    texts = ["".join(Random(i).choices("abcdefgh ", k=500)) for i in range(requests)]
    tickets = [sim.send(plan) for plan in await plans(routes, pool, texts)]
    counts = Counter(ticket.worker.id for ticket in tickets)

    assert len(counts) == 4
    assert max(counts.values()) - min(counts.values()) <= 3
    sim.run()
    assert is_idle(pool)


@pytest.mark.parametrize("model", SPEEDS)
async def test_siblings_of_one_cold_document_are_prefilled_on_at_most_two_workers(
    model: CostModel | None,
) -> None:
    pool, routes, sim = fleet(model)
    texts = [f"{DOCUMENT} Question {i}: why?" for i in range(20)]
    tickets = [sim.send(plan) for plan in await plans(routes, pool, texts)]
    assert len({ticket.worker.id for ticket in tickets}) <= 2
    assert {t.decision.reason for t in tickets[1:]} & {Reason.SIBLING}

    sim.run()
    computed = [u for engine in sim.engines.values() for u in engine.prefilled]
    assert sum(uncached > 4000 for uncached in computed) <= 2
    assert is_idle(pool)


@pytest.mark.parametrize("outcome", [Outcome.UPSTREAM_RESET, Outcome.CLIENT_CLOSED])
async def test_a_failed_or_cancelled_leader_frees_its_followers(outcome: Outcome) -> None:
    pool, routes, _ = fleet(H100)
    first, second = await plans(routes, pool, [f"{DOCUMENT} Question {i}" for i in range(2)])
    leader = routes.admit(first, routes.choose(first))
    assert routes.choose(second).reason is Reason.SIBLING
    leader.finish(outcome)

    decision = routes.choose(second)
    assert decision.reason is not Reason.SIBLING
    assert decision.hit_tokens == 0


async def test_after_its_first_token_the_document_is_credited_by_the_index() -> None:
    pool, routes, sim = fleet(H100)
    first, second = await plans(routes, pool, [f"{DOCUMENT} Question {i}" for i in range(2)])
    ticket = sim.send(first)
    sim.run()
    decision = routes.choose(second)

    assert (decision.worker, decision.reason) == (ticket.worker.id, Reason.LONGEST_PREFIX)
    assert decision.hit_tokens > 7000


async def closed_loop(sim: Fleet, todo: deque[Plan], concurrency: int) -> None:
    def next_one() -> None:
        if todo:
            sim.send(todo.popleft(), done=next_one)

    for _ in range(concurrency):
        next_one()
    sim.run()


@pytest.mark.parametrize("model", SPEEDS)
async def test_one_system_prompt_for_all_does_not_pull_everybody_to_one_worker(
    model: CostModel | None,
) -> None:
    pool, routes, sim = fleet(model, slots=8)
    texts = [f"I am user {i}. How do refunds work?" for i in range(400)]
    todo = deque(await plans(routes, pool, texts, SYSTEM))
    last = todo[-1]
    await closed_loop(sim, todo, 32)
    served = {worker_id: engine.served for worker_id, engine in sim.engines.items()}

    assert sum(served.values()) == 400
    assert max(served.values()) <= 160, served
    hits = [c.hit_tokens for c in routes.choose(last).input.candidates]
    assert min(hits) >= 2000
    assert is_idle(pool)


@pytest.mark.parametrize("model", SPEEDS)
async def test_no_worker_queues_for_long_while_another_is_idle(model: CostModel | None) -> None:
    pool, routes, sim = fleet(model, slots=8)
    texts = [f"I am user {i}. How do refunds work?" for i in range(200)]
    await closed_loop(sim, deque(await plans(routes, pool, texts, SYSTEM)), 32)
    idle = {w: engine.idle_while_queue_elsewhere_s for w, engine in sim.engines.items()}

    # A copy of the system prompt costs a CPU six seconds: waiting that long for one is right.
    assert max(idle.values()) <= max(1.0, 2000 * (model or H100).token_s), idle


async def test_a_conversation_stays_where_it_is_and_predictions_hold() -> None:
    pool, routes, sim = fleet(H100)
    history = "".join(Random(3).choices("abcdefgh ", k=3000))
    workers, misses = set(), []
    for turn in range(8):
        history += f" turn {turn} " + "x" * 200
        plan = await routes.plan(pool, chat(history), in_full=True)
        ticket = sim.send(plan)
        sim.run()
        workers.add(ticket.worker.id)
        misses.append((ticket.observed_hit_tokens or 0) - ticket.predicted_hit_tokens)

    assert len(workers) == 1
    assert misses == [0] * 8
    assert ticket.ttft_s is not None
    assert ticket.predicted_ttft_s == pytest.approx(ticket.ttft_s, rel=0.5)
