"""Requests wait here, in the gateway, while every worker that could take them has enough to do.

An engine's queue is first come, first served; here priority, fairness between tenants and deadlines
still count, and the choice is made with what is true when a worker gets free. Nobody waits while a
worker that may be chosen is idle or has room, so nothing can wait for ever: whoever waits is woken
by the first token or the end of a request that is in flight.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.routing.busy import excess_s, is_busy, least_queue_s
from gateway.routing.fair import FairQueue, Place, Standing
from gateway.routing.outcome import Outcome
from gateway.routing.plan import Plan
from gateway.routing.ticket import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.routing.choose import Decision
    from gateway.routing.pool import Pool
    from gateway.routing.rollout import RollOut

    CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]

__all__ = ["Gate", "GateFull", "GateTimeout", "Standing"]

# Looked at, from the next one on, when a worker's books change: one that needs more memory than is
# free, or an adapter that is busy, does not hold up those behind it.
MAX_LOOKED_AT = 4
# Admitted in one turn of the loop: a millisecond or two of choosing.
MAX_ADMITTED = 32
# Share of its deadline after which nobody passes the next one any more.
PATIENCE_SHARE = 0.5
# Least time until a worker's queue is looked at again without any news of it: the period in which
# other gateways tell their load.
RECHECK_S = 0.05


class GateFull(Exception):
    """As many requests wait as may; ``retry_after_s`` is when a place may be free."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{num_waiting} requests wait already")
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s


class GateTimeout(Exception):
    """No worker got free within the deadline."""

    def __init__(self, waited_s: float, retry_after_s: float) -> None:
        super().__init__(f"no worker got free within {waited_s:g} s")
        self.waited_s = waited_s
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits; ``result`` gets its ticket, or None when no worker is left for it.

    ``prefill_s`` is what its uncached tokens take on the worker that was best when it came.
    """

    plan: Plan
    since_s: float
    result: asyncio.Future[Ticket | None]
    prefill_s: float = 0.0
    deadline: asyncio.TimerHandle | None = None


class _Line:
    """Those who wait for one pool."""

    def __init__(self, pool: Pool, standings: Mapping[str, Standing]) -> None:
        self.pool = pool
        self.queue: FairQueue[_Waiting] = FairQueue(standings)
        self.is_due = False
        self.recheck: asyncio.TimerHandle | None = None
        # When the shortest queue will be short enough, as predicted.
        self.free_at_s = 0.0


class Gate:
    """Waiting requests of all pools; one event loop only.

    Args:
        choose: Chooses a worker for a plan as things stand.
        admit: Charges the chosen worker.
        clock: Monotonic seconds.
        rollout: Tells whether all requests are the rule's, and so may have to wait.
        max_wait_s: Queue (seconds of work) above which a worker has enough to do.
        standings: Tenant -> its rights.
        call_later: Calls something after some seconds; None = the running loop's.

    Attributes:
        num_full: Pool name -> requests refused because too many waited.
        num_timeouts: Pool name -> requests whose deadline passed.
        lines: Pool name -> those who wait for it; only pools where somebody does.
        standings: Tenant -> its rights; may be changed in place.
    """

    def __init__(
        self,
        choose: Callable[[Plan], Decision],
        admit: Callable[[Plan, Decision], Ticket],
        *,
        clock: Callable[[], float],
        rollout: RollOut,
        max_wait_s: float,
        standings: Mapping[str, Standing] | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        self.max_wait_s = max_wait_s
        self.num_full: Counter[str] = Counter()
        self.num_timeouts: Counter[str] = Counter()
        self._choose = choose
        self._admit = admit
        self._clock = clock
        self._rollout = rollout
        self.standings: dict[str, Standing] = dict(standings or {})
        self._call_later = call_later or _on_running_loop
        self.lines: dict[str, _Line] = {}

    def is_open(self, plan: Plan, decision: Decision) -> bool:
        """Whether a request may go to its worker now; nobody may pass those who wait already.

        The gate belongs to the rule: what is routed by least load goes at once.
        """
        if decision.input.mode == "least_load":
            return True
        return plan.pool.name not in self.lines and not is_busy(decision, self.max_wait_s)

    def num_waiting(self, pool: str) -> int:
        """Return how many requests wait for a pool."""
        line = self.lines.get(pool)
        return 0 if line is None else len(line.queue)

    def waiting_prefill_s(self, pool: str) -> float:
        """Return the prefill seconds of those who wait for a pool; 0 while no speed is known."""
        line = self.lines.get(pool)
        return 0.0 if line is None else sum(place.item.prefill_s for place in line.queue.places())

    async def wait(self, plan: Plan, decision: Decision) -> Ticket | None:
        """Wait for a worker and return the request's ticket; None when none is left for it.

        The ticket is there, and its worker charged, before anybody else is looked at.

        Args:
            plan: The request; told that it waited, and how long.
            decision: What was chosen for it by now.

        Raises:
            GateFull: If as many wait as may, and nobody who has more than a fair share of the
                places makes room; or later, for somebody who has more.
            GateTimeout: If none got free within the pool's deadline, or the client's own.
        """
        pool, now_s = plan.pool, self._clock()
        line = self.lines.get(pool.name) or _Line(pool, self.standings)
        until_free_s = excess_s(decision, self.max_wait_s)
        if len(line.queue) >= pool.max_queue:
            self.num_full[pool.name] += 1
            if not self._make_room(line, plan.inbound.tenant, until_free_s):
                raise GateFull(len(line.queue), until_free_s)
        self.lines[pool.name] = line
        plan.queued = True
        prefill_s = 0.0 if decision.chosen is None else decision.chosen.prefill_s
        result = asyncio.get_running_loop().create_future()
        waiting = _Waiting(plan, now_s, result, prefill_s)
        place = line.queue.add(waiting, plan.inbound.tenant, float(plan.num_tokens))
        deadline_s = pool.deadline_s
        if plan.inbound.deadline_s is not None:
            deadline_s = max(0.0, min(deadline_s, plan.inbound.deadline_s - now_s))
        waiting.deadline = self._call_later(
            deadline_s, lambda: self._time_out(line, place, deadline_s)
        )
        # Whoever comes while others wait may still be the one that a worker is free for.
        if len(line.queue) > 1:
            self._look(line)
        else:
            self._recheck(line, now_s, until_free_s)
        try:
            return await waiting.result
        except asyncio.CancelledError:
            self._withdraw(line, place)
            raise
        finally:
            waiting.deadline.cancel()
            plan.queued_s = self._clock() - now_s

    def changed(self, pool: Pool) -> None:
        """Look again at who waits for a pool, soon: a worker's books changed, or its health."""
        line = self.lines.get(pool.name)
        if line is not None:
            self._look(line)

    def _look(self, line: _Line) -> None:
        if not line.is_due:
            line.is_due = True
            # Once for all changes of this turn of the loop.
            self._call_later(0.0, lambda: self._serve(line))

    def _serve(self, line: _Line) -> None:
        """Admit all that a worker is free for."""
        line.is_due = False
        if not len(line.queue):  # all have left since
            self._close(line)
            return
        if self._rollout.is_complete and not self._may_be_free(line):
            return
        for _ in range(MAX_ADMITTED):
            if not self._serve_next(line):
                break
        else:
            self._look(line)
        if not len(line.queue):
            self._close(line)

    def _may_be_free(self, line: _Line) -> bool:
        """Whether it is worth choosing."""
        now_s, workers = self._clock(), line.pool.workers.values()
        queue_s = least_queue_s(workers, now_s, self.max_wait_s)
        if queue_s is None:
            return True
        self._recheck(line, now_s, max(0.0, queue_s - self.max_wait_s))
        return False

    def _serve_next(self, line: _Line) -> bool:
        """Serve one; False if no worker is free for those who are next."""
        first: Decision | None = None
        now_s = self._clock()
        for number, place in enumerate(line.queue.in_order()):
            waiting = place.item
            if waiting.result.done():  # its client has left, and will take it out
                continue
            plan = waiting.plan
            decision = self._choose(plan)
            if decision.worker is None:
                line.queue.leave(place)
                waiting.result.set_result(None)
                return True
            if not is_busy(decision, self.max_wait_s):
                ticket = self._admit(plan, decision)
                line.queue.serve(place)
                waiting.result.set_result(ticket)
                return True
            first = first or decision
            is_impatient = now_s - waiting.since_s > PATIENCE_SHARE * plan.pool.deadline_s
            if number + 1 >= MAX_LOOKED_AT or is_impatient:
                break
        if first is not None:
            self._recheck(line, now_s, excess_s(first, self.max_wait_s))
        return False

    def _recheck(self, line: _Line, now_s: float, delay_s: float) -> None:
        """Look again when the queues will have shrunk, or others will have told of theirs."""
        line.free_at_s = now_s + delay_s
        if line.recheck is not None:
            line.recheck.cancel()
        if line.pool.others is not None:
            delay_s = RECHECK_S
        line.recheck = self._call_later(max(delay_s, RECHECK_S), lambda: self._serve(line))

    def _make_room(self, line: _Line, tenant: str, retry_after_s: float) -> bool:
        """Refuse one who waits in favour of a tenant that has less than its share of the places.

        Otherwise one tenant could fill the queue, and fairness would not be there for the others.
        """
        place = line.queue.surplus(tenant)
        if place is None or place.item.result.done() or not line.queue.leave(place):
            return False
        place.item.result.set_exception(GateFull(len(line.queue) + 1, retry_after_s))
        return True

    def _time_out(self, line: _Line, place: Place[_Waiting], waited_s: float) -> None:
        if not place.item.result.done() and line.queue.leave(place):
            self.num_timeouts[line.pool.name] += 1
            retry_after_s = max(0.0, line.free_at_s - self._clock())
            error = GateTimeout(waited_s, retry_after_s)
            place.item.result.set_exception(error)
            self._tidy(line)

    def _withdraw(self, line: _Line, place: Place[_Waiting]) -> None:
        """Take out one whose client left, even if it was admitted a moment ago."""
        result = place.item.result
        if not line.queue.leave(place) and result.done() and not result.cancelled():
            ticket = None if result.exception() is not None else result.result()
            if ticket is not None:
                ticket.finish(Outcome.CANCELLED)
        self._tidy(line)

    def _tidy(self, line: _Line) -> None:
        """Let those behind one that went come up; forget a line nobody stands in."""
        if len(line.queue):
            self._look(line)
        else:
            self._close(line)

    def _close(self, line: _Line) -> None:
        if line.recheck is not None:
            line.recheck.cancel()
            line.recheck = None
        if self.lines.get(line.pool.name) is line:
            del self.lines[line.pool.name]


def _on_running_loop(delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(delay_s, call)
