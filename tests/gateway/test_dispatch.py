"""From a client's body to a worker and back: real reader, real index, real books."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gateway.routing.choose import Reason
from gateway.routing.dispatch import Dispatcher, Inbound, Outcome, Plan, Ticket, Usage
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
