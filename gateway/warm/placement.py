"""Reads pools, index and worth into the plain numbers that the plan is made of."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from gateway.fleet.adapters import cards, fetch_models
from gateway.routing.health import Breaker
from gateway.warm.plan import UNKNOWN_REUSES, Held, Host, Placement, Tier, Wanted, make_plan

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gateway.fleet.fleet import Fleet
    from gateway.routing.pool import Pool, Worker
    from gateway.warm.shareable import Shareable
    from gateway.warm.warmed import Warmed
    from gateway.worth.account import WorthAccount
    from prefix_index.blocks import BlockHash
    from prefix_index.index import Hit

# Workers along the ring that are tried before the emptiest: a home that is full, and one that is
# away.
SPILL = 2
# Items looked up in the index before other work gets its turn: about two milliseconds.
LOT = 64
_EJECTED = "ejected after failures"


class Placer:
    """Makes plans; event loop only.

    Args:
        fleet: Knows the workers' figures.
        account: Says what is reused how often.
        warmed: What earlier runs put there, which is not to be pushed out by later ones.
    """

    def __init__(self, fleet: Fleet, account: WorthAccount, warmed: Warmed) -> None:
        self._fleet = fleet
        self._account = account
        self._warmed = warmed
        # Worker id -> its epoch and its context, asked once per process of the worker.
        self._contexts: dict[str, tuple[float | None, int]] = {}

    async def plan(
        self,
        found: Sequence[Shareable],
        budget_tokens: int | None,
        *,
        only: Collection[str] = (),
        now_s: float,
    ) -> list[Placement]:
        """Place items of any pools.

        Args:
            found: The items.
            budget_tokens: Most tokens to compute.
            only: Workers that may be used; none named = all.
            now_s: Monotonic seconds.
        """
        by_pool: dict[str, list[Shareable]] = {}
        for one in found:
            by_pool.setdefault(one.pool.name, []).append(one)
        placements: list[Placement] = []
        for items in by_pool.values():
            pool = items[0].pool
            workers = [w for w in pool.workers.values() if not only or w.id in only]
            await self._learn_contexts(workers)
            hosts = self._hosts(pool, workers, now_s)
            wanted = []
            for number, item in enumerate(items):
                wanted.append(self._wanted(item))
                if number % LOT == LOT - 1:
                    await asyncio.sleep(0)
            spent = sum(_cost(placement) for placement in placements)
            left = None if budget_tokens is None else max(0, budget_tokens - spent)
            placements += await asyncio.to_thread(make_plan, wanted, hosts, left)
        return placements

    def context_tokens(self, worker: Worker) -> int:
        """Return a worker's context as it told it last; 0 if it did not."""
        return self._contexts.get(worker.id, (None, 0))[1]

    def _wanted(self, found: Shareable) -> Wanted:
        item, pool = found.item, found.pool
        group = self._account.document(pool.name, found.ring_key)
        size = min(len(pool.workers), max(item.copies, pool.set_size) + SPILL)
        return Wanted(
            item.id,
            found.num_tokens,
            found.prompt_tokens + 1,
            pool.ring.home(found.ring_key, size) if pool.workers else (),
            item.copies,
            item.pin,
            item.priority,
            UNKNOWN_REUSES if group is None else max(UNKNOWN_REUSES, group.reuses),
            held_by(pool, found),
            pool.adapter_of(item.model),
        )

    def _hosts(self, pool: Pool, workers: Sequence[Worker], now_s: float) -> list[Host]:
        reused = self._reused(pool)
        hosts = [self._host(pool, worker, reused.get(worker.id, ()), now_s) for worker in workers]
        if all(host.why for host in hosts):
            # Nobody else is left: one that was ejected is tried again within seconds.
            return [replace(h, why="") if h.why == _EJECTED else h for h in hosts]
        return hosts

    def _host(
        self, pool: Pool, worker: Worker, reused: Sequence[tuple[float, int]], now_s: float
    ) -> Host:
        index, block_size = pool.index, pool.block_size
        cpu_held = 0 if index is None else index.held_blocks(worker.id, "cpu") * block_size
        return Host(
            worker.id,
            why=_why(worker, now_s),
            block_size=worker.block_size or block_size,
            context_tokens=self.context_tokens(worker),
            capacity_tokens=worker.capacity_tokens,
            active_tokens=worker.books.active_tokens,
            reused=reused,
            cpu_free_tokens=max(0, worker.cpu_capacity_tokens - cpu_held),
            bytes_per_token=self._bytes_per_token(pool, worker),
            model=worker.learner.model,
            adapters=worker.adapters,
        )

    def _reused(self, pool: Pool) -> dict[str, list[tuple[float, int]]]:
        """Return worker -> reuses and tokens of each hot document it holds on its device.

        A system prompt that two documents begin with counts for both: too much is kept rather than
        too little.
        """
        found: dict[str, list[tuple[float, int]]] = {}
        index = pool.index
        if index is None:
            return found

        def add(end: BlockHash, reuses: float, tokens: int) -> None:
            # A block is visible only where all before it is: one look-up tells who has it.
            for worker in index.match([end]):
                if index.holds(worker, end, "gpu"):
                    found.setdefault(worker, []).append((reuses, tokens))

        hot = set()
        for name, ring_key, group in self._account.hot():
            if name == pool.name and group.shared_end is not None:
                hot.add(ring_key)
                add(group.shared_end, group.reuses, group.shared_end_tokens)
        for prefix in self._warmed:
            if prefix.pool == pool.name and (prefix.is_pinned or prefix.ring_key not in hot):
                add(prefix.end, inf if prefix.is_pinned else UNKNOWN_REUSES, prefix.num_tokens)
        return found

    def _bytes_per_token(self, pool: Pool, worker: Worker) -> float | None:
        """Return KV bytes of a token by what the worker uses and holds; None if it does not say."""
        watch = self._fleet.watches.get(worker.id)
        used = None if watch is None else watch.scrape.values.get("kv_cache_gpu_usage_bytes")
        index = pool.index
        held = 0 if index is None else index.held_blocks(worker.id) * pool.block_size
        return used / held if used and held else None

    async def _learn_contexts(self, workers: Sequence[Worker]) -> None:
        unknown = [
            worker
            for worker in workers
            if worker.upstream is not None
            and worker.health.ready
            and self._contexts.get(worker.id, (-1.0, 0))[0] != worker.epoch
        ]
        for worker, tokens in zip(
            unknown, await asyncio.gather(*map(_ask_context, unknown)), strict=True
        ):
            if tokens is not None:
                self._contexts[worker.id] = (worker.epoch, tokens)


def held_by(pool: Pool, found: Shareable) -> Mapping[str, Held]:
    """Return worker -> what the index says it holds of an item."""
    if pool.index is None:
        return {}
    hits = pool.index.match(found.hashes)
    return {
        worker: Held(hit.total, _slowest(hit))
        for worker, hit in hits.items()
        if worker in pool.workers and pool.is_readable(pool.workers[worker])
    }


def _slowest(hit: Hit) -> Tier:
    tier: Tier = "gpu"
    if hit.cpu:
        tier = "cpu"
    if hit.disk:
        tier = "disk"
    if hit.remote:
        tier = "remote"
    return tier


def _why(worker: Worker, now_s: float) -> str:
    if worker.draining:
        return "draining"
    if not worker.health.ready:
        return "not ready"
    if worker.health.breaker(now_s) is Breaker.OPEN:
        return _EJECTED
    return "of another model or tokenizer than its pool" if worker.is_apart else ""


def _cost(placement: Placement) -> int:
    return placement.tokens if placement.action == "warm" else 0


async def _ask_context(worker: Worker) -> int | None:
    """Return a worker's longest context as ``/v1/models`` tells it.

    0 if that does not say, None if there is no answer.
    """
    assert worker.upstream is not None, "only workers with connections are asked"
    document = await fetch_models(worker.upstream)
    if document is None:
        return None
    lengths = [card.get("max_model_len") for card in cards(document)]
    return max((length for length in lengths if type(length) is int and length > 0), default=0)
