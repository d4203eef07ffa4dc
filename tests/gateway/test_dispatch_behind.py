"""Tokens that come behind their request: what is routed, booked, learned and released meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing import reading
from gateway.routing.choose import Reason
from gateway.routing.cost import CostModel
from gateway.routing.dispatch import Dispatcher, Outcome, Plan, Ticket, Usage
from gateway.routing.pool import Pool
from tests.gateway.routing_parts import BLOCK, H100, Clock, chat, hold, is_idle, make_pool

DOCUMENT = "The lane keeps every prompt warm, say the rules of the house. " * 130
FAST = CostModel(1e-6, 1e-15, 0.001, 1e-9)
OTHER = "Nobody has written down yet what the other document is about. " * 130


class Gate:
    """Holds a pool's tokenizer back until it is opened; may make it fail."""

    def __init__(self, pool: Pool) -> None:
        assert pool.reader is not None
        self._learn = pool.reader.learn
        self._open = threading.Event()
        self.error: Exception | None = None
        pool.reader.learn = self.learn  # type: ignore[method-assign, assignment]

    def learn(self, *args: Any) -> Any:
        assert self._open.wait(30.0)
        if self.error is not None:
            raise self.error
        return self._learn(*args)

    def open(self) -> None:
        self._open.set()


@contextmanager
def gated(pool: Pool) -> Iterator[Gate]:
    """Never leaves a thread behind, whatever a test does."""
    gate = Gate(pool)
    try:
        yield gate
    finally:
        gate.open()


async def settled(plan: Plan) -> None:
    deadline = time.monotonic() + 30.0
    while plan.is_behind:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def make(
    num_workers: int = 2, on_finish: Callable[[Plan, Ticket], None] | None = None, **options: Any
) -> tuple[Pool, Dispatcher, Clock]:
    pool, clock = make_pool(num_workers, **options), Clock()
    pool.chars_per_token = 1.0  # as a byte tokenizer's pool learns it
    return pool, Dispatcher([pool], clock=clock, seed=1, on_finish=on_finish), clock


async def test_unseen_text_is_routed_by_an_estimate_and_tokenized_meanwhile() -> None:
    pool, routes, _ = make()
    with gated(pool) as gate:
        plan = await routes.plan(pool, chat(DOCUMENT))
        assert (plan.is_behind, plan.prompt, plan.tokens) == (True, None, "estimated")
        ticket = routes.admit(plan, routes.choose(plan))
        books = ticket.worker.books
        estimated = books.queued_tokens
        assert abs(estimated - len(DOCUMENT)) < 0.05 * len(DOCUMENT)
        gate.open()
        await settled(plan)

    assert plan.prompt is not None
    assert plan.tokens == "exact"
    assert plan.num_tokens == plan.prompt.num_tokens == books.queued_tokens
    assert books.active_tokens == plan.num_tokens + 200
    ticket.finish(Outcome.OK)
    assert is_idle(pool)


async def test_half_known_prompts_route_to_their_holder_without_waiting() -> None:
    pool, routes, _ = make(4)
    first = await routes.plan(pool, chat(f"{DOCUMENT}{OTHER} First question"), in_full=True)
    hold(pool, "w2", first.prompt)
    with gated(pool):
        # The same message, so no known segment: only blocks of its text are known.
        plan = await routes.plan(pool, chat(f"{DOCUMENT}{OTHER} Another question " + "why " * 50))
        decision = routes.choose(plan)

        assert plan.is_behind
        assert (decision.worker, decision.reason) == ("w2", Reason.LONGEST_PREFIX)
        assert decision.hit_tokens > 0.9 * len(DOCUMENT + OTHER)


async def test_the_guessed_hit_is_corrected_before_it_is_compared() -> None:
    pool, routes, clock = make(1, mode="approximate")
    first = await routes.plan(pool, chat(f"{DOCUMENT} First question"), in_full=True)
    warm = routes.admit(first, routes.choose(first))
    warm.finish(Outcome.OK, Usage(first.num_tokens, 9, 0))
    plan = await routes.plan(pool, chat(f"{DOCUMENT} Second question {OTHER}"))
    ticket = routes.admit(plan, routes.choose(plan))
    await settled(plan)
    assert first.prompt is not None
    assert plan.prompt is not None
    shared = 0
    while first.prompt.block_hashes[shared] == plan.prompt.block_hashes[shared]:
        shared += 1

    assert 0 < ticket.predicted_hit_tokens <= shared * BLOCK
    clock.now_s += 0.5
    ticket.finish(Outcome.OK, Usage(plan.num_tokens, 9, shared * BLOCK))
    # What it computed is still believed to be there.
    assert routes.choose(plan).hit_tokens == (plan.num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("model", [H100, None])
async def test_siblings_of_an_unread_document_follow_its_leader(model: Any) -> None:
    pool, routes, _ = make(4, model=model)
    with gated(pool) as gate:
        plans = [await routes.plan(pool, chat(f"{DOCUMENT} Question {i}: why?")) for i in range(12)]
        tickets = [routes.admit(plan, routes.choose(plan)) for plan in plans]
        assert all(plan.is_behind for plan in plans)
        assert len({ticket.worker.id for ticket in tickets}) <= 2
        assert {t.decision.reason for t in tickets[1:]} >= {Reason.SIBLING}
        stranger = await routes.plan(pool, chat(OTHER))
        assert not any(c.pending_tokens for c in routes.choose(stranger).input.candidates)
        for ticket in tickets:
            ticket.finish(Outcome.CANCELLED)
        assert is_idle(pool)
        gate.open()
        for plan in (*plans, stranger):
            await settled(plan)
    assert is_idle(pool)
    assert not pool.pending_texts


async def test_a_leader_whose_tokens_arrive_leads_by_them_too() -> None:
    pool, routes, _ = make(4)
    plan = await routes.plan(pool, chat(f"{DOCUMENT} Question 1"))
    leader = routes.admit(plan, routes.choose(plan))
    await settled(plan)
    follower = await routes.plan(pool, chat(f"{DOCUMENT} Question 2"), in_full=True)

    assert routes.choose(follower).worker == leader.worker.id
    leader.finish(Outcome.CLIENT_CLOSED)
    assert is_idle(pool)


async def test_a_ticket_that_ends_before_its_tokens_learns_when_they_come() -> None:
    told: list[tuple[Plan, Ticket]] = []
    pool, routes, clock = make(
        2, mode="approximate", on_finish=lambda plan, ticket: told.append((plan, ticket))
    )
    with gated(pool) as gate:
        plan = await routes.plan(pool, chat(DOCUMENT))
        ticket = routes.admit(plan, routes.choose(plan))
        clock.now_s += 1.0
        ticket.finish(Outcome.OK, Usage(len(DOCUMENT), 10, 0))
        assert is_idle(pool)
        assert told == []
        assert (ticket.worker.parity, len(ticket.worker.mirror)) == (-1, 0)
        gate.open()
        await settled(plan)

    assert told == [(plan, ticket)]
    assert ticket.worker.parity == 0  # the template's own tokens were not counted above
    assert len(ticket.worker.mirror) > 0
    again = routes.choose(plan)
    assert (again.worker, again.hit_tokens) == (
        ticket.worker.id,
        (plan.num_tokens - 1) // BLOCK * BLOCK,
    )


async def test_tokens_for_a_worker_that_restarted_meanwhile_are_not_credited_to_it() -> None:
    pool, routes, _ = make(1, mode="approximate")
    with gated(pool) as gate:
        plan = await routes.plan(pool, chat(DOCUMENT))
        ticket = routes.admit(plan, routes.choose(plan))
        ticket.finish(Outcome.OK)
        ticket.worker.epoch = 7.0
        pool.forget(ticket.worker)
        gate.open()
        await settled(plan)

    assert routes.choose(plan).hit_tokens == 0


async def test_a_tokenizer_that_fails_behind_a_request_fails_nothing() -> None:
    told: list[Ticket] = []
    pool, routes, _ = make(2, on_finish=lambda _, ticket: told.append(ticket))
    with gated(pool) as gate:
        gate.error = RuntimeError("tokenizer")
        plan = await routes.plan(pool, chat(DOCUMENT))
        ticket = routes.admit(plan, routes.choose(plan))
        gate.open()
        await settled(plan)
    ticket.finish(Outcome.OK, Usage(100, 9, 0))

    assert plan.unread == "RuntimeError"
    assert pool.unread_prompts == {"RuntimeError": 1}
    assert told == [ticket]
    assert is_idle(pool)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.permutations(["first", "finish", "settle", "retry"]),
    outcome=st.sampled_from(list(Outcome)),
    fails=st.booleans(),
    mode=st.sampled_from(["exact", "approximate"]),
)
def test_whatever_comes_first_everything_is_released_and_told_once(
    steps: list[str], outcome: Outcome, fails: bool, mode: str
) -> None:
    async def run() -> None:
        told: list[Ticket] = []
        pool, routes, clock = make(2, mode=mode, on_finish=lambda _, ticket: told.append(ticket))
        with gated(pool) as gate:
            gate.error = RuntimeError() if fails else None
            plan = await routes.plan(pool, chat(DOCUMENT))
            tickets = [routes.admit(plan, routes.choose(plan))]
            for step in steps:
                clock.now_s += 0.1
                if step == "first":
                    tickets[-1].first_token()
                elif step == "finish":
                    tickets[-1].finish(outcome, Usage(10, 5, 3))
                elif step == "retry":
                    tickets[-1].finish(Outcome.CONNECT_FAILED)
                    tickets.append(routes.admit(plan, routes.choose(plan)))
                else:
                    gate.open()
                    await settled(plan)
            tickets[-1].finish(Outcome.CANCELLED)
        assert told == tickets
        assert is_idle(pool)
        assert not pool.pending_texts

    asyncio.run(run())


@asynccontextmanager
async def warm_engine(
    pool: Pool, routes: Dispatcher, *, epoch: float | None
) -> AsyncIterator[Plan]:
    """A worker that tells of a prompt, and a reader that has never seen its text."""
    other_pool, other_routes, _ = make(1)
    plan = await other_routes.plan(other_pool, chat(DOCUMENT), in_full=True)
    pool.workers["w1"].epoch = epoch
    hold(pool, "w1", plan.prompt)
    yield await routes.plan(pool, chat(DOCUMENT))


async def test_workers_warm_before_the_gateway_make_it_wait_for_the_tokens() -> None:
    pool, routes, _ = make(2, model=None)
    async with warm_engine(pool, routes, epoch=1.0) as plan:
        assert not plan.is_behind
        assert routes.choose(plan).worker == "w1"
        assert routes.choose(plan).hit_tokens == (plan.num_tokens - 1) // BLOCK * BLOCK


async def test_workers_started_after_the_gateway_do_not() -> None:
    pool, routes, _ = make(2, model=None, clock_unix=lambda: 5.0)
    async with warm_engine(pool, routes, epoch=6.0) as plan:
        assert plan.is_behind


@pytest.mark.parametrize(
    ("model", "bound_s"), [(None, 0.020), (H100, 0.020), (FAST, 0.1 * 1e-6 * len(DOCUMENT))]
)
async def test_the_wait_is_bounded_by_a_moment_and_by_a_tenth_of_the_prefill(
    model: Any, bound_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, routes, _ = make(2, model=model)
    waits: list[float] = []
    wait_for = asyncio.wait_for

    async def noted(awaitable: Any, patience_s: float) -> Any:
        waits.append(patience_s)
        return await wait_for(awaitable, patience_s)

    monkeypatch.setattr(asyncio, "wait_for", noted)
    with gated(pool):
        async with warm_engine(pool, routes, epoch=None) as plan:
            assert plan.is_behind
            assert routes.choose(plan).worker is not None
    assert waits == [pytest.approx(bound_s, rel=0.1)]


async def test_a_worker_found_to_hold_unread_text_makes_others_wait_for_a_while() -> None:
    pool, routes, clock = make(2)
    plan = await routes.plan(pool, chat(DOCUMENT))
    ticket = routes.admit(plan, routes.choose(plan))
    await settled(plan)
    assert not pool.may_hold_unread_text(clock.now_s)
    ticket.finish(Outcome.OK, Usage(plan.num_tokens, 9, 5000))

    assert pool.may_hold_unread_text(clock.now_s + 299.0)
    assert not pool.may_hold_unread_text(clock.now_s + 301.0)


async def test_a_memory_that_overflowed_makes_requests_wait_while_the_index_holds_blocks() -> None:
    pool, routes, clock = make(1)
    plan = await routes.plan(pool, chat(DOCUMENT), in_full=True)
    assert pool.reader is not None
    pool.reader._memo._chains.has_forgotten = True
    assert not pool.may_hold_unread_text(clock.now_s)
    hold(pool, "w0", plan.prompt)

    assert pool.may_hold_unread_text(clock.now_s) is True


async def test_too_much_text_in_the_queue_goes_without_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, routes, _ = make(2)
    monkeypatch.setattr(reading, "MAX_BACKLOG_CHARS", len(DOCUMENT) // 2)
    with gated(pool) as gate:
        first = await routes.plan(pool, chat(DOCUMENT))
        second = await routes.plan(pool, chat(OTHER))
        assert (first.is_behind, second.is_behind) == (True, False)
        ticket = routes.admit(second, routes.choose(second))
        ticket.finish(Outcome.OK, Usage(100, 9, 0))
        assert pool.unread_prompts == {"Backlog": 1}
        gate.open()
        await settled(first)
    third = await routes.plan(pool, chat(OTHER))

    assert third.is_behind
    assert is_idle(pool)
    await settled(third)


async def test_the_pool_learns_how_long_its_tokens_are() -> None:
    pool, routes, _ = make(1)
    pool.chars_per_token = 4.0
    for number in range(80):
        await settled(await routes.plan(pool, chat(f"{number} {DOCUMENT}")))

    assert pool.chars_per_token == pytest.approx(1.0, rel=0.1)


async def test_the_loop_tokenizes_nothing_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, routes, _ = make(1)
    assert pool.reader is not None
    here, learn = threading.get_ident(), pool.reader.learn
    inline: list[int] = []

    def noted(before: Any, texts: Any, *keys: Any) -> Any:
        if threading.get_ident() == here:
            inline.append(sum(map(len, texts)))
        return learn(before, texts, *keys)

    monkeypatch.setattr(pool.reader, "learn", noted)
    await settled(await routes.plan(pool, chat("unseen " * 18_725)))
    assert inline == []
    # A conversation: each turn brings 1 KB, which is known to be new.
    messages = [{"role": "user", "content": DOCUMENT}]
    for turn in range(6):
        plan = await routes.plan(pool, chat("", messages=messages))
        assert plan.is_behind
        await settled(plan)
        messages.append({"role": "assistant", "content": f"{turn} " + "answer " * 80})
        messages.append({"role": "user", "content": f"{turn} " + "question " * 60})
    assert inline == []
    # Short, and nothing is known: its tokens decide, and come at once.
    plan = await routes.plan(pool, chat("A short one. " * 100))
    assert not plan.is_behind
    assert max(inline) <= reading.MAX_INLINE_CHARS
