"""The one door between the data plane and routing; it knows nothing of HTTP.

``target`` finds the pool, ``plan`` reads a request's prompt, ``choose`` compares the workers as
they are at that moment, ``admit`` charges the chosen one, ``wait`` does both once a worker is free.
Between ``choose`` and ``admit`` nothing may be awaited, or two requests would see the same idle
worker.
"""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING

from gateway.routing.candidates import route_input
from gateway.routing.choose import Decision, choose
from gateway.routing.explain import explain_json
from gateway.routing.gate import Gate, GateFull, GateTimeout, Standing
from gateway.routing.plan import Inbound, Plan
from gateway.routing.reading import MAX_INLINE_CHARS, Reading
from gateway.routing.rollout import RollOut
from gateway.routing.routes import Routes, Target
from gateway.routing.ticket import Outcome, Ticket, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gateway.routing.gate import CallLater
    from gateway.routing.pool import Pool, Worker

__all__ = [
    "MAX_INLINE_CHARS",
    "Decision",
    "Dispatcher",
    "GateFull",
    "GateTimeout",
    "Inbound",
    "Outcome",
    "Plan",
    "Standing",
    "Target",
    "Ticket",
    "Usage",
    "explain_json",
]

# Who is used only since nobody else is left is not to be given work of ours.
_ILL = ("panic", "apart")
# Queue above which a worker has enough to do: the default of ``routing.max_wait_s``.
MAX_WAIT_S = 2.0


class Dispatcher:
    """Routes requests to the workers of its pools; one event loop only.

    Args:
        pools: The pools.
        clock: Monotonic seconds.
        seed: Of the tie rotation and of the workers compared while the load view is old; None =
            another one in each process.
        on_finish: Told of every attempt once it is over and learned from, with its plan; called
            on the request's path, so it must be quick and must not raise.
        routes: Finds a request's pool; None = by its model only.
        rollout: How much of the traffic goes by the rule; None = all of it.
        max_wait_s: Queue above which a worker has enough to do.
        standings: Tenant -> its rights while requests wait; others have the usual ones.
        call_later: Timers of those who wait; None = the running loop's.

    Attributes:
        pools: Name -> pool.
        routes: As given.
        rollout: As given; its mode and share may be changed at any time.
        gate: Those who wait.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        on_finish: Callable[[Plan, Ticket], None] | None = None,
        routes: Routes | None = None,
        rollout: RollOut | None = None,
        max_wait_s: float = MAX_WAIT_S,
        standings: Mapping[str, Standing] | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self.routes = routes or Routes(pools)
        self.rollout = rollout or RollOut()
        self.gate = Gate(
            self.choose,
            self.admit,
            clock=clock,
            rollout=self.rollout,
            max_wait_s=max_wait_s,
            standings=standings,
            call_later=call_later,
        )
        self._clock = clock
        self._on_finish = on_finish
        self._reading = Reading(clock)
        self._random = Random(seed)
        # Gateways that start together should not all begin with the same worker.
        self._rotation = self._random.randrange(1 << 16)

    def pool_for(self, model: str) -> Pool | None:
        """Return the pool of a model, alias or adapter when nothing else is known of a request."""
        return self.routes.default(model)

    def target(self, inbound: Inbound) -> Target | None:
        """Return where a request goes before its prompt is read; None if nobody has its model."""
        return self.routes.target(inbound)

    def redirected(self, plan: Plan, target: Target) -> Target:
        """Return where a request goes once its prompt was read in ``target``'s pool.

        If that is another pool, the request must be planned again there. The plan is told its
        route.
        """
        if target.by_class:
            target = self.routes.by_class(plan, target)
        plan.route = target.route
        return target

    def known_plan(self, pool: Pool, inbound: Inbound) -> Plan | None:
        """Return the plan of a body that came before, without waiting; None if it did not."""
        return self._reading.read_known(pool, inbound)

    async def plan(self, pool: Pool, inbound: Inbound, *, in_full: bool = False) -> Plan:
        """Read a request's prompt; never fails because of the prompt.

        Mutates nothing but the reader's memory of known text and the count of unread prompts. The
        tokens of long unseen text may come later (``Plan.is_behind``).

        Args:
            pool: Where it may go.
            inbound: The request.
            in_full: Wait for all tokens; for what is not on a request's path.
        """
        known = self._reading.read_known(pool, inbound)
        return known or await self._reading.read(pool, inbound, in_full=in_full)

    def choose(self, plan: Plan, exclude: Collection[str] = ()) -> Decision:
        """Choose a worker as things stand; ``Decision.worker`` is None when nobody is eligible.

        Args:
            plan: The request.
            exclude: Workers where an attempt of this request failed.
        """
        pinned = plan.inbound.pinned
        if pinned in plan.pool.workers:
            exclude = {*exclude, *(worker for worker in plan.pool.workers if worker != pinned)}
        request = route_input(plan, self._clock(), exclude, self._random)
        self._rotation += 1
        if self.rollout.is_complete:
            return choose(request, rotation=self._rotation)
        return self.rollout.choose(plan, request, self._rotation)

    def is_open(self, plan: Plan, decision: Decision) -> bool:
        """Whether the chosen worker may be charged now; else ``wait`` is due."""
        return self.gate.is_open(plan, decision)

    async def wait(self, plan: Plan, decision: Decision) -> Ticket | None:
        """Wait until a worker is free and return the ticket; None if none is left for the request.

        Raises:
            GateFull: If as many wait as may.
            GateTimeout: If none got free in time.
        """
        return await self.gate.wait(plan, decision)

    def admit(self, plan: Plan, decision: Decision) -> Ticket:
        """Charge the chosen worker; call it before anything is awaited after ``choose``.

        Raises:
            LookupError: If the decision has no worker.
        """
        if decision.worker is None:
            raise LookupError("nobody was chosen: there is no eligible worker")
        plan.attempts += 1
        if plan.attempts == 1:
            self.rollout.count(plan, decision)
        worker = plan.pool.workers[decision.worker]
        return _Ticket(plan, worker, decision, self._clock, self._on_finish, self.gate)

    def admit_own(
        self, plan: Plan, worker_id: str, on_finish: Callable[[Plan, Ticket], None] | None
    ) -> Ticket | None:
        """Charge one worker with a request of the gateway's own, so that routing sees the load.

        It is booked and learned from as any other, and counted neither as traffic by the roll-out
        nor by whoever is told of clients' attempts. Nothing may be awaited before it is sent.

        Args:
            plan: The request, with its tokens.
            worker_id: Where it goes.
            on_finish: Told of the attempt once it is over.

        Returns:
            Its ticket; None if the worker takes no requests (draining, ejected, not ready, gone).
        """
        worker = plan.pool.workers.get(worker_id)
        if worker is None:
            return None
        others = [other for other in plan.pool.workers if other != worker_id]
        decision = choose(route_input(plan, self._clock(), others))
        if decision.worker is None or decision.input.candidates[decision.position].why in _ILL:
            return None
        plan.attempts += 1
        return _Ticket(plan, worker, decision, self._clock, on_finish, self.gate)


class _Ticket(Ticket):
    """A ticket that tells those who wait when its worker may have got free."""

    __slots__ = ("_gate",)

    def __init__(
        self,
        plan: Plan,
        worker: Worker,
        decision: Decision,
        clock: Callable[[], float],
        on_finish: Callable[[Plan, Ticket], None] | None,
        gate: Gate,
    ) -> None:
        self._gate = gate
        super().__init__(plan, worker, decision, clock, on_finish)

    def first_token(self) -> None:
        super().first_token()
        if self._gate.lines:
            self._gate.changed(self._plan.pool)

    def finish(self, outcome: Outcome, usage: Usage | None = None) -> None:
        super().finish(outcome, usage)
        if self._gate.lines:
            self._gate.changed(self._plan.pool)
