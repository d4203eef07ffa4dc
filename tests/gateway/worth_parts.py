"""A pool whose attempts are finished at once and accounted, for what tiers are worth."""

from __future__ import annotations

from random import Random
from typing import Any

from gateway.routing.cost import CostModel
from gateway.routing.dispatch import Dispatcher, Inbound, Outcome, Plan, Ticket, Usage
from gateway.routing.learner import Learner
from gateway.routing.pool import Pool
from gateway.worth.account import WorthAccount
from gateway.worth.tier import MIN_RESTORES
from tests.gateway.routing_parts import H100, Clock, hold, ids, make_pool

FAST = CostModel(3.25e-5, 1.17e-9, 0.004, 5.2e-8, restore_cpu_tokens_per_s=191_000.0)


class Fixed(Learner):
    """Constants that nothing changes."""

    def _update(self) -> None:
        return


class Shop:
    """A pool whose attempts are finished at once and accounted."""

    def __init__(self, *, model: CostModel | None = H100, **options: Any) -> None:
        self.clock = Clock()
        self.pool: Pool = make_pool(2, model=model)
        for worker in self.pool.workers.values():
            worker.learner = Fixed(model)
        self.account = WorthAccount(clock=self.clock, **options)
        self.routes = Dispatcher(
            [self.pool], clock=self.clock, seed=1, on_finish=self.account.observe
        )

    async def serve(
        self,
        inbound: Inbound,
        *,
        tenant: str = "acme",
        outcome: Outcome = Outcome.OK,
        hold_at: str | None = None,
    ) -> tuple[Plan, Ticket]:
        inbound.tenant = tenant
        plan = await self.routes.plan(self.pool, inbound, in_full=True)
        ticket = self.routes.admit(plan, self.routes.choose(plan))
        self.clock.now_s += 0.5
        ticket.finish(outcome, Usage(plan.num_tokens, 5, ticket.predicted_hit_tokens))
        if hold_at is not None:
            hold(self.pool, hold_at, plan.prompt)
        return plan, ticket

    async def restore_some(self) -> None:
        """Have a CPU tier give something back, so that its speed is known."""
        index = self.pool.index
        assert index is not None
        plan, _ = await self.serve(asks("warm-up", 0), tenant="warm-up")
        assert plan.prompt is not None
        for worker in self.pool.workers:
            index.store(worker, plan.prompt.block_hashes, plan.prompt.root, tier="cpu")
        for _ in range(MIN_RESTORES):
            await self.serve(asks("warm-up", 0), tenant="warm-up")

    def row(self, view: str, **named: str) -> dict[str, Any]:
        rows = [r for r in self.account.report()[view] if named.items() <= r.items()]
        assert len(rows) == 1, rows
        return rows[0]


def document(name: str, tokens: int = 4096) -> list[int]:
    return [Random(name).randrange(200) for _ in range(tokens)]


def asks(name: str, number: int, **body: Any) -> Inbound:
    """A question about a document, with the document's name as a hint."""
    inbound = ids([*document(name), *document(f"{name} {number}", 200)], **body)
    inbound.headers = {"x-document-id": name}
    return inbound
