"""Our own router in the simulation: the product's dispatcher, tickets, books, index and rule.

Nothing is imitated: a request is planned with the hashes of the trace, chosen for and admitted by
``Dispatcher``, and its ticket is told of first tokens and ends as the proxy tells it.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gateway.replay.fleet import Placement, Pull
from gateway.replay.residency import ROOT, worker_id
from gateway.replicas.leads import SharedPending
from gateway.routing.cost import STORE
from gateway.routing.dispatch import Dispatcher, Inbound, Outcome, Plan, Ticket, Usage
from gateway.routing.learner import Learner
from gateway.routing.pool import Pool, Worker
from prefix_index.draft import Prompt

if TYPE_CHECKING:
    from gateway.replay.engine import Job
    from gateway.replay.fleet import Fleet
    from gateway.replay.shared_load import Hub
    from gateway.replay.traces import Request
    from gateway.routing.choose import Decision
    from gateway.routing.cost import Estimate

MODEL = "replay"
# A rate (tokens/s) at which no pull is worth while.
OUT_OF_REACH = 1.0
# The letters of the design -> the terms of an estimate.
TERMS = {
    "W": "queue_s",
    "P": "prefill_s",
    "I": "interleave_s",
    "R": "restore_s",
    "G": "interference_s",
    "M": "memory_s",
    "E": "eviction_s",
}


class _Fixed(Learner):
    """Cost constants that are known and stay as they are; rates of pulls are learned."""

    def observe_prefill(self, *args: object, **kwargs: object) -> None:
        """Learn nothing."""

    def observe_decode(self, *args: object, **kwargs: object) -> None:
        """Learn nothing."""

    def observe_restore(self, *args: object, **kwargs: object) -> None:
        """Learn nothing."""

    def observe_pull_ttft(self, *args: object, **kwargs: object) -> None:
        """Learn nothing: the transfers themselves are timed."""


class _Token(NamedTuple):
    plan: Plan
    ticket: Ticket


class OursRouter:
    """The product in one or several gateways.

    Args:
        fleet: The fleet.
        hub: What the gateways tell each other.
        seed: For ties.
        without: Letter of a term that is left out of the cost; empty = the whole rule.
        learns: Whether the cost constants are learned from what is seen, starting from the true
            ones; else they are known.
        can_pull: Whether workers can fetch KV from each other or the store.
        peers_reach: Whether they can fetch it from each other.

    Attributes:
        pools: The pool of each gateway.
    """

    wants_events = True

    def __init__(
        self,
        fleet: Fleet,
        hub: Hub,
        *,
        seed: int,
        without: str = "",
        learns: bool = False,
        can_pull: bool = False,
        peers_reach: bool = True,
    ) -> None:
        self._fleet = fleet
        self._hub = hub
        self._without = without
        self._learns = learns
        self._can_pull = can_pull
        self._peers_reach = peers_reach
        self._now_s = 0.0
        self._leading: set[int] = set()
        self._told_leads = [0] * len(hub.views)
        self.pools = [self._pool(gateway) for gateway in range(len(hub.views))]
        rng = Random(seed)
        self._dispatchers = [
            Dispatcher([pool], clock=self._clock, seed=rng.randrange(1 << 30))
            for pool in self.pools
        ]
        for worker in fleet.routable:
            self.up(worker, 0.0)

    def route(self, request: Request, gateway: int, now_s: float) -> Placement:
        """Choose and admit as the proxy does."""
        self._now_s = now_s
        self._fleet.events.sync(now_s)
        dispatcher = self._dispatchers[gateway]
        plan = self._plan(self.pools[gateway], request)
        decision = dispatcher.choose(plan)
        if self._without:
            decision = without_term(decision, self._without)
        ticket = dispatcher.admit(plan, decision)
        estimate = decision.estimate()
        is_urgent = gateway in self._leading
        self._leading.discard(gateway)
        return Placement(
            int(estimate.worker[1:]),
            _Token(plan, ticket),
            pull=self._pull(estimate),
            predicted_hit_tokens=estimate.hit_tokens,
            is_urgent=is_urgent,
        )

    def first_token(self, placement: Placement, now_s: float) -> None:
        """Tell the ticket."""
        self._now_s = now_s
        _ticket(placement).first_token()

    def finished(self, placement: Placement, job: Job, now_s: float) -> None:
        """Tell the ticket, with the usage that an engine reports."""
        self._now_s = now_s
        usage = Usage(job.prompt_tokens, job.output_tokens, job.hit_tokens)
        _ticket(placement).finish(Outcome.OK, usage)

    def failed(self, placement: Placement, now_s: float) -> None:
        """Tell the ticket that the connection ended."""
        self._now_s = now_s
        ticket = _ticket(placement)
        started = ticket.ttft_s is not None
        ticket.finish(Outcome.TRUNCATED if started else Outcome.UPSTREAM_RESET)

    def pulled(self, placement: Placement, tokens: int, seconds: float) -> None:
        """Tell the worker's learner, as an engine that times its pulls does."""
        pull = placement.pull
        assert pull is not None
        source = STORE if pull.source is None else worker_id(pull.source)
        _ticket(placement).worker.learner.observe_pull(source, tokens=tokens, seconds=seconds)

    def down(self, worker: int, now_s: float) -> None:
        """Take a worker out, as failed health checks do."""
        for pool in self.pools:
            known = pool.workers[worker_id(worker)]
            known.health.ready = False
            pool.forget(known)

    def up(self, worker: int, now_s: float) -> None:
        """Add a worker, or let a known one back in."""
        name, model = worker_id(worker), self._fleet.model
        for pool in self.pools:
            known = pool.workers.get(name)
            if known is not None:
                known.health.succeeded(now_s)
                continue
            learner = Learner(model.cost) if self._learns else _Fixed(model.cost)
            pool.add(
                Worker(
                    name,
                    f"http://{name}",
                    mode="exact",
                    capacity_tokens=model.gpu_tokens,
                    cpu_capacity_tokens=model.cpu_tokens,
                    max_batched_tokens=model.max_batched_tokens,
                    learner=learner,
                    can_pull=self._can_pull,
                    serves_peers=self._can_pull,
                )
            )

        if not self._peers_reach:
            self._forbid_peers()

    def draining(self, worker: int, now_s: float) -> None:
        """Drain a worker."""
        for pool in self.pools:
            pool.drain(worker_id(worker))

    def share(self, gateway: int, now_s: float) -> None:
        """Tell the other gateways."""
        books = {name: worker.books for name, worker in self.pools[gateway].workers.items()}
        self._hub.say(gateway, books, now_s)
        leads = self.pools[gateway].pending
        assert isinstance(leads, SharedPending)
        if leads.num_changes == self._told_leads[gateway]:
            return
        self._told_leads[gateway] = leads.num_changes
        announced = leads.announced()
        for other, pool in enumerate(self.pools):
            if other != gateway:
                assert isinstance(pool.pending, SharedPending)
                pool.pending.told(str(gateway), announced, pool.workers)

    def _forbid_peers(self) -> None:
        """Have all workers know that nothing comes from another worker."""
        rates = {worker_id(w): OUT_OF_REACH for w in range(len(self._fleet.engines))}
        for pool in self.pools:
            for worker in pool.workers.values():
                worker.learner.pull_rates = worker.learner.pull_rates | rates

    def _clock(self) -> float:
        return self._now_s

    def _pool(self, gateway: int) -> Pool:
        pool = Pool(MODEL, models=[MODEL], engine="vllm")
        pool.index = self._fleet.events.index
        if len(self._hub.views) > 1:
            pool.others = self._hub.views[gateway]
            pool.pending = SharedPending(partial(self._leading.add, gateway))
        return pool

    def _plan(self, pool: Pool, request: Request) -> Plan:
        session = {"x-session-id": f"s{request.session}"}
        inbound = Inbound("completions", {"model": MODEL, "stream": True}, session, MODEL)
        plan = Plan(pool, inbound, request.prompt_tokens)
        size = self._fleet.model.block_tokens
        plan.take(Prompt(request.prompt_tokens, request.blocks, size, ROOT, []))
        return plan

    def _pull(self, estimate: Estimate) -> Pull | None:
        if not estimate.pull_tokens:
            return None
        peer = estimate.source.removeprefix("peer:")
        source = None if peer == estimate.source else int(peer[1:])
        return Pull(source, estimate.hit_tokens // self._fleet.model.block_tokens)


def without_term(decision: Decision, letter: str) -> Decision:
    """Take a decision again by the least sum of all terms but one; ties as the product rotates."""
    estimates = decision.candidates
    name = TERMS[letter]
    costs = [estimate.cost - getattr(estimate, name) for estimate in estimates]
    eligible = [i for i, c in enumerate(decision.input.candidates) if c.eligible]
    best = min(costs[i] for i in eligible)
    tied = [i for i in eligible if costs[i] <= best + 1e-12]
    at = tied[decision.rotation % len(tied)]
    chosen = estimates[at]
    return msgspec.structs.replace(
        decision,
        worker=chosen.worker,
        position=at,
        chosen=chosen,
        hit_tokens=chosen.hit_tokens,
        ttft_s=chosen.ttft_s,
        source=chosen.source,
        tied=[estimates[i].worker for i in tied],
    )


def _ticket(placement: Placement) -> Ticket:
    assert isinstance(placement.token, _Token)
    return placement.token.ticket
