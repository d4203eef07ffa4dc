"""The connections to a pool's workers, as the configuration asks for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gateway.allowed import AllowedHosts
from gateway.settings import ConfigError
from gateway.tls import TlsError, worker_context
from gateway.upstream.client import Upstream

if TYPE_CHECKING:
    import ssl

    from gateway.config import LimitsConfig, PoolConfig, WorkerConfig


def make_upstream(
    config: PoolConfig, item: WorkerConfig, limits: LimitsConfig, *, by: str = ""
) -> Upstream:
    """Make the connections to one worker.

    Args:
        config: Of its pool.
        item: The worker.
        limits: Deadlines.
        by: Who added it; empty = the configuration or its discovery.

    Raises:
        ConfigError: If what its pool verifies workers with, or its workers' key, cannot be used.
    """
    # Who writes the configuration may name any address in it.
    is_judged = item not in config.workers and (by or config.worker_allow)
    return Upstream(
        item.url,
        ssl=_context(config, item.url),
        first_byte_s=limits.first_byte_s,
        total_s=limits.request_s,
        authorization=_authorization(config),
        allowed=AllowedHosts(config.worker_allow) if is_judged else None,
    )


def _authorization(config: PoolConfig) -> bytes:
    """Return the header line by which a pool's workers know the gateway; empty if they do not ask.

    Raises:
        ConfigError: If the variable that should hold the key does not.
    """
    name = config.api_key_env
    if name is None:
        return b""
    key = os.environ.get(name, "").strip()
    # The key itself is never shown.
    if not key or not key.isascii() or not key.isprintable():
        found = "holds no key" if name in os.environ else "is not set"
        raise ConfigError(
            f"pools[{config.name}].api_key_env: the environment variable {name} {found}; "
            "expected a key of printable ASCII"
        )
    return f"authorization: Bearer {key}\r\n".encode()


def _context(config: PoolConfig, url: str) -> ssl.SSLContext | None:
    """Return what a worker of a pool is verified with; None if it speaks plain HTTP."""
    if not url.lower().startswith("https:"):
        return None
    try:
        return worker_context(config.worker_ca)
    except TlsError as error:
        raise ConfigError(f"pools[{config.name}].worker_ca: {error}") from error
