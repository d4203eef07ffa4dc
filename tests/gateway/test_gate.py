"""Requests wait in the gateway while every worker has enough to do, and never otherwise."""

from __future__ import annotations

import asyncio

import pytest

from gateway.routing.dispatch import (
    Decision,
    GateFull,
    GateTimeout,
    Outcome,
    Plan,
    Ticket,
    Usage,
)
from gateway.routing.gate import MAX_ADMITTED
from gateway.routing.others import OthersLoad
from tests.gateway.gate_parts import SLOW, Waiters, settled
from tests.gateway.routing_parts import is_idle, make_pool


async def test_with_a_free_worker_nothing_waits_and_no_timer_is_set() -> None:
    w = Waiters(2)
    await w.send(300)
    plan = await w.plan()

    assert w.routes.is_open(plan, w.routes.choose(plan))
    assert w.timers.waiting == []


async def test_an_idle_worker_takes_a_prompt_that_would_never_fit_beside_another() -> None:
    w = Waiters(1)
    w.pool.workers["w0"].capacity_tokens = 100
    plan = await w.plan(300)

    assert w.routes.is_open(plan, w.routes.choose(plan))


async def test_work_below_the_bound_does_not_make_a_request_wait() -> None:
    w = Waiters(1)
    await w.send(190)
    plan = await w.plan()

    assert w.routes.is_open(plan, w.routes.choose(plan))


async def test_one_worker_with_room_is_enough() -> None:
    w = Waiters(2)
    w.pool.drain("w1")
    await w.send(300)
    w.pool.drain("w1", draining=False)
    await w.send(100)
    plan = await w.plan()

    assert w.routes.is_open(plan, w.routes.choose(plan))


@pytest.mark.parametrize("outcome", [None, *Outcome], ids=str)
async def test_a_request_is_woken_by_the_first_token_or_any_end_of_another(
    outcome: Outcome | None,
) -> None:
    w = Waiters(1)
    first = await w.send(300)
    task = await w.wait()
    await settled(w.timers)
    assert not task.done()

    w.clock.now_s += 0.1
    if outcome is None:
        first.first_token()
    else:
        first.finish(outcome)
    await settled(w.timers)

    ticket = task.result()
    assert ticket is not None
    assert ticket.worker.id == "w0"
    assert ticket._plan.queued
    assert ticket._plan.queued_s == pytest.approx(0.1)
    assert w.timers.num_set == 0
    ticket.finish(Outcome.OK)
    first.finish(Outcome.OK)
    assert is_idle(w.pool)


async def test_a_request_waits_for_memory_until_another_one_ends() -> None:
    w = Waiters(1)
    w.pool.workers["w0"].capacity_tokens = 1000
    first = await w.send(160)
    first.first_token()
    task = await w.wait(600)
    await settled(w.timers)
    assert not task.done()

    first.finish(Outcome.OK)
    await settled(w.timers)
    assert task.done()


async def test_a_queue_that_shrinks_with_time_lets_a_request_go_without_an_event() -> None:
    w = Waiters(1)
    await w.send(300)
    task = await w.wait()
    await settled(w.timers, 0.9)
    assert not task.done()

    await settled(w.timers, 0.2)
    assert task.done()


async def test_while_every_worker_is_busy_nothing_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = Waiters(2)
    tickets = [await w.send(9000), await w.send(9000), await w.send(100)]
    await w.wait()
    num_chosen = 0
    choose = w.routes.gate._choose

    def counted(plan: Plan) -> Decision:
        nonlocal num_chosen
        num_chosen += 1
        return choose(plan)

    monkeypatch.setattr(w.routes.gate, "_choose", counted)
    tickets[2].finish(Outcome.OK)
    await settled(w.timers)
    assert num_chosen == 0
    tickets[0].finish(Outcome.OK)
    await settled(w.timers)
    assert num_chosen > 0


async def test_load_of_other_gateways_makes_requests_wait_and_go_when_it_is_gone() -> None:
    w = Waiters(1)
    w.pool.others = OthersLoad()
    worker = w.pool.workers["w0"]
    # What others have in flight has no tickets here, so no event of this process tells its end.
    charge = worker.books.charge(
        w.clock.now_s, prompt_tokens=300, uncached_tokens=300, prefill_s=300.0
    )
    task = await w.wait()
    worker.books.finish(charge)
    await settled(w.timers, 0.06)

    assert task.done()


async def test_a_request_that_waited_past_its_deadline_is_refused_with_when_to_come_back() -> None:
    w = Waiters(1)
    w.pool.deadline_s = 5.0
    await w.send(5000)
    task = await w.wait()
    await settled(w.timers, 4.9)
    assert not task.done()

    await settled(w.timers, 0.2)
    with pytest.raises(GateTimeout, match="within 5 s") as caught:
        task.result()
    assert caught.value.retry_after_s == pytest.approx(43.0, abs=0.2)
    assert w.num_waiting == 0
    assert w.timers.num_set == 0
    assert w.routes.gate.num_timeouts == {"chat": 1}


async def test_no_more_wait_than_may() -> None:
    w = Waiters(1)
    w.pool.max_queue = 2
    await w.send(5000)
    tasks = [await w.wait(), await w.wait()]
    plan = await w.plan()

    with pytest.raises(GateFull) as caught:
        await w.routes.wait(plan, w.routes.choose(plan))
    assert caught.value.num_waiting == 2
    assert caught.value.retry_after_s == pytest.approx(48.0)
    assert w.routes.gate.num_full == {"chat": 1}
    tasks[0].cancel()
    await settled(w.timers)
    await w.wait()
    assert w.num_waiting == 2


async def test_a_client_that_leaves_frees_its_place() -> None:
    w = Waiters(1)
    first = await w.send(300)
    tasks = [await w.wait() for _ in range(2)]
    tasks[0].cancel()
    await settled(w.timers)
    assert w.num_waiting == 1

    first.finish(Outcome.OK)
    await settled(w.timers)
    assert tasks[0].cancelled()
    ticket = tasks[1].result()
    assert ticket is not None
    ticket.finish(Outcome.OK)
    assert is_idle(w.pool)
    assert w.timers.num_set == 0


@pytest.mark.parametrize("order", ["admitted, then left", "left, then admitted"])
async def test_a_client_that_leaves_in_the_moment_it_is_admitted_leaves_no_charge(
    order: str,
) -> None:
    w = Waiters(1)
    first = await w.send(300)
    task = await w.wait()
    first.finish(Outcome.OK)
    if order == "admitted, then left":
        w.timers.advance()
        task.cancel()
    else:
        task.cancel()
        w.timers.advance()
    await settled(w.timers)

    assert task.cancelled()
    assert is_idle(w.pool)
    assert w.num_waiting == 0
    assert w.timers.num_set == 0


async def test_a_deadline_in_the_moment_the_client_leaves_harms_nobody() -> None:
    w = Waiters(1)
    await w.send(9000)
    task = await w.wait()
    task.cancel()
    w.timers.advance(w.pool.deadline_s)
    await settled(w.timers)

    assert task.cancelled()
    assert w.num_waiting == 0


async def test_when_the_last_worker_is_gone_those_who_wait_are_told() -> None:
    w = Waiters(1)
    first = await w.send(300)
    task = await w.wait()
    w.pool.drain("w0")
    first.finish(Outcome.UPSTREAM_RESET)
    await settled(w.timers)

    assert task.result() is None
    assert w.num_waiting == 0


async def test_when_one_of_two_workers_dies_those_who_wait_go_to_the_other() -> None:
    w = Waiters(2)
    first, second = await w.send(3000), await w.send(3000)
    assert {first.worker.id, second.worker.id} == {"w0", "w1"}
    task = await w.wait()
    w.pool.remove(first.worker.id)
    second.first_token()
    first.finish(Outcome.CONNECT_FAILED)
    await settled(w.timers)

    ticket = task.result()
    assert ticket is not None
    assert ticket.worker is second.worker


async def test_a_worker_that_comes_back_is_used_at_once() -> None:
    w = Waiters(2)
    w.pool.drain("w1")
    await w.send(3000)
    task = await w.wait()
    w.pool.drain("w1", draining=False)
    w.routes.gate.changed(w.pool)
    await settled(w.timers)

    ticket = task.result()
    assert ticket is not None
    assert ticket.worker.id == "w1"


async def test_nobody_passes_those_who_wait() -> None:
    w = Waiters(1)
    first = await w.send(300)
    task = await w.wait()
    first.first_token()
    # A worker is free by now, and the one who waits has not been told yet.
    plan = await w.plan()
    assert not w.routes.is_open(plan, w.routes.choose(plan))
    await settled(w.timers)

    assert task.done()


async def test_a_prompt_too_large_for_the_free_memory_holds_up_small_ones_only_at_last() -> None:
    w = Waiters(1)
    w.pool.workers["w0"].capacity_tokens = 2000
    first = await w.send(160)
    first.first_token()
    large = await w.wait(1600)
    small: list[Ticket] = []
    for _ in range(2):
        task = await w.wait(160)
        await settled(w.timers)
        ticket = task.result()
        assert ticket is not None
        small.append(ticket)
        ticket.first_token()
    assert not large.done()
    await settled(w.timers, w.pool.deadline_s / 2 + 1)
    late = await w.wait(160)
    await settled(w.timers)
    assert not late.done()

    for ticket in (first, *small):
        ticket.finish(Outcome.OK)
    await settled(w.timers)
    assert large.done()


async def test_many_who_wait_are_all_served_as_workers_get_free() -> None:
    w = Waiters(2)
    tickets = [await w.send(300), await w.send(300)]
    tasks = [await w.wait() for _ in range(30)]
    for _ in range(200):
        if all(task.done() for task in tasks):
            break
        for ticket in tickets:
            ticket.finish(Outcome.OK)
        await settled(w.timers, 0.01)
        tickets = [t for task in tasks if task.done() and (t := task.result()) is not None]

    assert all(task.done() for task in tasks)
    for ticket in tickets:
        ticket.finish(Outcome.OK)
    assert is_idle(w.pool)
    assert w.timers.num_set == 0


@pytest.mark.parametrize("cause", ["drained", "removed"])
async def test_those_who_wait_for_a_worker_that_is_taken_out_do_not_wait_for_its_last_request(
    cause: str,
) -> None:
    w = Waiters(1)
    first = await w.send(3000)
    task = await w.wait()
    if cause == "drained":
        w.pool.drain("w0")
    else:
        w.pool.remove("w0")
    w.routes.gate.changed(w.pool)
    await settled(w.timers)

    assert task.result() is None
    first.finish(Outcome.OK)


async def test_a_crowd_is_let_go_in_turns_that_leave_time_for_others() -> None:
    w = Waiters(1)
    first = await w.send(300)
    tasks = [await w.wait(16) for _ in range(3 * MAX_ADMITTED)]
    w.routes.rollout.mode = "least_load"
    first.first_token()
    num_done = []
    while not all(task.done() for task in tasks):
        w.timers.waiting, due = [], w.timers.waiting
        for timer in due:
            if timer.due_s <= w.clock.now_s and not timer.is_cancelled:
                timer.call()
            else:
                w.timers.waiting.append(timer)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        num_done.append(sum(task.done() for task in tasks))

    assert num_done == [MAX_ADMITTED, 2 * MAX_ADMITTED, 3 * MAX_ADMITTED]


async def test_by_least_load_nobody_waits_and_those_who_do_are_let_go() -> None:
    w = Waiters(1)
    first = await w.send(300)
    task = await w.wait()
    w.routes.rollout.mode = "least_load"
    plan = await w.plan()
    assert w.routes.is_open(plan, w.routes.choose(plan))

    first.first_token()
    await settled(w.timers)
    assert task.done()


async def test_a_worker_of_unknown_speed_is_full_only_by_its_memory() -> None:
    w = Waiters(pool=make_pool(1, model=None))
    first = await w.send(5000)
    plan = await w.plan()
    assert w.routes.is_open(plan, w.routes.choose(plan))

    w.pool.workers["w0"].capacity_tokens = 5000
    task = await w.wait()
    first.finish(Outcome.OK)
    await settled(w.timers)
    assert task.done()


async def test_what_waited_teaches_the_cost_model_nothing() -> None:
    w = Waiters(1)
    w.pool.workers["w0"].capacity_tokens = 1000
    first = await w.send(160)
    task = await w.wait(700)
    first.finish(Outcome.OK)
    await settled(w.timers)
    ticket = task.result()
    assert ticket is not None
    w.clock.now_s += 60.0
    ticket.first_token()
    ticket.finish(Outcome.OK, Usage(prompt_tokens=700, completion_tokens=1, cached_tokens=0))

    assert w.pool.workers["w0"].learner.model == SLOW


async def test_pools_wait_apart() -> None:
    w = Waiters(1)
    await w.send(3000)
    await w.wait()
    assert w.routes.gate.num_waiting("other") == 0
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await settled(w.timers)
    assert w.num_waiting == 0


async def test_requests_whose_time_is_over_at_once_leave_no_timer() -> None:
    w = Waiters(1)
    w.pool.deadline_s = 1.0
    ticket = await w.send(1000)
    tasks = [await w.wait() for _ in range(2)]
    await settled(w.timers, 1.5)

    assert all(isinstance(task.exception(), GateTimeout) for task in tasks)
    assert (w.num_waiting, w.timers.num_set) == (0, 0)
    ticket.finish(Outcome.OK)
