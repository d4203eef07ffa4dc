"""One warm-up run: reads the items, plans, sends, proves, and says each as it happens.

Each worker gets its items by itself, so that one that is slow, refuses or dies holds up nobody
else. A run may be stopped at any time; running it again goes on where it ended, since what is held
is not computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from gateway.fleet.fleet import Fleet
from gateway.routing.dispatch import Dispatcher
from gateway.warm.items import Refused
from gateway.warm.manners import Manners
from gateway.warm.metrics import WarmCounts
from gateway.warm.placement import Placer, held_by
from gateway.warm.sending import Sender, SendError, Sent
from gateway.warm.shareable import Finder, Shareable
from gateway.warm.standing import Standing, failed_event, plan_event, progress_event
from gateway.warm.verify import Proof, prove
from gateway.warm.warmed import Warmed

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Awaitable, Collection, Coroutine, Sequence

    from gateway.routing.pool import Pool, Worker
    from gateway.warm.items import Item, Order
    from gateway.warm.standing import Job

    Emit = Callable[[dict[str, Any]], Awaitable[None]]

T = TypeVar("T")

log = structlog.get_logger("warmlane")


@dataclass(frozen=True, slots=True)
class Parts:
    """What all runs of a process use.

    ``user_seen_s`` has when a client's request ended on each worker last.
    """

    dispatcher: Dispatcher
    fleet: Fleet
    finder: Finder
    placer: Placer
    sender: Sender
    counts: WarmCounts
    warmed: Warmed
    clock: Callable[[], float]
    clock_unix: Callable[[], float]
    on_warm: Callable[[Shareable], None]
    user_seen_s: dict[str, float]


class Run:
    """One run; event loop only.

    Args:
        parts: What it uses.
        order: What is asked for.
        run_id: Its name.
        emit: Takes each event; it waits while the receiver is slow.
        only: Workers that may be used; none named = all.
        found: What is to be warmed beside the order's items, read already.

    Attributes:
        standing: Where its copies stand.
        is_over: Whether it has ended.
        is_stopped: Whether it was told to stop.
        has_failed: Whether something in the gateway ended it.
    """

    def __init__(
        self,
        parts: Parts,
        order: Order,
        run_id: str,
        emit: Emit,
        *,
        only: Collection[str] = (),
        found: Sequence[Shareable] = (),
    ) -> None:
        self.run_id = run_id
        self.standing = Standing(order.refused)
        self.is_over = False
        self.is_stopped = False
        self.has_failed = False
        self.began_s = parts.clock()
        self.began_unix_s = parts.clock_unix()
        self.elapsed_s = 0.0
        self._parts = parts
        self._order = order
        self._emit = emit
        self._only = only
        self._found = found

    def stop(self) -> None:
        """Send nothing more; what is in flight finishes."""
        self.is_stopped = True

    async def run(self) -> None:
        """Do all of it; called once. Only a receiver that fails ends it early."""
        try:
            found = await self._find(self._order.items)
            placements = await self._parts.placer.plan(
                list(found.values()),
                self._order.budget_tokens,
                only=self._only,
                now_s=self._parts.clock(),
            )
            jobs = self.standing.place(found, placements)
            await self._emit(plan_event(self.run_id, placements, self.standing.refused))
            for name, reason in self.standing.refused.items():
                await self._emit(failed_event(name, None, reason))
            if not self._order.dry_run or self._order.verify:
                await self._serve_all(jobs)
            if not self._order.dry_run:
                await self._look_again()
        except ConnectionError:
            self.stop()  # whoever takes the events is gone
            raise
        except BaseException:
            self.has_failed = not self.is_stopped
            raise
        finally:
            self.is_over = True
            self.elapsed_s = self._parts.clock() - self.began_s
            # None of its prompts is kept.
            self.standing.let_go()
            self._order, self._found = replace(self._order, items=()), ()
        await self._emit(self.summary() | {"event": "end"})

    def summary(self) -> dict[str, Any]:
        """Return the run in numbers, as plain values."""
        elapsed_s = self.elapsed_s if self.is_over else self._parts.clock() - self.began_s
        return {
            "run_id": self.run_id,
            **self.standing.numbers(),
            "elapsed_s": round(elapsed_s, 3),
            "stopped": self.is_stopped,
            "dry_run": self._order.dry_run,
        }

    def state(self) -> dict[str, Any]:
        """Return the run with where each copy stands, as plain values."""
        name = "running"
        if self.is_over:
            name = "failed" if self.has_failed else "stopped" if self.is_stopped else "done"
        elif self.is_stopped:
            name = "stopping"
        return self.summary() | {
            "state": name,
            "model": self._order.model or None,
            "started_at": self.began_unix_s,
            "documents": self.standing.rows(),
        }

    async def _find(self, items: Sequence[Item]) -> dict[str, Shareable]:
        """Read all items; those that cannot be are refused."""
        found = {one.item.id: one for one in self._found}
        for item in items:
            if self.is_stopped:
                break
            try:
                found[item.id] = await self._parts.finder.find(item)
            except Refused as error:
                self._refuse(item.id, str(error))
            except Exception as error:  # bodies are odd in more ways than anybody foresees
                log.warning("warm_item_unreadable", error=type(error).__name__)
                self._refuse(item.id, f"it cannot be read: {type(error).__name__}")
        return found

    def _refuse(self, name: str, reason: str) -> None:
        self.standing.refused[name] = reason
        self._parts.counts.failed[""] += 1

    async def _serve_all(self, jobs: dict[str, deque[Job]]) -> None:
        tasks = []
        for worker_id, queue in jobs.items():
            pool = queue[0].found.pool
            worker = pool.workers.get(worker_id)
            if worker is None:
                await self._give_up(queue, f"worker {worker_id} is gone")
                continue
            manners = self._manners(pool, worker)
            tasks += [
                asyncio.ensure_future(self._serve(worker, queue, manners))
                for _ in range(min(self._order.concurrency, len(queue)))
            ]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            await _cancel(tasks)  # the process ends
            raise
        except BaseException:
            # The receiver is gone: nothing more is sent, what is in flight finishes.
            self.stop()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _manners(self, pool: Pool, worker: Worker) -> Manners:
        parts, order = self._parts, self._order
        return Manners(
            parts.dispatcher,
            parts.fleet,
            parts.sender,
            pool,
            worker,
            order.max_share,
            order.yields,
            parts.user_seen_s,
            parts.clock,
        )

    async def _serve(self, worker: Worker, queue: deque[Job], manners: Manners) -> None:
        """Send and prove one item after the other.

        Each is proven while the next one is computed: a step of the engine costs as much for one
        token as for a few, so that the probe's goes along for nothing.
        """
        proof: asyncio.Task[None] | None = None
        try:
            while queue and not self.is_stopped:
                job = queue.popleft()
                sent = await self._tried(job, worker, queue, self._send(job, worker, manners))
                if proof is not None:
                    await proof
                    proof = None
                if sent is not None:
                    proving = self._prove(job, worker, manners, sent)
                    proof = asyncio.ensure_future(self._tried(job, worker, queue, proving))
            if proof is not None:
                await proof
        finally:
            if proof is not None:
                await _cancel([proof])

    async def _tried(
        self, job: Job, worker: Worker, queue: deque[Job], doing: Coroutine[Any, Any, T]
    ) -> T | None:
        """Do a part of one item; where it fails, the item has failed and None is returned."""
        try:
            return await doing
        except SendError as error:
            await self._fail(job, worker.id, str(error))
            if error.is_hopeless:
                await self._give_up(queue, str(error))
        except ConnectionError:
            raise  # whoever takes the events is gone
        except Exception as error:
            log.error("warm_item_failed", exc_info=error)
            await self._fail(job, worker.id, f"{type(error).__name__} in the gateway")
        return None

    async def _prove(self, job: Job, worker: Worker, manners: Manners, computed: int) -> None:
        """Prove one item, if proof is asked for; ``computed`` tokens were for it so far."""
        if self._order.verify:
            await manners.users_first(self._is_stopping)
            parts = self._parts
            proof = await prove(
                parts.sender,
                job.found,
                worker.id,
                job.placement.tokens,
                parts.clock,
                may_compute=not self._order.dry_run,
            )
            self._count(worker.id, proof.sent, is_probe=True)
            computed += proof.computed_tokens
            job.is_warm = proof.is_warm
            self.standing.judge(job, "warm" if proof.is_warm else "failed", proof.reason)
            job.state = "warm" if proof.is_warm else "cold"
            job.cached_tokens, job.computed_tokens = proof.cached_tokens, computed
            if not proof.is_warm:
                self._parts.counts.failed[worker.id] += 1
            await self._emit(proof.event(job.found.item.id, worker.id))
        else:
            job.is_warm = True
            self.standing.judge(job, "warm", "")
        if job.is_warm:
            self.standing.served.append(job)
            self._parts.warmed.add(job.found, worker.id, computed)
            self._parts.on_warm(job.found)

    async def _say_cold(self, job: Job, worker: Worker) -> None:
        """Tell of a copy that is not there, without a probe: that would compute it."""
        proof = Proof(job.placement.tokens)
        held = held_by(job.found.pool, job.found).get(worker.id)
        proof.held_tokens = 0 if held is None else held.tokens
        self.standing.judge(job, "failed", "not held")
        job.state = "cold"
        event = proof.event(job.found.item.id, worker.id)
        await self._emit(event | {"cached_tokens": 0, "reason": "not held"})

    async def _send(self, job: Job, worker: Worker, manners: Manners) -> int | None:
        """Send what of one item is missing, in pieces.

        Returns:
            The tokens computed for it; None if there is nothing to prove: the run was stopped, or
            only looks at what is there and this is not.
        """
        sender, found, tokens = self._parts.sender, job.found, job.placement.tokens
        name = found.item.id
        if job.placement.action != "warm":
            return 0
        if self._order.dry_run:
            await self._say_cold(job, worker)
            return None
        job.state = "running"
        await self._emit({"event": "start", "id": name, "worker": worker.id, "tokens": tokens})
        # What is there already needs no pieces.
        held = held_by(found.pool, found).get(worker.id)
        done = 0 if held is None else min(held.tokens, tokens)
        sent: list[Sent] = []
        while not sent or done < tokens:
            async with manners.turn(self._is_stopping):
                if self.is_stopped:
                    return None
                end = tokens
                if sender.takes_pieces(found.pool):
                    end = min(tokens, manners.piece_tokens(done, tokens))
                sent.append(await sender.send(found, worker.id, end))
            self._count(worker.id, sent[-1:])
            done = end
            if done < tokens:
                await self._emit(progress_event("progress", name, worker.id, done, sent))
        await self._emit(progress_event("done", name, worker.id, tokens, sent))
        return sum(part.computed_tokens for part in sent)

    async def _look_again(self) -> None:
        """Take back what was pushed out by what came after it."""
        for job in self.standing.served:
            pool, worker_id = job.found.pool, job.placement.worker
            worker = None if worker_id is None else pool.workers.get(worker_id)
            if worker is None or worker.mode != "exact":
                continue
            held = held_by(pool, job.found).get(worker.id)
            tokens = 0 if held is None else held.tokens
            if tokens < job.placement.tokens:
                reason = "it was evicted by what came after it"
                self.standing.judge(job, "failed", reason)
                await self._emit(
                    {
                        "event": "verified",
                        "id": job.found.item.id,
                        "worker": worker.id,
                        "cached_tokens": None,
                        "wanted_tokens": job.placement.tokens,
                        "held_tokens": tokens,
                        "warm": False,
                        "proven": False,
                        "reason": reason,
                    }
                )

    def _is_stopping(self) -> bool:
        return self.is_stopped

    def _count(self, worker_id: str, sent: Sequence[Sent], *, is_probe: bool = False) -> None:
        """Add up what requests computed and found; a probe finds what was warmed just before."""
        counts = self._parts.counts
        for one in sent:
            if is_probe and one.cached_tokens is None:
                continue
            self.standing.computed_tokens += one.computed_tokens
            counts.computed_tokens[worker_id] += one.computed_tokens
            if not is_probe:
                self.standing.cached_tokens += one.cached_tokens or 0
                counts.cached_tokens[worker_id] += one.cached_tokens or 0

    async def _give_up(self, queue: deque[Job], reason: str) -> None:
        while queue:
            job = queue.popleft()
            await self._fail(job, job.placement.worker, reason)

    async def _fail(self, job: Job, worker_id: str | None, reason: str) -> None:
        self.standing.judge(job, "failed", reason)
        self._parts.counts.failed[worker_id or ""] += 1
        await self._emit(failed_event(job.found.item.id, worker_id, reason))


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
