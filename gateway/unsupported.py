"""Which configured features this version does not have yet: refused or named, never ignored.

A feature that protects somebody (tenants, TLS) is an error when it is asked for; one whose absence
only costs speed is a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.config import AdmissionConfig, RoutingConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.config import PoolConfig, Settings


def unsupported(settings: Settings) -> tuple[list[str], list[str]]:
    """Return (errors, warnings) about configured features that are not available."""
    errors = list(_server_errors(settings))
    warnings = list(_fleet_warnings(settings))
    for pool in settings.pools:
        errors += _pool_errors(pool)
        warnings += _pool_warnings(pool)
    if settings.telemetry.otlp_endpoint:
        warnings.append("telemetry.otlp_endpoint: traces are not exported by this version")
    if settings.telemetry.decision_log:
        warnings.append("telemetry.decision_log: decisions are not logged by this version")
    return errors, warnings


def _server_errors(settings: Settings) -> Iterator[str]:
    server = settings.server
    if settings.tenants:
        yield "tenants: API keys are not checked by this version; expected an empty list"
    if settings.routes:
        yield "routes: not available in this version; expected an empty list"
    if server.tls.cert or server.tls.key:
        yield "server.tls: not available in this version; put a TLS terminator in front"
    if server.access.trusted_peers:
        yield "server.access.trusted_peers: identity headers carry no tenant in this version"
    if settings.security.salt_secret_env is not None:
        yield "security.salt_secret_env: caches are not isolated by this version"
    if settings.routing.mode != "cost" or settings.routing.share != 100:
        yield "routing.mode, routing.share: only mode cost with share 100 in this version"


def _pool_errors(pool: PoolConfig) -> Iterator[str]:
    where = f"pools[{pool.name}]"
    if pool.discovery.type != "static":
        yield f"{where}.discovery.type: {pool.discovery.type} is not available; expected static"
    if pool.worker_allow:
        yield f"{where}.worker_allow: workers come from this file only; expected an empty list"
    if pool.fallback:
        yield f"{where}.fallback: not available in this version"
    if pool.keep_warm.enabled:
        yield f"{where}.keep_warm: not available in this version"


def _pool_warnings(pool: PoolConfig) -> Iterator[str]:
    where = f"pools[{pool.name}]"
    if pool.offload.max_offload_tokens is not None:
        yield f"{where}.offload: the cap is not sent to workers by this version"
    if pool.admission != AdmissionConfig():
        yield f"{where}.admission: requests do not wait in the gateway in this version"


def _fleet_warnings(settings: Settings) -> Iterator[str]:
    if settings.routing.max_wait_s != RoutingConfig().max_wait_s:
        yield "routing.max_wait_s: requests do not wait in the gateway in this version"
    if len({pool.retry for pool in settings.pools}) > 1:
        yield "pools[].retry: this version takes the strictest of all pools for each of them"
