"""Any order of arrivals, answers, departures and faults: nobody is forgotten, no charge stays."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.dispatch import GateFull, GateTimeout, Outcome, Ticket
from tests.gateway.gate_parts import Waiters, settled
from tests.gateway.routing_parts import is_idle

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("arrive", "arrive", "token", "finish", "fail", "leave", "time", "drain")),
        st.integers(0, 1000),
    ),
    max_size=60,
)
SIZES = (16, 64, 150, 300, 900, 4000)


class World:
    """Requests in flight and waiting, in front of two workers with little memory."""

    def __init__(self) -> None:
        self.w = Waiters(2)
        self.w.pool.max_queue = 5
        self.w.pool.deadline_s = 8.0
        for worker in self.w.pool.workers.values():
            worker.capacity_tokens = 2000
        self.waiting: list[asyncio.Task[Ticket | None]] = []
        self.tickets: list[Ticket] = []

    async def step(self, what: str, number: int) -> None:
        w = self.w
        if what == "arrive":
            await self.arrive(SIZES[number % len(SIZES)], "abc"[number % 3])
        elif what == "time":
            await settled(w.timers, number / 100)
        elif what == "drain":
            worker = f"w{number % 2}"
            w.pool.drain(worker, draining=not w.pool.workers[worker].draining)
            w.routes.gate.changed(w.pool)
        elif what == "leave" and self.waiting:
            self.waiting[number % len(self.waiting)].cancel()
        elif self.tickets and what == "token":
            self.tickets[number % len(self.tickets)].first_token()
        elif self.tickets and what in ("finish", "fail"):
            ticket = self.tickets.pop(number % len(self.tickets))
            ticket.finish(Outcome.OK if what == "finish" else Outcome.CANCELLED)

    async def arrive(self, num_tokens: int, tenant: str) -> None:
        plan = await self.w.plan(num_tokens, tenant)
        decision = self.w.routes.choose(plan)
        if decision.worker is None:
            return
        if self.w.routes.is_open(plan, decision):
            self.tickets.append(self.w.routes.admit(plan, decision))
        else:
            self.waiting.append(asyncio.create_task(self.w.routes.wait(plan, decision)))

    async def settle(self) -> None:
        await settled(self.w.timers)
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if task.cancelled():
                continue
            error = task.exception()
            assert error is None or isinstance(error, GateFull | GateTimeout)
            ticket = None if error is not None else task.result()
            if ticket is not None:
                self.tickets.append(ticket)

    def check(self) -> None:
        w = self.w
        assert w.num_waiting == len(self.waiting) <= w.pool.max_queue
        usable = [x for x in w.pool.workers.values() if not x.draining]
        assert not self.waiting or not usable or all(x.books.in_flight for x in usable)
        assert sum(x.books.in_flight for x in w.pool.workers.values()) == len(self.tickets)
        assert self.waiting or not w.timers.num_set


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_nobody_waits_beside_an_idle_worker_and_everybody_ends(
    steps: list[tuple[str, int]],
) -> None:
    async def run() -> None:
        world = World()
        for what, number in steps:
            await world.step(what, number)
            await world.settle()
            world.check()
        for worker in world.w.pool.workers.values():
            worker.draining = False
        world.w.routes.gate.changed(world.w.pool)
        for _ in range(100):
            await world.settle()
            world.check()
            if not world.tickets:
                break
            world.tickets.pop().finish(Outcome.OK)
        assert not world.waiting
        assert is_idle(world.w.pool)
        assert not world.w.timers.num_set

    asyncio.run(run())
