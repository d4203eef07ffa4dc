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
    from gateway.routing.segments import Scope
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
        self.reconfigure(settings)
        self.ends = StableEnds(clock=clock)
        self.account = WorthAccount(
            clock=clock,
            offload_limit=self._limit,
            write_per_read=write_per_read,
            secret=secret,
        )

    def reconfigure(self, settings: Settings) -> None:
        """Have these caps from now on."""
        self._offload = {pool.name: pool.offload for pool in settings.pools}
        self._capped = _capped_pools(settings)
        self._tenant_caps = {
            tenant.name: tenant.offload.max_offload_tokens
            for tenant in settings.tenants
            if tenant.offload is not None
        }

    def observe(self, plan: Plan, ticket: Ticket) -> int:
        """Take note of a finished attempt; for ``on_finish``. About 20 us; never raises.

        Returns:
            Leading tokens of its prompt that had been computed before.
        """
        shared_tokens = self.account.observe(plan, ticket)
        if shared_tokens and plan.pool.name in self._capped:
            self.ends.observe(plan, shared_tokens)
        return shared_tokens

    def offload_put(
        self, plan: Plan, body: bytes, *, also: Mapping[str, bytes] | None = None
    ) -> dict[str, bytes]:
        """Return what to splice into a body; see ``offload.offload_put``. About 10 us.

        Args:
            plan: The request, with the pool and the route by which it goes.
            body: The bytes that are forwarded.
            also: Other members of ``kv_transfer_params``.
        """
        pool = self._offload.get(plan.pool.name, _NO_CAP)
        route_cap = self._route_cap(plan)
        verdict = Verdict.UNKNOWN
        if route_cap is not None or pool.max_offload_tokens is not None:
            verdict = self.account.verdict(plan)
        elif not also:
            return {}
        return offload_put(
            plan,
            route_cap,
            pool,
            verdict,
            body,
            scope=self._scope(plan),
            ends=self.ends,
            also=also,
        )

    async def close(self) -> None:
        """Stop what runs beside the requests."""
        await self.ends.close()

    def _route_cap(self, plan: Plan) -> int | None:
        """Return the lower cap of a request's route and tenant."""
        tenant_cap = self._tenant_caps.get(plan.inbound.tenant)
        route_cap = None if plan.route is None else plan.route.max_offload_tokens
        if tenant_cap is None or route_cap is None:
            return tenant_cap if route_cap is None else route_cap
        return min(tenant_cap, route_cap)

    def _scope(self, plan: Plan) -> Scope:
        route = plan.route
        if route is None or route.offload_scope is None:
            return self._offload.get(plan.pool.name, _NO_CAP).scope
        return "history" if route.offload_scope == "history" else "knowledge"

    def _limit(self, plan: Plan) -> int | None:
        """Return what a request's tier could be given, were it worth it."""
        if plan.pool.name not in self._capped:
            return None
        pool = self._offload.get(plan.pool.name, _NO_CAP)
        caps = [c for c in (self._route_cap(plan), pool.max_offload_tokens) if c is not None]
        return min(*caps, stable_limit(plan, self._scope(plan), self.ends)) if caps else None


def _capped_pools(settings: Settings) -> frozenset[str]:
    """Return the pools of which some requests have a cap."""
    if any(tenant.offload and _caps(tenant.offload) for tenant in settings.tenants):
        return frozenset(pool.name for pool in settings.pools)
    names = {pool.name for pool in settings.pools if _caps(pool.offload)}
    return frozenset(
        names | {route.pool for route in settings.routes if route.offload and _caps(route.offload)}
    )


def _caps(offload: OffloadConfig) -> bool:
    return offload.max_offload_tokens is not None
