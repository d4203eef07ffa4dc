"""Who reuses what, and whether a lower tier pays for it: fed by every finished attempt, bounded.

Three views of the same requests: pools, tenants, and documents, which are whatever the affinity key
names (a document, a session, a prefix). Raw keys stay in memory; what is shown is their hash.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gateway.routing.cost import prefill_s
from gateway.routing.outcome import OK
from gateway.telemetry.decision_log import hashed_key
from gateway.worth.advice import separate_pools
from gateway.worth.group import WINDOW_S, Group, Use
from gateway.worth.hottest import Hottest
from gateway.worth.rows import OTHER, row_of
from gateway.worth.rule import MANAGEMENT_S, Verdict
from gateway.worth.seen import SeenPrefixes
from gateway.worth.tier import Tier, eviction_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway.routing.cost import Candidate, CostModel
    from gateway.routing.plan import Plan
    from gateway.routing.ticket import Ticket
    from gateway.worth.rule import Worth

# Documents with their own sums, 1 KB each; the least recently used ones become "other".
MAX_DOCUMENTS = 2048
# Tenants of all pools likewise; each is a few series of metrics.
MAX_TENANTS = 256
# Documents that are listed; the rest is summed up.
MAX_LISTED = 50
# A prefix with fewer reuses in the fading hour is not worth room: it was used once, an hour ago.
MIN_REUSES = 0.5


class WorthAccount:
    """Adds up what finished requests reused; event loop only.

    Args:
        clock: Monotonic seconds, the dispatcher's.
        offload_limit: Most leading tokens of a request that its tier may be given, were it worth
            it; None for no limit.
        write_per_read: How much longer a worker takes to write a token to the tier than to read
            it.
        secret: For ``hashed_key``.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        offload_limit: Callable[[Plan], int | None] = lambda _plan: None,
        write_per_read: Callable[[str], float] = lambda _worker: 1.0,
        secret: bytes = b"",
    ) -> None:
        self._clock = clock
        self._offload_limit = offload_limit
        self._write_per_read = write_per_read
        self._secret = secret
        self._seen = SeenPrefixes()
        self._pools: dict[str, Group] = {}
        self._tenants = Hottest(MAX_TENANTS)
        self._documents = Hottest(MAX_DOCUMENTS)
        self._tiers: dict[str, Tier] = {}

    def observe(self, plan: Plan, ticket: Ticket) -> int:
        """Take note of a finished attempt; quick, and never raises.

        Returns:
            Leading tokens of its prompt that had been computed before, in whole grains.
        """
        if ticket.outcome is not OK or plan.prompt is None:
            return 0
        now_s = self._clock()
        prompt = plan.prompt
        shared = self._seen.add(prompt.block_hashes, prompt.block_size)
        decision = ticket.decision
        candidate = decision.input.candidates[decision.position]
        if candidate.model is None:
            return shared  # nothing can be priced yet
        tier = self._tiers.get(plan.pool.name)
        if tier is None:
            tier = self._tiers[plan.pool.name] = Tier()
        tier.observe(candidate, candidate.model)
        use = self._use(plan, ticket, candidate, candidate.model, shared, now_s)
        document = self._add(plan, use, now_s)
        if shared:
            document.shared_end = prompt.block_hashes[shared // prompt.block_size - 1]
            document.shared_end_tokens = shared
        return shared

    def verdict(self, plan: Plan) -> Verdict:
        """Say whether a lower tier is worth it for a request: its document's, tenant's or pool's.

        The narrowest group that is known decides. For the request path: at most three look-ups.
        """
        pool, tenant = plan.pool.name, plan.inbound.tenant
        now_s = self._clock()
        tier = self._tiers.get(pool)
        if tier is None:
            return Verdict.UNKNOWN
        for group in (
            self._documents.get(pool, plan.key.ring_key),
            self._tenants.get(pool, tenant),
            self._pools.get(pool),
        ):
            if (
                group is not None
                and (found := group.verdict(now_s, tier.rate)) is not Verdict.UNKNOWN
            ):
                return found
        return Verdict.UNKNOWN

    def document(self, pool: str, ring_key: str) -> Group | None:
        """Return the sums of one document, as its affinity key names it."""
        return self._documents.get(pool, ring_key)

    def hot(self) -> list[tuple[str, str, Group]]:
        """Return pool, ring key and sums of all documents, those first that reuse saves most."""
        return sorted(self.documents(), key=lambda row: -row[2].recompute_s)

    def documents(self) -> Iterator[tuple[str, str, Group]]:
        """Yield pool, ring key and sums of now of all documents; they may change meanwhile."""
        now_s = self._clock()
        for pool, ring_key, group in list(self._documents.items()):
            group.fade(now_s)
            yield pool, ring_key, group

    def forget(self, is_meant: Callable[[str, str, str], bool]) -> int:
        """Forget groups of documents and tenants.

        Args:
            is_meant: Says it of a pool, a tenant and a ring key; the key is empty for the sums of
                a tenant.

        Returns:
            How many were forgotten.
        """
        return self._documents.forget(
            lambda pool, key, group: is_meant(pool, group.tenant, key)
        ) + self._tenants.forget(lambda pool, tenant, _: is_meant(pool, tenant, ""))

    def report(self) -> dict[str, Any]:
        """Return ``GET /admin/v1/worth``, as plain JSON values."""
        tenants = list(self.tenant_rows())
        return {
            "window_s": WINDOW_S,
            "management_s": MANAGEMENT_S,
            "pools": self.pool_rows(),
            "tenants": tenants,
            "documents": list(self._listed(self._clock())),
            "advice": separate_pools(tenants),
        }

    def pool_rows(self) -> list[dict[str, Any]]:
        """Return the pools' rows of the report."""
        now_s = self._clock()
        return [
            {"pool": pool, "reusable_tokens": self._reusable_tokens(pool)}
            | self._row(pool, group, now_s)
            for pool, group in self._pools.items()
        ]

    def tenant_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the tenants' rows of the report; tenants may come and go meanwhile."""
        now_s = self._clock()
        for pool, tenant, group in list(self._named_tenants()):
            yield {"pool": pool, "tenant": tenant} | self._row(pool, group, now_s)

    def tenants(self) -> Iterator[tuple[str, str, Group, Worth]]:
        """Yield pool, tenant, sums and what they say; the tenant is empty for a whole pool."""
        now_s = self._clock()
        whole = ((pool, "", group) for pool, group in self._pools.items())
        # Groups may come and go while they are looked at.
        for pool, tenant, group in (*whole, *self._named_tenants()):
            yield pool, tenant, group, group.worth(now_s, self._tiers[pool].rate)

    def _reusable_tokens(self, pool: str) -> int:
        """Return the tokens of all prefixes that were asked for again, to be kept somewhere.

        Text that several documents begin with counts for each of them: the sum is rather too high.
        """
        return sum(
            group.shared_end_tokens
            for name, _, group in self._documents.items()
            if name == pool and group.reuses >= MIN_REUSES
        )

    def _named_tenants(self) -> Iterator[tuple[str, str, Group]]:
        yield from self._tenants.items()
        for pool, group in self._tenants.rest.items():
            name = OTHER
            while self._tenants.get(pool, name) is not None:
                name += "_"  # somebody is called so, and two series must not have one name
            yield pool, name, group

    def _row(self, pool: str, group: Group, now_s: float) -> dict[str, Any]:
        return row_of(
            group.terms(now_s, self._tiers[pool].rate),
            prompt_tokens=group.prompt_tokens,
            shared_tokens=group.shared_tokens,
            lost_tokens=group.lost_tokens,
            store_tokens=group.store_tokens,
        )

    def _use(
        self,
        plan: Plan,
        ticket: Ticket,
        c: Candidate,
        model: CostModel,
        shared: int,
        now_s: float,
    ) -> Use:
        lost_tokens = 0
        # Of a worker whose cache cannot be seen nothing is known to be lost.
        if shared and plan.pool.is_readable(ticket.worker):
            observed = ticket.observed_hit_tokens
            held = ticket.predicted_hit_tokens if observed is None else observed
            for other in ticket.decision.input.candidates:
                held = max(held, other.hit_tokens)
            lost_tokens = max(0, shared - held)
        limit = self._offload_limit(plan)
        offered = plan.num_tokens if limit is None else min(limit, plan.num_tokens)
        new_tokens = max(0, offered - shared)
        return Use(
            prompt_tokens=plan.num_tokens,
            shared_tokens=shared,
            lost_tokens=lost_tokens,
            recompute_s=prefill_s(model, shared, shared) if shared else 0.0,
            store_tokens=new_tokens,
            write_tokens=new_tokens * self._write_per_read(ticket.worker.id),
            eviction_s=eviction_s(plan, ticket, c, model, new_tokens, now_s),
            prefill_token_s=model.token_s,
        )

    def _add(self, plan: Plan, use: Use, now_s: float) -> Group:
        """Add a request to the sums of its pool, tenant and document; return the document's."""
        pool, tenant, key = plan.pool.name, plan.inbound.tenant, plan.key
        whole = self._pools.get(pool)
        if whole is None:
            whole = self._pools[pool] = Group(now_s)
        whole.add(use, now_s)
        if tenant:
            self._tenants.use(pool, tenant, now_s, tenant=tenant).add(use, now_s)
        document = self._documents.use(pool, key.ring_key, now_s, tenant=tenant, kind=key.kind)
        document.add(use, now_s)
        return document

    def _listed(self, now_s: float) -> Iterator[dict[str, Any]]:
        """Yield the documents that reuse most, then per pool the sum of all others."""
        for _, _, group in self._documents.items():
            group.fade(now_s)
        ranked = sorted(self._documents.items(), key=lambda found: -found[2].recompute_s)
        others: dict[str, Group] = {}
        for number, (pool, ring_key, group) in enumerate(ranked):
            if number < MAX_LISTED:
                named = {"document": hashed_key(ring_key, self._secret), "kind": group.kind}
                who = {"pool": pool, "tenant": group.tenant} | named
                yield who | self._row(pool, group, now_s)
            else:
                others.setdefault(pool, Group(now_s)).absorb(group, now_s)
        for pool, group in self._documents.rest.items():
            others.setdefault(pool, Group(now_s)).absorb(group, now_s)
        for pool, group in others.items():
            named = {"document": OTHER, "kind": OTHER}
            yield {"pool": pool, "tenant": ""} | named | self._row(pool, group, now_s)
