"""Timers that stand still until a test moves them, and pools whose workers are easily busy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from gateway.routing.cost import CostModel
from gateway.routing.dispatch import Dispatcher, Inbound, Plan, Ticket
from gateway.routing.pool import Pool
from tests.gateway.routing_parts import Clock, ids, make_pool

# 10 ms a token and nothing else, so that a prompt of 300 tokens is 3 s of work.
SLOW = CostModel(0.01, 0.0, 0.001, 0.0)


@dataclass(eq=False)
class Timer:
    """One call that is due at a time."""

    due_s: float
    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Timers:
    """Calls things when a test lets their time come."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waiting: list[Timer] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        timer = Timer(self.clock.now_s + delay_s, call)
        self.waiting.append(timer)
        return cast(asyncio.TimerHandle, timer)

    @property
    def num_set(self) -> int:
        return sum(not timer.is_cancelled for timer in self.waiting)

    def advance(self, delay_s: float = 0.0) -> None:
        """Let time pass, and everything happen that is due meanwhile, in its order."""
        end_s = self.clock.now_s + delay_s
        while due := [t for t in self.waiting if t.due_s <= end_s or t.is_cancelled]:
            timer = min(due, key=lambda t: t.due_s)
            self.waiting.remove(timer)
            if not timer.is_cancelled:
                self.clock.now_s = max(self.clock.now_s, timer.due_s)
                timer.call()
        self.clock.now_s = end_s


class Waiters:
    """A pool, its dispatcher, and requests that are in flight or wait."""

    def __init__(self, num_workers: int = 1, *, pool: Pool | None = None, **options: Any) -> None:
        self.clock = Clock()
        self.timers = Timers(self.clock)
        self.pool = pool or make_pool(num_workers, model=SLOW)
        self.routes = Dispatcher(
            [self.pool], clock=self.clock, seed=1, call_later=self.timers.call_later, **options
        )
        self._num_requests = 0

    async def plan(self, num_tokens: int = 300, tenant: str = "") -> Plan:
        """Read a prompt that no other one shares a block with."""
        self._num_requests += 1
        inbound: Inbound = ids([self._num_requests] * num_tokens)
        inbound.tenant = tenant
        return await self.routes.plan(self.pool, inbound)

    async def send(self, num_tokens: int = 300) -> Ticket:
        """Admit a request at once."""
        plan = await self.plan(num_tokens)
        return self.routes.admit(plan, self.routes.choose(plan))

    async def wait(self, num_tokens: int = 300, tenant: str = "") -> asyncio.Task[Ticket | None]:
        """Let a request wait in a task of its own; it does wait when this returns."""
        plan = await self.plan(num_tokens, tenant)
        decision = self.routes.choose(plan)
        assert not self.routes.is_open(plan, decision)
        task = asyncio.create_task(self.routes.wait(plan, decision))
        await asyncio.sleep(0)
        return task

    @property
    def num_waiting(self) -> int:
        return self.routes.gate.num_waiting(self.pool.name)


async def settled(timers: Timers, delay_s: float = 0.0) -> None:
    """Let time pass and tasks go on."""
    timers.advance(delay_s)
    for _ in range(3):
        await asyncio.sleep(0)
