"""What one value of the configuration demands of another, each problem with its place.

The shape of single values is that of the files beside this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.config import MatchConfig, PoolConfig, RouteConfig, Settings, TenantConfig

Problem = tuple[tuple[str | int, ...], str]

# Engines that take no cache salt: nothing is known of what is behind an OpenAI-compatible address.
UNSALTED_ENGINES = frozenset({"openai"})


def problems(settings: Settings) -> Iterator[Problem]:
    """Yield (location, what is wrong) of everything that does not go together."""
    yield from _ports(settings)
    yield from _sharing(settings)
    yield from _shared_names(settings)
    yield from _fallbacks(settings)
    yield from _routes(settings)
    names = [tenant.name for tenant in settings.tenants]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield ("tenants", i, "name"), f"{name!r} stands twice; tenant names must differ"
    yield from _tenant_models(settings)
    yield from _isolation(settings)


def names_of(pool: PoolConfig) -> set[str]:
    """Return all names clients may ask a pool for."""
    return {*pool.models, *pool.aliases}


def _ports(settings: Settings) -> Iterator[Problem]:
    server = settings.server
    if server.port and server.admin_port == server.port:
        yield (
            ("server", "admin_port"),
            f"{server.port} is server.port; expected another one, or null for both on one port",
        )


def _sharing(settings: Settings) -> Iterator[Problem]:
    index, processes = settings.index, settings.server.processes
    if index.backend == "redis" and index.url is None:
        yield (
            ("index", "backend"),
            "redis needs index.url, for example redis://127.0.0.1:6379/0",
        )
    if processes > 1 and index.backend != "redis":
        yield (
            ("server", "processes"),
            f"{processes} processes need a shared index: set index.backend to redis and index.url "
            "to its server (for example redis://127.0.0.1:6379/0), or processes to 1",
        )


def _tenant_models(settings: Settings) -> Iterator[Problem]:
    for i, tenant in enumerate(settings.tenants):
        repeated = {name for name in tenant.models if tenant.models.count(name) > 1}
        if repeated:
            yield ("tenants", i, "models"), f"{', '.join(sorted(repeated))}: stands twice"


def _isolation(settings: Settings) -> Iterator[Problem]:
    """A tenant whose cache is isolated needs a secret, and engines that keep salts apart."""
    for i, tenant in enumerate(settings.tenants):
        if not tenant.isolate_cache:
            continue
        at = ("tenants", i, "isolate_cache")
        if settings.security.salt_secret_env is None:
            yield (
                at,
                "needs security.salt_secret_env: the environment variable with the secret that "
                "salts are made from",
            )
        unsalted = [
            pool.name
            for pool in settings.pools
            if pool.engine in UNSALTED_ENGINES and may_reach(settings, tenant, pool)
        ]
        if unsalted:
            yield (
                at,
                f"{tenant.name!r} can reach {', '.join(unsalted)}, whose engine (openai) takes no "
                "cache salt: expected engine vllm, sglang or runner there, or tenants[].models "
                "that leaves it out",
            )


def may_reach(settings: Settings, tenant: TenantConfig, pool: PoolConfig) -> bool:
    """Whether requests of a tenant may get to a pool: by a model, or as another pool's fallback."""
    if not tenant.models or not names_of(pool).isdisjoint(tenant.models):
        return True
    # Names that no pool is configured with are adapters, which any pool may come to have.
    known = {name for other in settings.pools for name in names_of(other)}
    return not known.issuperset(tenant.models)


def _shared_names(settings: Settings) -> Iterator[Problem]:
    """Several pools may serve one name if it is said which requests each of them gets."""
    for i, pool in enumerate(settings.pools):
        for name in sorted(names_of(pool)):
            serving = [other for other in settings.pools if name in names_of(other)]
            weighted = [other for other in serving if other.weight is not None]
            if weighted and pool is weighted[0] and not any(other.weight for other in weighted):
                yield ("pools", i, "weight"), f"no pool that serves {name!r} has a weight above 0"
            is_default = pool in weighted if weighted else pool is serving[0]
            if not is_default and not _is_named(settings, pool, name):
                others = ", ".join(other.name for other in serving if other is not pool)
                yield (
                    ("pools", i, "models"),
                    f"{name!r} is also served by {others}: expected weights on both, or a route "
                    f"or a fallback that names {pool.name!r}",
                )


def _is_named(settings: Settings, pool: PoolConfig, name: str) -> bool:
    """Whether a route or another pool's fallback sends requests for ``name`` to a pool."""
    by_route = any(
        route.pool == pool.name and route.match.model in (None, name) for route in settings.routes
    )
    return by_route or any(
        other.fallback == pool.name and name in names_of(other) for other in settings.pools
    )


def _fallbacks(settings: Settings) -> Iterator[Problem]:
    by_name = {pool.name: pool for pool in settings.pools}
    for i, pool in enumerate(settings.pools):
        if pool.fallback is None:
            continue
        at = ("pools", i, "fallback")
        other = by_name.get(pool.fallback)
        if other is None:
            yield at, f"there is no pool {pool.fallback!r}, expected one of {', '.join(by_name)}"
            continue
        if missing := sorted(names_of(pool) - names_of(other)):
            yield at, f"pool {other.name!r} does not serve {', '.join(missing)}"
        seen = [pool.name]
        while other is not None and other.name not in seen:
            seen.append(other.name)
            other = by_name.get(other.fallback or "")
        if other is pool:
            yield at, f"fallbacks go in a circle: {' -> '.join([*seen, pool.name])}"


def _routes(settings: Settings) -> Iterator[Problem]:
    by_name = {pool.name: pool for pool in settings.pools}
    for i, route in enumerate(settings.routes):
        pool = by_name.get(route.pool)
        if pool is None:
            expected = ", ".join(by_name)
            yield (
                ("routes", i, "pool"),
                f"there is no pool {route.pool!r}, expected one of {expected}",
            )
            continue
        model = route.match.model
        if model is not None and model not in names_of(pool):
            serves = ", ".join(sorted(names_of(pool)))
            yield (
                ("routes", i, "match", "model"),
                f"pool {pool.name!r} does not serve {model!r}, it serves {serves}",
            )
            continue
        for k, earlier in enumerate(settings.routes[:i]):
            before = by_name.get(earlier.pool)
            if before is not None and _takes_all(earlier, before, route, pool):
                yield ("routes", i), f"is never reached: routes[{k}] takes all that it matches"
                break


def _takes_all(
    earlier: RouteConfig, earlier_pool: PoolConfig, later: RouteConfig, later_pool: PoolConfig
) -> bool:
    """Whether an earlier route leaves nothing for a later one."""
    models = {later.match.model} if later.match.model is not None else names_of(later_pool)
    return models <= names_of(earlier_pool) and _is_wider(earlier.match, later.match)


def _is_wider(wide: MatchConfig, narrow: MatchConfig) -> bool:
    """Whether all that one matches is matched by the other."""
    for name in ("tenant", "model"):
        said = getattr(wide, name)
        if said is not None and said != getattr(narrow, name):
            return False
    if not wide.header.items() <= narrow.header.items():
        return False
    for name in ("prompt_tokens", "known_reuse"):
        least, most = getattr(wide, f"{name}_min"), getattr(wide, f"{name}_max")
        if (least or 0) > (getattr(narrow, f"{name}_min") or 0):
            return False
        bound = getattr(narrow, f"{name}_max")
        if most is not None and (bound is None or bound > most):
            return False
    return True
