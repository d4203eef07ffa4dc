"""What is learned from an answer: hit tokens, speeds, token counts, and what teaches nothing."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.routing.dispatch import Dispatcher, Inbound, Outcome, Plan, Ticket, Usage
from gateway.routing.pool import Pool
from tests.gateway.routing_parts import (
    BLOCK,
    Clock,
    chat,
    dispatcher,
    hold,
    is_idle,
    make_pool,
)


def admit(routes: Dispatcher, plan: Plan, exclude: tuple[str, ...] = ()) -> Ticket:
    return routes.admit(plan, routes.choose(plan, exclude))


def serve(ticket: Ticket, clock: Clock, ttft_s: float, **usage: Any) -> None:
    clock.now_s += ttft_s
    ticket.first_token()
    ticket.finish(Outcome.OK, Usage(**usage))


async def warm_ticket(mode: str) -> tuple[Pool, Clock, Dispatcher, Plan]:
    pool, clock = make_pool(1, mode=mode), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("hello " * 100))
    hold(pool, "w0", plan.prompt)
    return pool, clock, routes, plan


async def test_predictions_stand_beside_what_was_observed() -> None:
    _, clock, routes, plan = await warm_ticket("exact")
    ticket = admit(routes, plan)
    serve(ticket, clock, 0.25, prompt_tokens=plan.num_tokens, completion_tokens=5, cached_tokens=64)

    assert ticket.predicted_hit_tokens > 64
    assert ticket.observed_hit_tokens == 64
    assert ticket.ttft_s == pytest.approx(0.25)
    assert 0.0 < ticket.predicted_ttft_s < 0.25


async def test_a_worker_that_reports_less_than_predicted_loses_the_rest_of_the_chain() -> None:
    pool, clock, routes, plan = await warm_ticket("exact")
    ticket = admit(routes, plan)
    serve(ticket, clock, 0.1, prompt_tokens=plan.num_tokens, completion_tokens=2, cached_tokens=64)

    assert routes.choose(plan).hit_tokens == 64
    assert pool.workers["w0"].reports_cached


@pytest.mark.parametrize("cached", [0, None])
async def test_a_worker_that_never_reported_a_hit_is_not_corrected_by_its_silence(
    cached: int | None,
) -> None:
    _, clock, routes, plan = await warm_ticket("exact")
    before = routes.choose(plan).hit_tokens
    serve(
        admit(routes, plan),
        clock,
        0.1,
        prompt_tokens=plan.num_tokens,
        completion_tokens=2,
        cached_tokens=cached,
    )

    assert routes.choose(plan).hit_tokens == before


async def test_other_token_counts_than_ours_teach_nothing_and_end_in_disbelief() -> None:
    pool, clock, routes, plan = await warm_ticket("exact")
    model = pool.workers["w0"].learner.model
    for _ in range(3):
        assert routes.choose(plan).hit_tokens > 0
        ticket = admit(routes, plan)
        serve(
            ticket,
            clock,
            9.0,
            prompt_tokens=plan.num_tokens + 7,
            completion_tokens=1,
            cached_tokens=16,
        )
    assert pool.workers["w0"].parity == 0
    assert pool.workers["w0"].learner.model == model
    decision = routes.choose(plan)
    assert (decision.hit_tokens, decision.mode) == (0, "text")


@pytest.mark.parametrize(
    "body",
    [{"prompt": ["a" * 200, "b" * 200]}, {"echo": True}, {"prompt_logprobs": 0}, {"n": 4}],
    ids=["several prompts", "echo", "prompt logprobs", "several choices"],
)
async def test_counts_that_are_not_of_the_one_prompt_read_are_not_compared(
    body: dict[str, Any],
) -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    inbound = Inbound("completions", {"prompt": "a" * 200, "stream": True, **body}, {}, "m")
    plan = await routes.plan(pool, inbound)
    hold(pool, "w0", plan.prompt)
    pool.workers["w0"].reports_cached = True
    model = pool.workers["w0"].learner.model
    before = routes.choose(plan).hit_tokens
    for _ in range(5):
        ticket = admit(routes, plan)
        serve(ticket, clock, 1.0, prompt_tokens=400, completion_tokens=9, cached_tokens=0)

    assert pool.workers["w0"].parity == -1
    assert pool.workers["w0"].learner.model == model
    assert routes.choose(plan).hit_tokens == before > 0


async def test_speed_is_learned_from_undisturbed_requests_only() -> None:
    pool, clock = make_pool(1, model=None), Clock()
    routes = dispatcher(pool, clock)
    learner = pool.workers["w0"].learner
    usage = {"completion_tokens": 2, "cached_tokens": 0}

    async def cold(text: str) -> tuple[Plan, Ticket]:
        plan = await routes.plan(pool, chat(text * 50))
        return plan, admit(routes, plan)

    first, leading = await cold("one two ")
    second, queued = await cold("three four ")
    serve(queued, clock, 1.0, prompt_tokens=second.num_tokens, **usage)
    assert learner.model is None, "it found a queue"
    leading.finish(Outcome.UPSTREAM_RESET)
    retried = admit(routes, first)
    serve(retried, clock, 1.0, prompt_tokens=first.num_tokens, **usage)
    assert learner.model is None, "it was a retry"
    third, mispredicted = await cold("five six ")
    serve(
        mispredicted,
        clock,
        1.0,
        prompt_tokens=third.num_tokens,
        completion_tokens=2,
        cached_tokens=160,
    )
    assert learner.model is None, "its hit tokens were not as predicted"
    fourth, clean = await cold("seven eight ")
    serve(clean, clock, 1.0, prompt_tokens=fourth.num_tokens, **usage)
    assert learner.model is not None
    assert 0.5 < learner.model.token_s * fourth.num_tokens < 2.0


async def test_an_answer_in_one_piece_has_no_ttft_but_ends_its_prefill() -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("hello " * 50, stream=False))
    ticket = admit(routes, plan)
    clock.now_s += 100.0
    assert ticket.worker.books.overdue_s(clock.now_s) == 0.0
    ticket.finish(Outcome.OK, Usage(plan.num_tokens, 40, 0))

    assert ticket.ttft_s is None
    assert is_idle(pool)


@pytest.mark.parametrize("why", ["retried", "queued", "mispredicted", "honest"])
async def test_times_of_disturbed_requests_teach_neither_prefill_nor_decode(why: str) -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    learner = pool.workers["w0"].learner
    before = learner.model
    plan = await routes.plan(pool, chat("hello " * 100))
    plan.attempts = int(why == "retried")
    plan.queued = why == "queued"
    ticket = admit(routes, plan)
    clock.now_s += 9.0
    ticket.first_token()
    clock.now_s += 9.0
    cached = 320 if why == "mispredicted" else 0
    ticket.finish(Outcome.OK, Usage(plan.num_tokens, 100, cached))
    assert (learner.model == before) == (why != "honest")
    if learner.model is not None and before is not None and why == "honest":
        assert learner.model.token_s > before.token_s
        assert learner.model.step_s > before.step_s


async def test_a_long_decode_teaches_the_step_and_the_mean_length() -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    worker = pool.workers["w0"]
    before = worker.learner.model
    assert before is not None
    for _ in range(30):
        plan = await routes.plan(pool, chat("hello " * 50))
        ticket = admit(routes, plan)
        ticket.first_token()
        clock.now_s += 99 * 2 * before.step_s
        ticket.finish(Outcome.OK, Usage(plan.num_tokens, 100, 0))
    after = worker.learner.model
    assert after is not None

    assert 1.5 < after.step_s / before.step_s < 2.5
    assert pool.output_length.mean_tokens < 200.0


async def test_a_generic_servers_own_way_of_counting_is_no_reason_for_disbelief() -> None:
    pool, clock = make_pool(1, engine="openai", mode="approximate"), Clock()
    routes = dispatcher(pool, clock)
    for _ in range(4):
        plan = await routes.plan(pool, chat("Tell me all about block hashes. " * 8))
        serve(admit(routes, plan), clock, 0.1, prompt_tokens=7, completion_tokens=1)

    assert pool.workers["w0"].parity == -1
    assert admit(routes, plan).predicted_hit_tokens == (plan.num_tokens - 1) // BLOCK * BLOCK


async def corrected(*, cleared: bool) -> tuple[Pool, Plan]:
    """An event-fed worker that lost a prompt and announced it anew while serving it."""
    pool, clock, routes, plan = await warm_ticket("exact")
    worker = pool.workers["w0"]
    worker.reports_cached = True
    ticket = admit(routes, plan)
    assert ticket.predicted_hit_tokens > 64
    clock.now_s += 0.1
    assert pool.index is not None
    if cleared:
        pool.index.clear("w0")
    hold(pool, "w0", plan.prompt)
    worker.last_event_s = clock.now_s
    serve(ticket, clock, 0.1, prompt_tokens=plan.num_tokens, completion_tokens=5, cached_tokens=0)
    return pool, plan


async def test_blocks_announced_while_a_request_ran_are_not_taken_away_by_its_report() -> None:
    pool, plan = await corrected(cleared=True)
    assert pool.index is not None

    assert pool.index.match(plan.hashes or ())["w0"].total == len(plan.hashes or ()) * BLOCK


async def test_a_stale_copy_beside_an_announced_one_does_not_outlive_its_removal() -> None:
    pool, plan = await corrected(cleared=False)
    assert pool.index is not None
    hashes = plan.hashes or ()
    assert pool.index.match(hashes)["w0"].total == len(hashes) * BLOCK
    pool.index.remove("w0", reversed(hashes))

    # The first block is never taken by one observation.
    assert pool.index.match(hashes)["w0"].total == BLOCK
