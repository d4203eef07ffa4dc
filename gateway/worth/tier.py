"""The lower tier of a pool, as its restores show it: how quick it is, and what is in its way."""

from __future__ import annotations

from functools import partial
from math import exp2
from typing import TYPE_CHECKING

from gateway.routing.cost import HALF_LIFE_S, restore_link_s
from gateway.worth.group import Rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.fleet.fleet import Fleet
    from gateway.routing.cost import Candidate, CostModel
    from gateway.routing.plan import Plan
    from gateway.routing.ticket import Ticket

# Restores that are averaged, about; and from which on a tier counts as measured.
_KEEP = 0.95
MIN_RESTORES = 3
# Two means over operations of other sizes: more than this is an accident.
MAX_WRITE_RATIO = 4.0


class Tier:
    """The lower tier of one pool, as its restores show it.

    Attributes:
        rate: What is known of it.
    """

    __slots__ = ("_num_restores", "_seconds", "_tokens", "rate")

    def __init__(self) -> None:
        self.rate = Rate(1.0, is_measured=False)
        self._num_restores = 0
        self._tokens = self._seconds = 0.0

    def observe(self, c: Candidate, model: CostModel) -> None:
        """Take a finished request: the worker as it was chosen, with its constants."""
        restored = c.hit_cpu + c.hit_disk + c.hit_remote
        if restored:
            self._num_restores += 1
            self._tokens = _KEEP * self._tokens + restored
            self._seconds = _KEEP * self._seconds + restore_link_s(model, c)
            self.rate = Rate(self._tokens / self._seconds, self._num_restores >= MIN_RESTORES)
        elif not self._num_restores and self.rate.tokens_per_s != model.restore_cpu_tokens_per_s:
            self.rate = Rate(model.restore_cpu_tokens_per_s, is_measured=False)


def eviction_s(
    plan: Plan, ticket: Ticket, c: Candidate, model: CostModel, new_tokens: int, now_s: float
) -> float:
    """Return the recompute of what new tokens push out of a full CPU tier, as routing prices it."""
    if not c.cpu_capacity_tokens or not new_tokens:
        return 0.0
    over = min(new_tokens, new_tokens - (c.cpu_capacity_tokens - c.cpu_held_tokens))
    if over <= 0:
        return 0.0
    index, worker = plan.pool.index, ticket.worker
    age_s = 0.0
    if index is not None:
        # The tier's own order is not told; its oldest block is at least as old as the device's.
        is_held = partial(index.holds, worker.id, tier="gpu")
        age_s = worker.mirror.oldest_age_s(now_s, is_held)
    return over * model.token_s * exp2(-age_s / HALF_LIFE_S)


def write_per_read(fleet: Fleet) -> Callable[[str], float]:
    """Return what tells how much longer a worker takes to write to its tier than to read from it.

    By the mean latencies that it reports itself; 1 for workers that report none.
    """

    def ratio(worker_id: str) -> float:
        watch = fleet.watches.get(worker_id)
        values = {} if watch is None else watch.scrape.values
        read_s = values.get("kv_cache_offload_read_latency")
        write_s = values.get("kv_cache_offload_write_latency")
        if not read_s or not write_s:
            return 1.0
        return min(max(write_s / read_s, 1 / MAX_WRITE_RATIO), MAX_WRITE_RATIO)

    return ratio
