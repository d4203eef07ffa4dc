"""Warm-up as the rest of the gateway uses it: runs, the hot list, purges, and what keeps warm."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import structlog

from gateway.errors import GatewayError, InvalidRequest, ModelNotFound, error_for_status
from gateway.warm.documents import DEFAULT_ROWS, documents_report
from gateway.warm.keep import Keeper, shareable_of
from gateway.warm.metrics import WarmCounts
from gateway.warm.placement import Placer
from gateway.warm.purge import Purge, purge
from gateway.warm.run import Parts, Run
from gateway.warm.sending import Sender
from gateway.warm.shareable import Finder
from gateway.warm.store import PromptStore
from gateway.warm.warmed import Warmed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.config import Settings
    from gateway.fleet.fleet import Fleet
    from gateway.proxy.limits import Limits
    from gateway.proxy.rewrite import Rewriter
    from gateway.routing.dispatch import Dispatcher, Plan, Ticket
    from gateway.warm.items import Order
    from gateway.warm.run import Emit
    from gateway.warm.shareable import Shareable
    from gateway.worth.account import WorthAccount

log = structlog.get_logger("warmlane")

# Runs whose outcome is remembered.
MAX_RUNS = 8
# Until the run that is under way may be over; clients wait as long as they like.
RETRY_AFTER_S = 2.0


class Warmer:
    """One per process; event loop only.

    Args:
        settings: Its pools' ``keep_warm``.
        dispatcher: Reads prompts, books requests.
        fleet: Knows the workers.
        account: What is reused how much.
        rewriters: Pool name -> its canonicalisation.
        limits: Deadlines of requests.
        on_finish: Told of each request to a worker once it is over.
        is_mine: Says of a pool and a worker whether this gateway is the one to fill it.
        clock: Monotonic seconds, the dispatcher's.
        clock_unix: Seconds since 1970.

    Attributes:
        counts: For metrics.
        store: Prompts that are kept.
        warmed: What was warmed.
        keeper: Keeps warm; ``run`` must be running for that.
    """

    def __init__(
        self,
        settings: Settings,
        dispatcher: Dispatcher,
        fleet: Fleet,
        account: WorthAccount,
        *,
        rewriters: Mapping[str, Rewriter],
        limits: Limits,
        on_finish: Callable[[Plan, Ticket], None] | None = None,
        is_mine: Callable[[str, str], bool] = lambda _pool, _worker: True,
        clock: Callable[[], float] = time.monotonic,
        clock_unix: Callable[[], float] = time.time,
    ) -> None:
        self.counts = WarmCounts()
        self.store = PromptStore(clock)
        self.warmed = Warmed()
        self._configs = {pool.name: pool.keep_warm for pool in settings.pools}
        self._storing = frozenset(
            pool.name for pool in settings.pools if pool.keep_warm.enabled and pool.keep_warm.store
        )
        self._fleet = fleet
        self._account = account
        self._clock = clock
        self._user_seen_s: dict[str, float] = {}
        self._parts = Parts(
            dispatcher,
            fleet,
            Finder(dispatcher, rewriters),
            Placer(fleet, account, self.warmed),
            Sender(dispatcher, limits, clock, on_finish),
            self.counts,
            self.warmed,
            clock,
            clock_unix,
            self._keep,
            self._user_seen_s,
        )
        self.keeper = Keeper(self._parts, self.store, account, self._configs, is_mine)
        self._runs: deque[Run] = deque(maxlen=MAX_RUNS)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_keeping(self) -> bool:
        """Whether any pool is to be kept warm."""
        return any(config.enabled for config in self._configs.values())

    def finished(self, plan: Plan, ticket: Ticket, shared_tokens: int) -> None:
        """Take note of a client's finished attempt; for its path: a few look-ups.

        Args:
            plan: The request.
            ticket: Of the attempt.
            shared_tokens: Leading tokens that had been computed before.
        """
        self._user_seen_s[ticket.worker.id] = self._clock()
        hit_tokens = self.warmed.hit(plan, ticket)
        if hit_tokens:
            self.counts.hit_tokens[ticket.worker.id] += hit_tokens
        if shared_tokens and plan.pool.name in self._storing:
            self.store.observe(plan, ticket, shared_tokens)

    def forget_worker(self, worker_id: str) -> None:
        """Forget a worker that left for good."""
        self.counts.forget_worker(worker_id)
        self.keeper.forget_worker(worker_id)
        self._user_seen_s.pop(worker_id, None)

    async def make_run(self, order: Order, emit: Emit) -> Run:
        """Make a run; the caller runs it. Only one sends at a time.

        Raises:
            ModelNotFound: If nobody serves the order's model.
            InvalidRequest: If the hot list is asked for and no prompts are kept.
            GatewayError: 409 while another one runs.
        """
        if order.model and self._parts.dispatcher.pool_for(order.model) is None:
            raise ModelNotFound(f"The model {order.model!r} does not exist.", param="model")
        if not order.dry_run:
            self._refuse_second()
        found = await self._hot(order) if order.live_limit else []
        run_id = order.run_id or secrets.token_hex(8)
        run = Run(self._parts, order, run_id, emit, found=found)
        if not order.dry_run:
            self._refuse_second()  # the hot list took a moment
            self._runs.append(run)
        return run

    def start(self, run: Run) -> asyncio.Task[None]:
        """Have a run run by itself; whoever waits for it may leave."""
        task = asyncio.get_running_loop().create_task(run.run())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def close(self) -> None:
        """End what runs; a second call does nothing more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        """Return ``GET /admin/v1/warm``: runs, the newest first, and what was kept warm."""
        return {
            "runs": [run.state() for run in reversed(self._runs)],
            "keep_warm": self.keeper.state(),
            "warm_documents": self.num_warm(),
        }

    def num_warm(self) -> dict[str, int]:
        """Return worker id -> prefixes that were warmed there and are held still."""
        counts: dict[str, int] = {}
        for pool in self._fleet.pools:
            counts |= self.warmed.held(pool)
        return counts

    def stored(self) -> tuple[int, int]:
        """Return how many prompts are kept, and their bytes."""
        return len(self.store), self.store.num_bytes

    def documents(self, limit: int = DEFAULT_ROWS) -> dict[str, Any]:
        """Return ``GET /admin/v1/documents``."""
        return documents_report(
            self._fleet.pools, self._account, self.store, self.warmed, limit=limit
        )

    def purge(self, order: Purge) -> dict[str, Any]:
        """Forget a tenant or a document; return what was removed and what is still held."""
        return purge(order, self._fleet.pools, self._account, self.store, self.warmed)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        # A receiver that left is nobody's fault.
        if error is not None and not isinstance(error, ConnectionError):
            log.error("warm_run_failed", exc_info=error)

    def _refuse_second(self) -> None:
        running = next((run for run in self._runs if not run.is_over), None)
        if running is None:
            return
        error: GatewayError = error_for_status(
            409, f"The warm-up run {running.run_id!r} is under way; only one sends at a time."
        )
        error.code = "warm_running"
        error.retry_after_s = RETRY_AFTER_S
        raise error

    async def _hot(self, order: Order) -> list[Shareable]:
        """Return the stored prefixes that reuse saves most with."""
        if not self._storing:
            raise InvalidRequest(
                "from_live: no prompts are kept; expected pools[].keep_warm with enabled: true and "
                "store: true.",
                param="from_live",
                code="prompts_not_stored",
            )
        rows = []
        for entry in self.store:
            if order.model in ("", entry.model):
                group = self._account.document(entry.pool, entry.ring_key)
                value_s = 0.0 if group is None else group.recompute_s
                rows.append((value_s, entry.used_s, entry))
        rows.sort(key=lambda row: row[:2], reverse=True)
        found: dict[tuple[str, str], Shareable] = {}
        for *_, entry in rows[: order.live_limit]:
            one = await shareable_of(self._parts, entry)
            if one is not None:
                found[entry.pool, entry.ring_key] = one
        return list(found.values())

    def _keep(self, found: Shareable) -> None:
        """Keep what an operator had warmed, so that a restarted worker gets it back."""
        if found.pool.name in self._storing and found.item.kind == "document":
            self.store.add(found)
