"""Which configured features this version does not have yet: refused or named, never ignored.

A feature that protects somebody (API keys, budgets, TLS) is an error when it is asked for; one
whose absence only costs speed is a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.config import PoolConfig, Settings, TenantConfig


def unsupported(settings: Settings) -> tuple[list[str], list[str]]:
    """Return (errors, warnings) about configured features that are not available."""
    errors = list(_server_errors(settings))
    warnings = []
    for tenant in settings.tenants:
        errors += _tenant_errors(tenant)
    if settings.tenants and not settings.server.access.trusted_peers:
        warnings.append(
            "tenants: nobody can be one of them; tenants are named by x-tenant-id from "
            "server.access.trusted_peers in this version"
        )
    for pool in settings.pools:
        errors += _pool_errors(pool)
        if pool.keep_warm.enabled and not pool.keep_warm.store:
            warnings.append(
                f"pools[{pool.name}].keep_warm: nothing can be warmed again without store: true"
            )
    if settings.telemetry.otlp_endpoint:
        warnings.append("telemetry.otlp_endpoint: traces are not exported by this version")
    return errors, warnings


def _server_errors(settings: Settings) -> Iterator[str]:
    if settings.security.salt_secret_env is not None:
        yield "security.salt_secret_env: caches are not isolated by this version"


def _tenant_errors(tenant: TenantConfig) -> Iterator[str]:
    where = f"tenants[{tenant.name}]"
    if tenant.key_env is not None or tenant.keys_file is not None:
        yield f"{where}: API keys are not checked by this version; expected no key_env, keys_file"
    if tenant.requests_per_min is not None or tenant.tokens_per_min is not None:
        yield f"{where}: budgets are not kept by this version; expected no *_per_min"
    if tenant.isolate_cache:
        yield f"{where}.isolate_cache: caches are not isolated by this version"


def _pool_errors(pool: PoolConfig) -> Iterator[str]:
    where = f"pools[{pool.name}]"
    if pool.discovery.type != "static":
        yield f"{where}.discovery.type: {pool.discovery.type} is not available; expected static"
    if pool.worker_allow:
        yield f"{where}.worker_allow: workers come from this file only; expected an empty list"
