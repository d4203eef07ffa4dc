"""The one door between the data plane and routing; it knows nothing of HTTP.

``plan`` reads a request's prompt, ``choose`` compares the workers as they are at that moment,
``admit`` charges the chosen one. Between ``choose`` and ``admit`` nothing may be awaited, or two
requests would see the same idle worker.
"""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING

from gateway.routing.candidates import route_input
from gateway.routing.choose import Decision, choose
from gateway.routing.explain import explain_json
from gateway.routing.plan import Inbound, Plan
from gateway.routing.reading import MAX_INLINE_CHARS, Reading
from gateway.routing.ticket import Outcome, Ticket, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from gateway.routing.pool import Pool

__all__ = [
    "MAX_INLINE_CHARS",
    "Decision",
    "Dispatcher",
    "Inbound",
    "Outcome",
    "Plan",
    "Ticket",
    "Usage",
    "explain_json",
]


class Dispatcher:
    """Routes requests to the workers of its pools; one event loop only.

    Args:
        pools: The pools; their model names and aliases must differ.
        clock: Monotonic seconds.
        seed: Start of the tie rotation; None = 0.
        on_finish: Told of every attempt once it is over and learned from, with its plan; called
            on the request's path, so it must be quick and must not raise.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        *,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        on_finish: Callable[[Plan, Ticket], None] | None = None,
    ) -> None:
        self.pools = {pool.name: pool for pool in pools}
        self._by_model = {m: pool for pool in pools for m in (*pool.models, *pool.aliases)}
        self._clock = clock
        self._on_finish = on_finish
        self._reading = Reading(clock)
        # Gateways that start together should not all begin with the same worker.
        self._rotation = Random(seed).randrange(1 << 16)

    def pool_for(self, model: str) -> Pool | None:
        """Return the pool that serves a model name or alias."""
        return self._by_model.get(model)

    async def plan(self, pool: Pool, inbound: Inbound, *, in_full: bool = False) -> Plan:
        """Read a request's prompt; never fails because of the prompt.

        Mutates nothing but the reader's memory of known text and the count of unread prompts. The
        tokens of long unseen text may come later (``Plan.is_behind``).

        Args:
            pool: Where it may go.
            inbound: The request.
            in_full: Wait for all tokens; for what is not on a request's path.
        """
        return await self._reading.read(pool, inbound, in_full=in_full)

    def choose(self, plan: Plan, exclude: Collection[str] = ()) -> Decision:
        """Choose a worker as things stand; ``Decision.worker`` is None when nobody is eligible.

        Args:
            plan: The request.
            exclude: Workers where an attempt of this request failed.
        """
        request = route_input(plan, self._clock(), exclude)
        self._rotation += 1
        return choose(request, rotation=self._rotation)

    def admit(self, plan: Plan, decision: Decision) -> Ticket:
        """Charge the chosen worker; call it before anything is awaited after ``choose``.

        Raises:
            LookupError: If the decision has no worker.
        """
        if decision.worker is None:
            raise LookupError("nobody was chosen: there is no eligible worker")
        plan.attempts += 1
        return Ticket(
            plan,
            plan.pool.workers[decision.worker],
            decision,
            self._clock,
            self._on_finish,
        )
