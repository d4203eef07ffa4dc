"""A fleet of simulated engines on a virtual clock, behind the real dispatcher and index.

Each engine prefills one prompt after another at a fixed speed, decodes in a number of slots, keeps
every block it computed and announces it to the index as events would. Nothing sleeps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from gateway.routing.cost import CostModel
from gateway.routing.dispatch import Dispatcher, Outcome, Plan, Ticket, Usage
from gateway.routing.pool import Pool
from prefix_index.blocks import BlockHash, usable_blocks
from prefix_index.prompts import Prompt
from tests.gateway.routing_parts import BLOCK, Clock


@dataclass
class Job:
    plan: Plan
    ticket: Ticket
    done: Callable[[], None]


@dataclass
class Engine:
    """One simulated engine; ``prefilled`` lists the uncached tokens of each request."""

    waiting: deque[Job] = field(default_factory=deque)
    running: int = 0
    prefilling: bool = False
    blocks: set[BlockHash] = field(default_factory=set)
    prefilled: list[int] = field(default_factory=list)
    served: int = 0
    idle_while_queue_elsewhere_s: float = 0.0


class Fleet:
    """Engines by worker id, and the clock that all parts share."""

    def __init__(
        self,
        pool: Pool,
        routes: Dispatcher,
        clock: Clock,
        *,
        speed: CostModel,
        slots: int,
        decode_s: float,
    ) -> None:
        self.pool = pool
        self.engines = {worker_id: Engine() for worker_id in pool.workers}
        self._routes = routes
        self._clock = clock
        self._speed = speed
        self._slots = slots
        self._decode_s = decode_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def send(self, plan: Plan, done: Callable[[], None] = lambda: None) -> Ticket:
        """Route a request as things stand and hand it to its engine."""
        ticket = self._routes.admit(plan, self._routes.choose(plan))
        self.engines[ticket.worker.id].waiting.append(Job(plan, ticket, done))
        self._advance(ticket.worker.id)
        return ticket

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._events, (self._clock.now_s + delay_s, next(self._order), action))

    def run(self) -> None:
        """Let time pass until nothing is left to do."""
        while self._events:
            at_s, _, action = heapq.heappop(self._events)
            self._note_idleness(at_s - self._clock.now_s)
            self._clock.now_s = at_s
            action()

    def _note_idleness(self, passed_s: float) -> None:
        queued = any(engine.waiting for engine in self.engines.values())
        for engine in self.engines.values():
            if queued and not engine.running and not engine.waiting:
                engine.idle_while_queue_elsewhere_s += passed_s

    def _prompt(self, plan: Plan) -> Prompt:
        """Read a prompt as an engine does, whether or not the gateway has its tokens yet."""
        if plan.prompt is not None:
            return plan.prompt
        assert self.pool.reader is not None
        return self.pool.reader.chat(plan.inbound.body).complete()

    def _advance(self, worker_id: str) -> None:
        engine = self.engines[worker_id]
        if engine.prefilling or not engine.waiting or engine.running >= self._slots:
            return
        job = engine.waiting.popleft()
        engine.prefilling = True
        engine.running += 1
        prompt = self._prompt(job.plan)
        held = 0
        usable = usable_blocks(prompt.num_tokens, BLOCK)
        while held < usable and prompt.block_hashes[held] in engine.blocks:
            held += 1
        uncached = prompt.num_tokens - held * BLOCK
        engine.prefilled.append(uncached)
        seconds = self._speed.token_s * uncached + self._speed.step_s
        self.at(seconds, lambda: self._first_token(worker_id, job, held * BLOCK))

    def _first_token(self, worker_id: str, job: Job, cached: int) -> None:
        engine = self.engines[worker_id]
        prompt, index = self._prompt(job.plan), self.pool.index
        assert index is not None
        parent = prompt.root
        for block in prompt.block_hashes:
            if block not in engine.blocks:
                engine.blocks.add(block)
                index.store(worker_id, [block], parent)
            parent = block
        engine.prefilling = False
        job.ticket.first_token()
        self.at(self._decode_s, lambda: self._finish(worker_id, job, cached))
        self._advance(worker_id)

    def _finish(self, worker_id: str, job: Job, cached: int) -> None:
        engine = self.engines[worker_id]
        engine.running -= 1
        engine.served += 1
        job.ticket.finish(Outcome.OK, Usage(self._prompt(job.plan).num_tokens, 100, cached))
        self._advance(worker_id)
        job.done()
