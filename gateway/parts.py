"""Parts of a gateway as its settings ask for them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from gateway.proxy.limits import Limits
from gateway.proxy.rewrite import Rewriter
from gateway.settings import ConfigError
from gateway.telemetry.decision_log import DecisionLog
from gateway.tls import ServerTls, TlsError
from prefix_index.replica.link import Link

if TYPE_CHECKING:
    import ssl

    from gateway.config import ServerConfig, Settings
    from prefix_index.canonical import FirstSeenMemory


def make_rewriters(settings: Settings, memory: FirstSeenMemory) -> dict[str, Rewriter]:
    """Make the canonicalisation of each pool that has one, by pool name.

    Args:
        settings: Validated configuration.
        memory: One for all pools: first-seen forms are kept per tenant, whatever pool the tenant's
            requests go to.
    """
    return {
        pool.name: Rewriter(
            pool.canonicalize.mode, pool.canonicalize.rules, memory, clock=time.monotonic
        )
        for pool in settings.pools
        if pool.canonicalize.mode != "off"
    }


def make_limits(settings: Settings) -> Limits:
    """Make the bounds on what clients send."""
    server, limits = settings.server, settings.server.limits
    return Limits(
        body_bytes=server.max_body_mb << 20,
        head_bytes=limits.head_kb << 10,
        headers=limits.headers,
        head_s=limits.head_s,
        decompressed_bytes=limits.decompressed_mb << 20,
        body_s=limits.body_s,
        idle_s=limits.idle_s,
        first_byte_s=limits.first_byte_s,
        request_s=limits.request_s,
    )


def admin_token(server: ServerConfig) -> str | None:
    """Read the admin token; None if none is configured.

    Raises:
        ConfigError: If it is configured and not there.
    """
    name = server.access.admin_token_env
    if name is None:
        return None
    token = os.environ.get(name)
    if not token:
        raise ConfigError(
            f"server.access.admin_token_env: the environment variable {name} is not set"
        )
    return token


def make_tls(server: ServerConfig) -> ServerTls | None:
    """Load the client port's certificate; None if it speaks plain HTTP.

    Raises:
        ConfigError: If it cannot be used.
    """
    cert, key = server.tls.cert, server.tls.key
    if cert is None or key is None:
        return None
    try:
        return ServerTls(cert, key)
    except TlsError as error:
        raise ConfigError(f"server.tls: {error}") from error


def admin_context(server: ServerConfig, tls: ServerTls | None) -> ssl.SSLContext | None:
    """Return the context of the admin port; None if it speaks plain HTTP."""
    return tls.context if tls is not None and server.admin_tls else None


def make_link(settings: Settings) -> Link | None:
    """Make the one connection to Redis of this process, if there is to be one."""
    index = settings.index
    if index.backend != "redis":
        return None
    if index.url is None:
        raise ConfigError("index.url: expected the server's address, as index.backend is redis")
    return Link(
        index.url, namespace=index.namespace, timeout_s=index.timeout_ms / 1000, tls=index.tls
    )


def make_decision_log(settings: Settings) -> DecisionLog | None:
    """Open the decision log, if there is to be one.

    Raises:
        ConfigError: If it cannot be written.
    """
    path = settings.telemetry.decision_log
    if path is None:
        return None
    try:
        return DecisionLog(path)
    except OSError as error:
        raise ConfigError(f"telemetry.decision_log: {path}: {error.strerror}") from error
