"""From a client's body to a worker and back: real reader, real index, real books."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gateway.routing.choose import Reason
from gateway.routing.dispatch import Dispatcher, Inbound, Outcome, Plan, Ticket, Usage
from gateway.routing.pool import Pool
from tests.gateway.routing_parts import (
    BLOCK,
    Clock,
    chat,
    dispatcher,
    hold,
    ids,
    is_idle,
    make_pool,
)


def admit(routes: Dispatcher, plan: Plan, exclude: tuple[str, ...] = ()) -> Ticket:
    return routes.admit(plan, routes.choose(plan, exclude))


def serve(ticket: Ticket, clock: Clock, ttft_s: float, **usage: Any) -> None:
    clock.now_s += ttft_s
    ticket.first_token()
    ticket.finish(Outcome.OK, Usage(**usage))


async def test_models_and_aliases_lead_to_their_pool() -> None:
    pool = make_pool(1, aliases={"gpt": "m"})
    routes = Dispatcher([pool])

    assert routes.pool_for("m") is pool
    assert routes.pool_for("gpt") is pool
    assert routes.pool_for("other") is None


async def test_a_held_prompt_goes_to_its_holder_and_the_prediction_is_exact() -> None:
    pool, clock = make_pool(4), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("Tell me all about block hashes. " * 8))
    assert plan.prompt is not None
    assert plan.tokens == "exact"
    hold(pool, "w2", plan.prompt)
    ticket = admit(routes, plan)

    assert ticket.worker.id == "w2"
    assert ticket.decision.reason is Reason.LONGEST_PREFIX
    assert ticket.predicted_hit_tokens == (plan.num_tokens - 1) // BLOCK * BLOCK
    assert ticket.predicted_ttft_s > 0.0


async def test_a_prompt_of_whole_blocks_is_never_predicted_as_a_full_hit() -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, ids(list(range(4 * BLOCK))))
    hold(pool, "w0", plan.prompt)

    assert routes.choose(plan).hit_tokens == 3 * BLOCK


async def test_reading_and_choosing_book_nothing() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("hello " * 50))
    routes.choose(plan)

    assert is_idle(pool)


async def test_admission_is_charged_at_once_and_released_at_the_end() -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("hello " * 50))
    ticket = admit(routes, plan)
    books = ticket.worker.books
    assert (books.in_flight, books.queued_tokens) == (1, plan.num_tokens)
    assert books.queued_s == pytest.approx(ticket.decision.estimate().prefill_s)

    ticket.first_token()
    assert (books.in_flight, books.queued_tokens, books.num_decoding) == (1, 0, 1)
    ticket.finish(Outcome.OK)
    assert is_idle(pool)


@pytest.mark.parametrize("outcome", list(Outcome))
@pytest.mark.parametrize("first_token", [False, True])
async def test_every_end_releases_exactly_once_however_often_it_is_told(
    outcome: Outcome, first_token: bool
) -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    other = admit(routes, await routes.plan(pool, chat("another prompt " * 20)))
    ticket = admit(routes, await routes.plan(pool, chat("a cold prompt " * 50)))
    if first_token:
        ticket.first_token()
    ticket.finish(outcome)
    ticket.finish(Outcome.OK, Usage(1, 1, 1))
    ticket.first_token()

    assert ticket.outcome is outcome
    assert sum(worker.books.in_flight for worker in pool.workers.values()) == 1
    other.finish(Outcome.CANCELLED)
    assert is_idle(pool)


async def test_nobody_eligible_is_told_by_the_decision_and_refused_by_admit() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    pool.drain("w0")
    plan = await routes.plan(pool, chat("hello"))
    decision = routes.choose(plan, exclude={"w1"})
    assert decision.worker is None
    assert [c.why for c in decision.input.candidates] == ["draining", "excluded"]
    with pytest.raises(LookupError, match="no eligible worker"):
        routes.admit(plan, decision)


async def test_a_retry_goes_to_another_worker() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("hello " * 99))
    hold(pool, "w0", plan.prompt)
    first = admit(routes, plan)
    first.finish(Outcome.CONNECT_FAILED)
    second = admit(routes, plan, exclude=("w0",))

    assert (first.worker.id, second.worker.id) == ("w0", "w1")
    second.finish(Outcome.OK)
    assert is_idle(pool)


async def test_failures_eject_a_worker_but_never_the_last_one() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("hello " * 99))
    hold(pool, "w0", plan.prompt)
    for _ in range(3):
        admit(routes, plan, exclude=("w1",)).finish(Outcome.UPSTREAM_RESET)
    decision = routes.choose(plan)
    assert [c.why for c in decision.input.candidates] == ["ejected", "ok"]
    assert decision.worker == "w1"

    pool.drain("w1")
    decision = routes.choose(plan)
    assert (decision.worker, decision.input.candidates[0].why) == ("w0", "panic")


async def test_an_ejected_worker_is_tried_by_one_request_and_comes_back() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("hello " * 99))
    hold(pool, "w0", plan.prompt)
    for _ in range(3):
        admit(routes, plan, exclude=("w1",)).finish(Outcome.CONNECT_FAILED)
    clock.now_s += 60.0
    trial = admit(routes, plan)
    assert trial.worker.id == "w0"
    assert admit(routes, plan).worker.id == "w1"
    trial.finish(Outcome.CLIENT_CLOSED)
    second = admit(routes, plan)
    assert second.worker.id == "w0"
    second.finish(Outcome.OK)
    assert admit(routes, plan).worker.id == "w0"
    assert admit(routes, plan).worker.id == "w0"


@pytest.mark.parametrize(
    "outcome",
    [Outcome.FIRST_BYTE_TIMEOUT, Outcome.CLIENT_CLOSED, Outcome.CANCELLED, Outcome.REJECTED],
)
async def test_deadlines_clients_and_bad_requests_are_no_fault_of_the_worker(
    outcome: Outcome,
) -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("hello"))
    for _ in range(10):
        admit(routes, plan).finish(outcome)

    assert pool.workers["w0"].health.bias(clock.now_s) == 1.0
    assert pool.workers["w0"].health.may_route(clock.now_s)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": "nonsense"},
        {"messages": None},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ messages }}"},
    ],
    ids=["image", "no list", "no messages", "no unicode", "own template"],
)
async def test_an_unreadable_prompt_is_routed_by_its_text(body: dict[str, Any]) -> None:
    pool, clock = make_pool(4), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, Inbound("chat", {"model": "m", **body}, {}, "m"))
    workers = {routes.choose(plan).worker for _ in range(5)}

    assert plan.unread
    assert plan.tokens == "estimated"
    assert sum(pool.unread_prompts.values()) == 1
    assert routes.choose(plan).reason is Reason.NO_TOKENS_HOME
    assert workers == {pool.ring.order(plan.key.ring_key)[0]}


async def test_an_unreadable_completion_prompt_is_no_error() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    prompts: list[Any] = [None, {}, [], [[]], ["", "x"], [-1], [2**40], [None], 7]
    for prompt in prompts:
        inbound = Inbound("completions", {"model": "m", "prompt": prompt}, {}, "m")
        ticket = admit(routes, await routes.plan(pool, inbound))
        ticket.finish(Outcome.REJECTED)
    assert is_idle(pool)


async def test_a_pool_without_tokenizer_spreads_by_hash_within_the_load_bound() -> None:
    pool, clock = make_pool(4, reads=False), Clock()
    routes = dispatcher(pool, clock)
    tickets = []
    for _ in range(40):
        plan = await routes.plan(pool, chat("the same text for all"))
        tickets.append(admit(routes, plan))
    loads = [worker.books.in_flight for worker in pool.workers.values()]

    assert {t.decision.reason for t in tickets} == {
        Reason.NO_TOKENS_HOME,
        Reason.NO_TOKENS_SPILL,
    }
    assert max(loads) <= 1.25 * 41 / 4 + 1
    for ticket in tickets:
        ticket.finish(Outcome.OK)
    assert is_idle(pool)


async def test_strict_affinity_keeps_a_session_on_one_worker_whatever_is_cached() -> None:
    pool, clock = make_pool(4, is_strict=True), Clock()
    routes = dispatcher(pool, clock)
    headers = {"x-session-id": "s1"}
    plans = [await routes.plan(pool, chat(f"turn {t} " * 50, headers=headers)) for t in range(9)]
    home = pool.ring.order(plans[0].key.ring_key)[0]
    for plan in plans:
        for worker_id in pool.workers:
            if worker_id != home:
                hold(pool, worker_id, plan.prompt)
        decision = routes.choose(plan)

        assert (decision.worker, decision.reason) == (home, Reason.STRICT_HOME)


async def test_long_unknown_text_is_tokenized_in_a_thread_and_known_text_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    assert pool.reader is not None
    threads: list[int] = []
    learn = pool.reader.learn

    def watched(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return learn(*args)

    monkeypatch.setattr(pool.reader, "learn", watched)
    await routes.plan(pool, chat("short and new"))
    await routes.plan(pool, chat("long and new " * 1000))
    await routes.plan(pool, chat("long and new " * 1000))
    here = threading.get_ident()
    assert threads[0] == here
    assert threads[1] != here
    assert len(threads) == 2


async def test_a_salt_separates_prompts_as_it_does_in_the_engine() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plain = await routes.plan(pool, chat("hello " * 50))
    hold(pool, "w0", plain.prompt)
    salted = await routes.plan(pool, chat("hello " * 50, cache_salt="s"))

    assert routes.choose(plain).hit_tokens > 0
    assert routes.choose(salted).hit_tokens == 0


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


async def test_whatever_reading_a_prompt_raises_the_request_is_routed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)

    def broken(*_: Any) -> Any:
        raise RuntimeError("tokenizer")

    monkeypatch.setattr(pool.reader, "learn", broken)
    for text in ("short", "long " * 1000):
        plan = await routes.plan(pool, chat(text), in_full=True)
        assert plan.unread == "RuntimeError"
        assert routes.choose(plan).worker is not None
    assert pool.unread_prompts == {"RuntimeError": 2}


async def test_prompts_shorter_than_a_block_have_no_home_and_spread() -> None:
    pool, clock = make_pool(4), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, ids([1, 2, 3]))
    workers = {routes.choose(plan).worker for _ in range(4)}

    assert workers == set(pool.workers)


async def test_a_worker_without_events_is_credited_from_its_first_token_on() -> None:
    pool, clock = make_pool(3, mode="approximate"), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("a story " * 100))
    ticket = admit(routes, plan)
    ticket.first_token()
    decision = routes.choose(plan)

    assert decision.worker == ticket.worker.id
    assert (decision.hit_tokens, decision.mode) == (
        (plan.num_tokens - 1) // BLOCK * BLOCK,
        "approximate",
    )


async def test_a_failed_request_leaves_nothing_believed_on_a_worker_without_events() -> None:
    pool, clock = make_pool(3, mode="approximate"), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("a story " * 100))
    admit(routes, plan).finish(Outcome.CONNECT_FAILED)

    assert routes.choose(plan).hit_tokens == 0


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


async def test_cancelling_a_plan_while_it_reads_leaves_nothing_behind() -> None:
    pool, clock = make_pool(1), Clock()
    routes = dispatcher(pool, clock)
    task = asyncio.ensure_future(routes.plan(pool, chat("long and new " * 5000), in_full=True))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_idle(pool)


async def test_requests_that_all_workers_hold_take_turns_from_a_seeded_start() -> None:
    async def turns(seed: int) -> list[str | None]:
        pool = make_pool(4)
        routes = Dispatcher([pool], clock=Clock(), seed=seed)
        plan = await routes.plan(pool, ids(list(range(4 * BLOCK))))
        for worker_id in pool.workers:
            hold(pool, worker_id, plan.prompt)
        return [routes.choose(plan).worker for _ in range(8)]

    first = await turns(5)
    assert sorted(first[:4], key=str) == ["w0", "w1", "w2", "w3"]
    assert first[4:] == first[:4]
    assert await turns(5) == first
    assert len({tuple(await turns(seed)) for seed in range(20)}) == 4


async def test_every_attempt_is_told_once_after_its_books_are_closed() -> None:
    pool, clock = make_pool(2), Clock()
    told: list[tuple[Plan, Ticket, int]] = []

    def on_finish(plan: Plan, ticket: Ticket) -> None:
        told.append((plan, ticket, ticket.worker.books.in_flight))

    routes = Dispatcher([pool], clock=clock, seed=1, on_finish=on_finish)
    plan = await routes.plan(pool, chat("hello " * 50))
    failed = admit(routes, plan)
    failed.finish(Outcome.CONNECT_FAILED)
    served = admit(routes, plan, (failed.worker.id,))
    serve(served, clock, 0.1, prompt_tokens=plan.num_tokens, cached_tokens=7)
    served.finish(Outcome.CANCELLED)

    assert told == [(plan, failed, 0), (plan, served, 0)]
    assert served.observed_hit_tokens == 7


async def test_a_generic_servers_own_way_of_counting_is_no_reason_for_disbelief() -> None:
    pool, clock = make_pool(1, engine="openai", mode="approximate"), Clock()
    routes = dispatcher(pool, clock)
    for _ in range(4):
        plan = await routes.plan(pool, chat("Tell me all about block hashes. " * 8))
        serve(admit(routes, plan), clock, 0.1, prompt_tokens=7, completion_tokens=1)

    assert pool.workers["w0"].parity == -1
    assert admit(routes, plan).predicted_hit_tokens == (plan.num_tokens - 1) // BLOCK * BLOCK
