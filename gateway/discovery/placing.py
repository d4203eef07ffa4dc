"""Which pool a found worker belongs to: by what the source says of it, or by what it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gateway.allowed import AllowedHosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.config import PoolConfig, WorkerConfig
    from gateway.discovery.listing import Found


class RefusedError(Exception):
    """A found worker gets no requests; the message says why."""


def needs_models(found: Found) -> bool:
    """Whether the worker must be asked what it serves before it can be placed."""
    return not found.model


def place(
    found: Found, own: PoolConfig, pools: Sequence[PoolConfig], told: Sequence[str]
) -> PoolConfig:
    """Return the pool of a worker.

    Args:
        found: The worker.
        own: The pool whose discovery found it.
        pools: All pools.
        told: Models that it says it serves; none = it does not say.

    Raises:
        RefusedError: If no pool takes it.
    """
    candidates = [own, *(pool for pool in pools if pool.name != own.name)]
    if found.pool:
        candidates = [pool for pool in pools if pool.name == found.pool]
        if not candidates:
            raise RefusedError(f"there is no pool {found.pool!r}, which it is labelled with")
    models = (found.model,) if found.model else tuple(told)
    chosen = candidates[0]
    if models:
        serving = [pool for pool in candidates if not set(models).isdisjoint(pool.models)]
        # Generic servers are lax about names: what they list may be the path of a file.
        if not serving and (found.model or chosen.engine != "openai"):
            shown = ", ".join(models[:5])
            raise RefusedError(f"serves {shown}; pool {chosen.name!r} has {_names(chosen)}")
        chosen = serving[0] if serving else chosen
    _check_hosts(chosen, found.worker)
    return chosen


def _check_hosts(pool: PoolConfig, worker: WorkerConfig) -> None:
    if not pool.worker_allow:
        return
    allowed = AllowedHosts(pool.worker_allow)
    try:
        allowed.check(worker.url)
        for addresses in (worker.kv_events, worker.kv_replay):
            for address in [addresses] if isinstance(addresses, str) else addresses or ():
                host = urlsplit(address).hostname
                if host is not None and host != "*":
                    allowed.check_host(host)
    except ValueError as error:
        raise RefusedError(f"worker_allow: {error}") from error


def _names(pool: PoolConfig) -> str:
    return ", ".join(pool.models)
