"""Keeps workers warm: whose cache became empty is filled again before it has its full share.

Each gateway sees for itself that a worker joined, restarted or was cleared, and lets it start
slowly; one of them fills it, from the prompts that are stored (``keep_warm.store``).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from gateway.routing.cost import EVICTION_FILL
from gateway.routing.slow_start import SlowStart
from gateway.warm.items import Order
from gateway.warm.run import Parts, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.config import KeepWarmConfig
    from gateway.routing.pool import Pool, Worker
    from gateway.warm.shareable import Shareable
    from gateway.warm.store import PromptStore, Stored
    from gateway.worth.account import WorthAccount

# How soon an empty cache is noticed: few requests come in that time.
LOOK_S = 0.2
# Workers that are first seen ready so soon after the gateway's own start did not join: the gateway
# did, and they may be warm.
JOIN_AFTER_S = 10.0
# A cache that lost nine of ten blocks between two looks was cleared; evictions are as slow as what
# they make room for.
MIN_BLOCKS = 32
KEPT_SHARE = 0.1
# Share of the worker's time: it has few users until it is filled.
MAX_SHARE = 0.8
EXPIRE_EVERY_S = 60.0
# What had no room beside requests in flight is tried again while the worker starts slowly.
ROOM_AGAIN_S = 1.0
# A worker that is back may be another process; its metrics say so within a moment, if ever.
DOUBT_S = 1.0

log = structlog.get_logger("warmlane")


@dataclass(slots=True)
class _Seen:
    """What was seen of one worker last."""

    epoch: float | None
    num_blocks: int
    was_ready: bool
    # When it was found away; None = it is there, and it is known whether as the same process.
    away_s: float | None = None


class Keeper:
    """Looks after the pools with ``keep_warm.enabled``; event loop only.

    Args:
        parts: For its runs.
        store: The prompts that may be warmed.
        account: What is reused how much.
        configs: Pool name -> its configuration.
        is_mine: Says of a pool and a worker whether this gateway is the one to fill it.

    Attributes:
        runs: Worker id -> the run that fills it now, or did last.
    """

    def __init__(
        self,
        parts: Parts,
        store: PromptStore,
        account: WorthAccount,
        configs: Mapping[str, KeepWarmConfig],
        is_mine: Callable[[str, str], bool],
    ) -> None:
        self.runs: dict[str, tuple[str, Run]] = {}
        self._parts = parts
        self._store = store
        self._account = account
        self._configs = configs
        self._is_mine = is_mine
        self._clock = parts.clock
        self._began_s = self._clock()
        self._seen: dict[str, _Seen] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._expire_due_s = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def forget_worker(self, worker_id: str) -> None:
        """Forget a worker that left for good, and what was done for it."""
        self._seen.pop(worker_id, None)
        self.runs.pop(worker_id, None)
        task = self._tasks.pop(worker_id, None)
        if task is not None:
            task.cancel()

    def look(self) -> None:
        """Look at every worker once."""
        now_s = self._clock()
        if now_s >= self._expire_due_s:
            self._expire_due_s = now_s + EXPIRE_EVERY_S
            self._store.expire()
        for name, config in self._configs.items():
            pool = self._parts.dispatcher.pools.get(name)
            if pool is None or not config.enabled:
                continue
            for worker in list(pool.workers.values()):
                why = self._why(pool, worker, now_s)
                if why:
                    self._begin(pool, worker, why, config)
                elif worker.slow_start is not None:
                    self._end_if_done(pool, worker, now_s)

    def _why(self, pool: Pool, worker: Worker, now_s: float) -> str:
        """Say whether a worker's cache became empty since the last look, and by what."""
        num_blocks = 0
        if pool.index is not None:
            num_blocks = sum(pool.index.blocks_by_tier(worker.id).values())
        seen = self._seen.get(worker.id)
        if seen is None:
            self._seen[worker.id] = _Seen(worker.epoch, num_blocks, worker.health.ready)
            is_late = now_s - self._began_s >= JOIN_AFTER_S
            return "joined" if is_late and worker.health.ready else ""
        epoch, before, was_ready = seen.epoch, seen.num_blocks, seen.was_ready
        if not worker.health.ready:
            self._doubt(worker, seen, now_s)
            return ""  # its epoch is looked at when it is back
        seen.num_blocks, seen.was_ready = num_blocks, True
        seen.epoch = worker.epoch if worker.epoch is not None else epoch
        if epoch is not None and seen.epoch != epoch:
            return "restarted"
        if seen.away_s is not None and self._is_same(worker, seen, now_s):
            seen.away_s = worker.slow_start = None
        if not was_ready and epoch is None and now_s - self._began_s >= JOIN_AFTER_S:
            return "joined"
        if before >= MIN_BLOCKS and num_blocks < KEPT_SHARE * before:
            return "cleared"
        return ""

    def _doubt(self, worker: Worker, seen: _Seen, now_s: float) -> None:
        """Let a worker that is away start slowly once it is back.

        Whoever waits meanwhile would all go there in the moment before it is known to be empty.
        """
        seen.away_s = now_s
        if worker.slow_start is None or worker.slow_start.is_over(now_s):
            worker.slow_start = SlowStart(now_s)

    def _is_same(self, worker: Worker, seen: _Seen, now_s: float) -> bool:
        """Whether a worker that is back is known, or must be taken, to be the same process."""
        assert seen.away_s is not None, "asked of workers that were away"
        watch = self._parts.fleet.watches.get(worker.id)
        is_told = watch is not None and watch.scrape.epoch is not None
        return is_told or now_s - seen.away_s >= DOUBT_S

    def _begin(self, pool: Pool, worker: Worker, why: str, config: KeepWarmConfig) -> None:
        self._parts.warmed.emptied(worker.id)
        self._seen[worker.id].away_s = None
        chosen = self.chosen(pool, worker, config.budget_tokens)
        if not chosen:
            worker.slow_start = None  # there is nothing to wait for
            return
        worker.slow_start = SlowStart(self._clock())
        log.info("keep_warm", worker=worker.id, why=why, prefixes=len(chosen))
        if not self._is_mine(pool.name, worker.id):
            return
        before = self._tasks.pop(worker.id, None)
        if before is not None:
            before.cancel()
        fill = self._fill(pool, worker, why, chosen, config)
        self._tasks[worker.id] = asyncio.get_running_loop().create_task(fill)

    def chosen(self, pool: Pool, worker: Worker, budget_tokens: int) -> list[Stored]:
        """Return what a worker is to hold: what it served, and what is at home there and nowhere.

        First comes what nobody else holds, since there its users would have to compute it, and then
        what reuse saves most with.
        """
        found = []
        for entry in self._store:
            if entry.pool != pool.name:
                continue
            if worker.id not in entry.workers and not self._is_home(pool, worker, entry):
                continue
            group = self._account.document(pool.name, entry.ring_key)
            value_s = 0.0 if group is None else group.recompute_s
            is_only = not self._others(pool, worker, entry)
            found.append((entry.is_pinned, is_only, value_s, entry.used_s, entry))
        found.sort(key=lambda row: row[:4], reverse=True)
        chosen, left = [], budget_tokens
        if worker.capacity_tokens:
            left = min(left, int(EVICTION_FILL * worker.capacity_tokens))
        for *_, entry in found:
            if len(entry.ids) <= left:
                chosen.append(entry)
                left -= len(entry.ids)
        return chosen

    def _is_home(self, pool: Pool, worker: Worker, entry: Stored) -> bool:
        is_home = worker.id in pool.ring.home(entry.ring_key, pool.set_size)
        return is_home and not self._others(pool, worker, entry)

    def _others(self, pool: Pool, worker: Worker, entry: Stored) -> bool:
        """Whether anybody else holds it."""
        holders = {} if pool.index is None else pool.index.match([entry.end])
        return any(holder != worker.id for holder in holders)

    async def _fill(
        self, pool: Pool, worker: Worker, why: str, chosen: list[Stored], config: KeepWarmConfig
    ) -> None:
        began_s = self._clock()
        start = worker.slow_start
        try:
            while chosen:
                run = await self._run(worker, why, chosen, config)
                if not run.standing.num_without_room or worker.slow_start is not start:
                    break
                await asyncio.sleep(ROOM_AGAIN_S)
                if start is None or start.is_over(self._clock()):
                    break
                chosen = self._missing(pool, worker, chosen)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a worker that is not filled is slow for a minute, no more
            log.error("keep_warm_failed", worker=worker.id, exc_info=error)
        finally:
            # Another one may have begun meanwhile.
            if worker.slow_start is start:
                worker.slow_start = None
            counts = self._parts.counts
            counts.keep_runs[pool.name, why] += 1
            passed_s = self._clock() - began_s
            counts.keep_s[pool.name] = counts.keep_s.get(pool.name, 0.0) + passed_s

    async def _run(
        self, worker: Worker, why: str, chosen: list[Stored], config: KeepWarmConfig
    ) -> Run:
        """Warm what was chosen, as far as there is room; return the run."""
        found = []
        for rank, entry in enumerate(chosen):
            one = await shareable_of(self._parts, entry)
            if one is not None:
                # In this order, whatever the plan makes of their worth.
                item = replace(one.item, priority=-rank)
                found.append(replace(one, item=item))
        order = Order(
            (),
            budget_tokens=config.budget_tokens,
            max_share=MAX_SHARE,
            verify=False,
            yields=False,
        )
        run_id = f"keep-{worker.id}-{round(self._clock() * 1000)}"
        run = Run(self._parts, order, run_id, _silent, only=(worker.id,), found=found)
        self.runs[worker.id] = why, run
        await run.run()
        reasons = run.standing.reasons()
        log.info("keep_warm_done", worker=worker.id, reasons=reasons, **run.summary())
        return run

    def _missing(self, pool: Pool, worker: Worker, chosen: list[Stored]) -> list[Stored]:
        """Return what of it the worker does not hold by now."""
        index = pool.index
        return [e for e in chosen if index is None or not index.holds(worker.id, e.end)]

    def _end_if_done(self, pool: Pool, worker: Worker, now_s: float) -> None:
        """End the slow start of a worker that another gateway has filled, or that had its time."""
        assert worker.slow_start is not None, "asked of slow workers only"
        if self._seen[worker.id].away_s is not None:
            return  # it is not known yet what it needs
        if worker.slow_start.is_over(now_s):
            worker.slow_start = None
            return
        task = self._tasks.get(worker.id)
        if (task is not None and not task.done()) or pool.index is None:
            return
        config = self._configs[pool.name]
        chosen = self.chosen(pool, worker, config.budget_tokens)
        if all(pool.index.holds(worker.id, entry.end) for entry in chosen):
            worker.slow_start = None

    def state(self) -> list[dict[str, Any]]:
        """Return the last run of each worker, as plain values."""
        return [
            {"worker": worker, "why": why, **run.summary(), "reasons": run.standing.reasons()}
            for worker, (why, run) in self.runs.items()
        ]


async def shareable_of(parts: Parts, entry: Stored, copies: int = 1) -> Shareable | None:
    """Return a stored prefix as what can be warmed; None if it cannot be any more."""
    try:
        found = await parts.finder.find(entry.item(copies))
    except Exception:  # its model or adapter is gone, or the tokenizer is another one
        return None
    return replace(found, ring_key=entry.ring_key)


async def _silent(_event: dict[str, Any]) -> None:
    """Nobody listens to a run that nobody asked for; its outcome is in metrics and state."""
