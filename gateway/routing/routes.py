"""Which pool a request goes to: by its model, by configured routes, by weight, by what it holds.

The first route that matches counts. Routes that ask for a prompt's length or its known reuse can be
judged only once the prompt is read, in the pool where the request would go otherwise. Where no
route decides, the client may name the pool (``warmlane.pool`` in the body).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.routing.affinity import affinity_key
from gateway.routing.pool import Pool
from gateway.routing.rollout import fraction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.routing.plan import Inbound, Plan


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A configured route.

    Attributes:
        pool: Where it sends what it matches.
        tenant: The request's tenant; None = any.
        model: The name the client asked for; None = any that the pool serves.
        headers: Lower-case name and value of headers the request must have.
        prompt_tokens: Least and most prompt tokens.
        known_reuse: Least and most share of the prompt that a worker holds.
        is_by_class: Whether the prompt must be read to judge it.
        max_offload_tokens: Its cap on offloaded tokens; None = it sets none.
        offload_scope: Which stable boundary it sends; None = as the pool.
        name: Name in records and metrics: its place in the configuration.
    """

    pool: Pool
    tenant: str | None = None
    model: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    prompt_tokens: tuple[float, float] = (0, float("inf"))
    known_reuse: tuple[float, float] = (0, 1)
    is_by_class: bool = False
    max_offload_tokens: int | None = None
    offload_scope: str | None = None
    name: str = ""

    def may_take(self, inbound: Inbound) -> bool:
        """Whether a request matches, as far as that can be said without its prompt."""
        if self.tenant is not None and self.tenant != inbound.tenant:
            return False
        if self.model is not None and self.model != inbound.model:
            return False
        given = inbound.headers
        return all(given.get(name) == value for name, value in self.headers) and (
            self.pool.serves(inbound.model)
        )

    def takes_class(self, prompt_tokens: int, known_reuse: float) -> bool:
        """Whether a request's prompt matches."""
        least, most = self.prompt_tokens
        low, high = self.known_reuse
        return least <= prompt_tokens <= most and low <= known_reuse <= high


class Target(NamedTuple):
    """Where a request goes.

    Attributes:
        pool: The pool.
        route: The route that says so; None = none does.
        by_class: Routes before it that may still match once the prompt is read.
    """

    pool: Pool
    route: Route | None = None
    by_class: tuple[Route, ...] = ()


class Routes:
    """Finds a request's pool; one event loop only.

    Args:
        pools: All pools. Of those that serve one name, those with a weight share its traffic; if
            none has one, the first takes it.
        routes: In the order in which they are tried.
        seed: Which keys go to which of the pools with weights; equal in all gateways of a fleet.
    """

    def __init__(
        self, pools: Sequence[Pool], routes: Sequence[Route] = (), *, seed: int = 0
    ) -> None:
        self._pools = tuple(pools)
        self._routes = tuple(routes)
        self._seed = seed
        self._reserved = {route.pool for route in routes}
        names = dict.fromkeys(name for pool in pools for name in (*pool.models, *pool.aliases))
        self._by_name: dict[str, tuple[Pool, ...]] = {
            name: _sharing([pool for pool in pools if pool.serves(name)]) for name in names
        }
        # Without routes and weights, most requests need nothing but a look-up.
        self._plain: Mapping[str, Target] = {
            name: Target(sharing[0])
            for name, sharing in self._by_name.items()
            if len(sharing) == 1 and not self._routes
        }

    def default(self, name: str) -> Pool | None:
        """Return the pool that a name's requests go to when nothing else is said; None: nobody."""
        sharing = self._sharing(name)
        return sharing[0] if sharing else None

    def target(self, inbound: Inbound) -> Target | None:
        """Return where a request goes; None if nobody serves its model."""
        named = named_pool(inbound.body)
        plain = self._plain.get(inbound.model)
        if plain is not None and named is None:
            return plain
        sharing = self._sharing(inbound.model)
        if not sharing:
            return None
        by_class: list[Route] = []
        for route in self._routes:
            if route.may_take(inbound):
                if not route.is_by_class:
                    return Target(route.pool, route, tuple(by_class))
                by_class.append(route)
        for pool in () if named is None else self.open_to_clients(inbound.model):
            if pool.name == named:
                return Target(pool, None, tuple(by_class))
        return Target(self._drawn(inbound, sharing), None, tuple(by_class))

    def open_to_clients(self, name: str) -> tuple[Pool, ...]:
        """Return the pools that a client may ask for by name, of those that serve a model.

        All that share its traffic, and others unless routes lead there: what an operator keeps for
        one tenant is no other's choice.
        """
        sharing = self._sharing(name)
        return tuple(
            pool
            for pool in self._pools
            if pool in sharing or (pool.serves(name) and pool not in self._reserved)
        )

    def by_class(self, plan: Plan, target: Target) -> Target:
        """Return where a request goes now that its prompt is read in ``target``'s pool."""
        known_reuse: float | None = None
        for route in target.by_class:
            if known_reuse is None:
                known_reuse = _known_reuse(plan)
            if route.takes_class(plan.num_tokens, known_reuse):
                return Target(route.pool, route)
        return Target(target.pool, target.route)

    def _sharing(self, name: str) -> tuple[Pool, ...]:
        sharing = self._by_name.get(name)
        if sharing is None:  # adapters come and go with the workers
            sharing = _sharing([pool for pool in self._pools if name in pool.adapters])
        return sharing

    def _drawn(self, inbound: Inbound, sharing: tuple[Pool, ...]) -> Pool:
        """Draw one by weight, always the same for an affinity key."""
        if len(sharing) == 1:
            return sharing[0]
        key = affinity_key(
            inbound.body,
            inbound.headers,
            tenant=inbound.tenant,
            kinds=sharing[0].affinity_keys,
        )
        at = fraction(f"{self._seed}|pool|{key.ring_key}") * sum(p.weight or 0 for p in sharing)
        for pool in sharing:
            at -= pool.weight or 0
            if at < 0:
                return pool
        return sharing[-1]


def named_pool(body: Mapping[str, Any]) -> object:
    """Return the pool that a request's body asks for; None = it does not."""
    ours = body.get("warmlane")
    return ours.get("pool") if isinstance(ours, dict) else None


def _sharing(serving: Sequence[Pool]) -> tuple[Pool, ...]:
    """Return the pools that share a name's traffic, of all that serve it."""
    weighted = tuple(pool for pool in serving if pool.weight)
    return weighted or tuple(serving[:1])


def _known_reuse(plan: Plan) -> float:
    """Return the share of a prompt that a worker of its pool holds."""
    index = plan.pool.index
    if index is None or not plan.hashes or not plan.num_tokens:
        return 0.0
    most = max((hit.total for hit in index.match(plan.hashes).values()), default=0)
    return min(1.0, most / plan.num_tokens)
