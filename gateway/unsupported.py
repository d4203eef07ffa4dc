"""Which configured features this version does not have yet: refused or named, never ignored.

A feature that protects somebody, or without which nothing would be served, is an error when it is
asked for; one whose absence only costs speed is a warning.

And which files and variables that a configuration names are not on this machine.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.config import PoolConfig, Settings


def unsupported(settings: Settings) -> tuple[list[str], list[str]]:
    """Return (errors, warnings) about configured features that are not available."""
    errors: list[str] = []
    peers = settings.server.access.trusted_peers
    warnings = [
        f"tenants[{tenant.name}]: nobody can be this tenant; expected key_env, keys_file or "
        "server.access.trusted_peers"
        for tenant in settings.tenants
        if not (tenant.key_env or tenant.keys_file or peers)
    ]
    for pool in settings.pools:
        errors += _pool_errors(pool)
        if pool.keep_warm.enabled and not pool.keep_warm.store:
            warnings.append(
                f"pools[{pool.name}].keep_warm: nothing can be warmed again without store: true"
            )
    return errors, warnings


def files_not_here(settings: Settings) -> list[str]:
    """Return a warning for each file without which the gateway would not start on this machine.

    No errors: a configuration may be checked elsewhere than it is used.
    """
    named: dict[str, str | None] = {
        "server.tls.cert": settings.server.tls.cert,
        "server.tls.key": settings.server.tls.key,
    }
    for pool in settings.pools:
        at = f"pools[{pool.name}]"
        folder = pool.tokenizer
        named[f"{at}.tokenizer"] = None if folder is None else str(Path(folder, "tokenizer.json"))
        named[f"{at}.template"] = pool.template
        if any(worker.url.startswith("https:") for worker in pool.workers):
            named[f"{at}.worker_ca"] = pool.worker_ca
    for tenant in settings.tenants:
        named[f"tenants[{tenant.name}].keys_file"] = tenant.keys_file
    return [
        f"{key}: no file {path} on this machine, without which the gateway does not start"
        for key, path in named.items()
        if path is not None and not Path(path).is_file()
    ]


def variables_not_here(settings: Settings) -> list[str]:
    """Return a warning for each variable without which the gateway would not start here."""
    named = {"server.access.admin_token_env": settings.server.access.admin_token_env}
    if any(tenant.isolate_cache for tenant in settings.tenants):
        named["security.salt_secret_env"] = settings.security.salt_secret_env
    named |= {f"pools[{pool.name}].api_key_env": pool.api_key_env for pool in settings.pools}
    named |= {f"tenants[{tenant.name}].key_env": tenant.key_env for tenant in settings.tenants}
    return [
        f"{key}: no variable {name} here, without which the gateway does not start"
        for key, name in named.items()
        if name is not None and not os.environ.get(name)
    ]


def _pool_errors(pool: PoolConfig) -> Iterator[str]:
    if pool.discovery.type == "dns" and pool.discovery.srv and find_spec("aiodns") is None:
        yield (
            f"pools[{pool.name}].discovery.srv: SRV records need aiodns: expected an installation "
            "of warmlane[dns]"
        )
