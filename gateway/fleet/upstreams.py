"""The connections to a pool's workers, as the configuration asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.settings import ConfigError
from gateway.tls import TlsError, worker_context
from gateway.upstream.client import Upstream

if TYPE_CHECKING:
    import ssl

    from gateway.config import LimitsConfig, PoolConfig


def make_upstream(config: PoolConfig, url: str, limits: LimitsConfig) -> Upstream:
    """Make the connections to one worker.

    Raises:
        ConfigError: If what its pool verifies workers with cannot be used.
    """
    return Upstream(
        url,
        ssl=_context(config, url),
        first_byte_s=limits.first_byte_s,
        total_s=limits.request_s,
    )


def _context(config: PoolConfig, url: str) -> ssl.SSLContext | None:
    """Return what a worker of a pool is verified with; None if it speaks plain HTTP."""
    if not url.lower().startswith("https:"):
        return None
    try:
        return worker_context(config.worker_ca)
    except TlsError as error:
        raise ConfigError(f"pools[{config.name}].worker_ca: {error}") from error
