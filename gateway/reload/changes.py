"""What of another configuration can be had without a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from gateway.config.cross_checks import problems
from gateway.settings import ConfigError

if TYPE_CHECKING:
    from gateway.config import PoolConfig, Settings
    from gateway.config.section import Section

S = TypeVar("S", bound="Section")

# Sockets are bound, processes run, and each connection's server is chosen, at the start.
FIXED_SERVER = (
    *("host", "port", "admin_port", "admin_tls", "processes", "drain_s", "front", "tls"),
    "pass_through",
)
FIXED_ACCESS = ("admin_token_env",)
# Equal in all gateways of a fleet: another one would move every key's home.
FIXED_ROUTING = ("seed",)
# Of these, prompts are read and blocks are named; what is held would not be found again.
FIXED_POOL = (
    *("engine", "tokenizer", "template", "timezone", "block_size", "canonicalize"),
    *("max_batched_tokens", "capacity_tokens", "keep_warm", "worker_ca", "api_key_env"),
)


def merged(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """Return the configuration that holds after a reload, and the keys that need a restart.

    Args:
        old: What holds now.
        new: What was read, and is valid.

    Returns:
        ``new`` with what cannot change as in ``old``, and the keys of which the new value waits for
        a restart.

    Raises:
        ConfigError: If that is no valid configuration: something new needs what cannot change.
    """
    kept: list[str] = []
    access = _with(old.server.access, new.server.access, FIXED_ACCESS, "server.access", kept)
    server = _with(old.server, new.server, FIXED_SERVER, "server", kept)
    settings = new.model_copy(
        update={
            "server": server.model_copy(update={"access": access}),
            "routing": _with(old.routing, new.routing, FIXED_ROUTING, "routing", kept),
            "pools": _pools(old, new, kept),
        }
    )
    for name in ("index", "telemetry"):
        settings = _with(old, settings, (name,), "", kept)
    found = [".".join(map(str, at)) + f": {text}" for at, text in problems(settings)]
    if found:
        waiting = f"; what needs a restart: {', '.join(kept)}" if kept else ""
        raise ConfigError("\n".join(found) + waiting)
    return settings, kept


def _pools(old: Settings, new: Settings, kept: list[str]) -> tuple[PoolConfig, ...]:
    """Return the old pools, in their order, each with what changed of it."""
    coming = {pool.name: pool for pool in new.pools}
    kept += [f"pools[{name}]" for name in coming if name not in {p.name for p in old.pools}]
    pools = []
    for before in old.pools:
        after = coming.get(before.name)
        if after is None:
            kept.append(f"pools[{before.name}]")
            pools.append(before)
            continue
        where = f"pools[{before.name}]"
        pool = _with(before, after, FIXED_POOL, where, kept)
        if after.models[0] != before.models[0]:
            # The first one names the blocks.
            pool = _with(before, pool, ("models", "aliases"), where, kept)
        pools.append(pool)
    both = [pool.name for pool in old.pools if pool.name in coming]
    if both != [name for name in coming if name in both]:
        kept.append("pools (their order)")
    return tuple(pools)


def _with(old: S, new: S, names: tuple[str, ...], where: str, kept: list[str]) -> S:
    """Return ``new`` with the named values of ``old``; add those that differ to ``kept``."""
    differing = [name for name in names if getattr(old, name) != getattr(new, name)]
    kept += [f"{where}.{name}".lstrip(".") for name in differing]
    return new.model_copy(update={name: getattr(old, name) for name in differing})
