"""The dispatcher as a configuration asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.routing.dispatch import Dispatcher
from gateway.routing.gate import Standing
from gateway.routing.pool import Retry
from gateway.routing.rollout import RollOut
from gateway.routing.routes import Route, Routes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.config import RouteConfig, Settings
    from gateway.routing.plan import Plan
    from gateway.routing.pool import Pool
    from gateway.routing.ticket import Ticket


def make_dispatcher(
    settings: Settings,
    pools: Sequence[Pool],
    *,
    on_finish: Callable[[Plan, Ticket], None] | None = None,
) -> Dispatcher:
    """Make the dispatcher of a configuration.

    Args:
        settings: Validated configuration.
        pools: Its pools, one for each of ``settings.pools``; they are told what is configured about
            their traffic.
        on_finish: Told of every attempt once it is over.
    """
    routing = settings.routing
    return Dispatcher(
        pools,
        seed=routing.seed,
        on_finish=on_finish,
        routes=_routes(settings, pools),
        rollout=RollOut(routing.mode, routing.share, seed=routing.seed or 0),
        max_wait_s=routing.max_wait_s,
        standings=_standings(settings),
    )


def reconfigure(dispatcher: Dispatcher, settings: Settings) -> None:
    """Have a dispatcher route as another configuration says, from the next request on.

    Args:
        dispatcher: From ``make_dispatcher``.
        settings: Validated configuration with the same pools.
    """
    pools = list(dispatcher.pools.values())
    for config in settings.pools:
        pool = dispatcher.pools[config.name]
        pool.models = config.models
        pool.aliases = dict(config.aliases)
        pool.affinity_keys = config.affinity.keys
        pool.set_size = config.affinity.set_size
        pool.is_strict = config.affinity.mode == "strict"
    dispatcher.routes = _routes(settings, pools)
    dispatcher.rollout.mode = settings.routing.mode
    dispatcher.rollout.share = settings.routing.share
    dispatcher.gate.max_wait_s = settings.routing.max_wait_s
    standings = dispatcher.gate.standings
    standings.clear()
    standings.update(_standings(settings))


def _standings(settings: Settings) -> dict[str, Standing]:
    return {tenant.name: Standing(tenant.weight, tenant.priority) for tenant in settings.tenants}


def _routes(settings: Settings, pools: Sequence[Pool]) -> Routes:
    """Give the pools weight, fallback, queue, retries and peer pull; return the routes."""
    by_name = {pool.name: pool for pool in pools}
    for config in settings.pools:
        pool = by_name[config.name]
        pool.weight = config.weight
        pool.fallback = None if config.fallback is None else by_name[config.fallback]
        pool.max_queue = config.admission.max_queue
        pool.deadline_s = config.admission.deadline_s
        pool.retry = Retry(config.retry.budget, config.retry.attempts)
        pool.peer_pull = config.peer_pull
    routes = [
        _route(config, by_name[config.pool], f"routes[{i}]")
        for i, config in enumerate(settings.routes)
    ]
    return Routes(pools, routes, seed=settings.routing.seed or 0)


def _route(config: RouteConfig, pool: Pool, name: str) -> Route:
    match, offload = config.match, config.offload
    tokens = (match.prompt_tokens_min, match.prompt_tokens_max)
    reuse = (match.known_reuse_min, match.known_reuse_max)
    return Route(
        pool,
        match.tenant,
        match.model,
        tuple(match.header.items()),
        (tokens[0] or 0, float("inf") if tokens[1] is None else tokens[1]),
        (reuse[0] or 0, 1 if reuse[1] is None else reuse[1]),
        any(bound is not None for bound in (*tokens, *reuse)),
        None if offload is None else offload.max_offload_tokens,
        # Left out, it is the pool's, not the default of a pool.
        offload.scope if offload is not None and "scope" in offload.model_fields_set else None,
        name,
    )
