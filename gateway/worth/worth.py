"""The worth of lower tiers, as the rest of the gateway uses it.

Fed by every finished attempt, it says what may be offloaded of the next request.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gateway.config import OffloadConfig
from gateway.worth.account import WorthAccount
from gateway.worth.offload import offload_put, stable_limit
from gateway.worth.rule import Verdict
from gateway.worth.stable_ends import StableEnds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.config import Settings
    from gateway.routing.plan import Plan
    from gateway.routing.ticket import Ticket

_NO_CAP = OffloadConfig()


class Worth:
    """Account, known ends and caps of one process; event loop only.

    Args:
        settings: Its pools', routes' and tenants' ``offload``.
        clock: Monotonic seconds, the dispatcher's.
        write_per_read: As for ``WorthAccount``.
        secret: For ``hashed_key``.

    Attributes:
        account: Report and verdicts.
        ends: Where knowledge ends in prompts read before.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        write_per_read: Callable[[str], float] = lambda _worker: 1.0,
        secret: bytes = b"",
    ) -> None:
        self._offload = {pool.name: pool.offload for pool in settings.pools}
        self._capped = _capped_pools(settings)
        self.ends = StableEnds(clock=clock)
        self.account = WorthAccount(
            clock=clock,
            offload_limit=self._limit,
            write_per_read=write_per_read,
            secret=secret,
        )

    def observe(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of a finished attempt; for ``on_finish``. About 20 us; never raises."""
        shared_tokens = self.account.observe(plan, ticket)
        if shared_tokens and plan.pool.name in self._capped:
            self.ends.observe(plan, shared_tokens)

    def offload_put(
        self,
        plan: Plan,
        route_cap: int | None,
        body: bytes,
        *,
        also: Mapping[str, bytes] | None = None,
    ) -> dict[str, bytes]:
        """Return what to splice into a body; see ``offload.offload_put``.

        Args:
            plan: The request, with the pool it goes to.
            route_cap: The lower cap of its route and its tenant.
            body: The bytes that are forwarded.
            also: Other members of ``kv_transfer_params``.
        """
        pool = self._offload.get(plan.pool.name, _NO_CAP)
        verdict = Verdict.UNKNOWN
        if route_cap is not None or pool.max_offload_tokens is not None:
            verdict = self.account.verdict(plan)
        elif not also:
            return {}
        return offload_put(plan, route_cap, pool, verdict, body, ends=self.ends, also=also)

    async def close(self) -> None:
        """Stop what runs beside the requests."""
        await self.ends.close()

    def _limit(self, plan: Plan) -> int | None:
        if plan.pool.name not in self._capped:
            return None
        pool = self._offload.get(plan.pool.name, _NO_CAP)
        stable = stable_limit(plan, pool, self.ends)
        return stable if pool.max_offload_tokens is None else min(stable, pool.max_offload_tokens)


def lowest_cap(*offloads: OffloadConfig | None) -> int | None:
    """Return the lowest cap of a request's route and tenant; None if neither has one."""
    caps = [o.max_offload_tokens for o in offloads if o and o.max_offload_tokens is not None]
    return min(caps, default=None)


def _capped_pools(settings: Settings) -> frozenset[str]:
    """Return the pools of which some requests have a cap."""
    if any(lowest_cap(tenant.offload) is not None for tenant in settings.tenants):
        return frozenset(pool.name for pool in settings.pools)
    names = {pool.name for pool in settings.pools if lowest_cap(pool.offload) is not None}
    return frozenset(
        names | {route.pool for route in settings.routes if lowest_cap(route.offload) is not None}
    )
