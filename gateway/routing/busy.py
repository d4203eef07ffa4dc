"""Whether workers have enough to do, so that a request had better wait in the gateway. Pure.

A worker has enough when its queue is long (``W`` above ``routing.max_wait_s``) or its KV memory
could not take the request (``M`` above 0), and never while it is idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.routing.cost import MEMORY_FILL, queue_s

if TYPE_CHECKING:
    from collections.abc import Collection

    from gateway.routing.choose import Candidate, Decision
    from gateway.routing.pool import Worker


def is_busy(decision: Decision, max_wait_s: float) -> bool:
    """Whether every worker that may be chosen has enough to do, and none of them is idle.

    Args:
        decision: With at least one that may be chosen. By least load nobody waits.
        max_wait_s: Queue above which a worker has enough to do.
    """
    request = decision.input
    if request.mode == "least_load":
        return False
    candidates, now_s, allowance = request.candidates, request.now_s, request.allowance_tokens
    # Nearly always the chosen one is free, and nothing else has to be looked at.
    if not _has_enough(candidates[decision.position], now_s, max_wait_s, allowance):
        return False
    return all(_has_enough(c, now_s, max_wait_s, allowance) for c in candidates if c.eligible)


def _has_enough(c: Candidate, now_s: float, max_wait_s: float, allowance_tokens: int) -> bool:
    if not c.in_flight:
        return False
    if c.queued_s > max_wait_s and queue_s(c, now_s) > max_wait_s:
        return True
    demand = c.active_tokens + c.new_tokens + allowance_tokens
    return c.capacity_tokens > 0 and demand > MEMORY_FILL * c.capacity_tokens


def excess_s(decision: Decision, max_wait_s: float) -> float:
    """Return in how many seconds the shortest queue will be short enough, as predicted."""
    request = decision.input
    queues = [queue_s(c, request.now_s) for c in request.candidates if c.eligible]
    return max(0.0, min(queues, default=0.0) - max_wait_s)


def least_queue_s(workers: Collection[Worker], now_s: float, max_wait_s: float) -> float | None:
    """Return the shortest queue if none of the workers can be free for any request; else None.

    Far cheaper than choosing. It reads this gateway's own books alone: what others have in flight
    only adds to them. Workers that may not be chosen are for the choice to judge.
    """
    if not workers:
        return None
    shortest = float("inf")
    for worker in workers:
        books = worker.books
        if not books.in_flight or worker.draining or worker.health.is_suspect:
            return None
        queue = books.queued_s - max(0.0, now_s - books.progress_at_s)
        fill = books.active_tokens / worker.capacity_tokens if worker.capacity_tokens else 0.0
        if queue <= max_wait_s and fill <= MEMORY_FILL:
            return None
        shortest = min(shortest, queue)
    return shortest
