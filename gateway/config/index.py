"""Where the prefix index lives."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from gateway.config.section import PositiveInt, Section

_SENTINEL_URL = re.compile(
    r"redis\+sentinel://(?:[^@/\s]*@)?[^@/,:\s]+:\d{1,5}(?:,[^@/,:\s]+:\d{1,5})*/[^/\s]+(?:/\d+)?"
)


class IndexConfig(Section):
    """Where the prefix index lives and how much of it is kept."""

    backend: Literal["memory", "redis"] = "memory"
    """memory = each process its own; redis = shared by all gateways."""
    url: str | None = None
    """The server of backend redis: redis://, rediss://, unix:// or redis+sentinel://."""
    timeout_ms: PositiveInt = 50
    """Longest wait for one answer of the server."""
    max_blocks: PositiveInt = 5_000_000
    """Most blocks in one pool's view, all workers together."""
    namespace: str = "warmlane"
    """Prefix of all keys: one for each fleet that shares a server."""
    tls: bool = False
    """TLS to the server, as rediss:// does."""

    @field_validator("url")
    @classmethod
    def _redis_url(cls, value: str | None) -> str | None:
        return None if value is None else check_redis_url(value)


def check_redis_url(value: str) -> str:
    """Return ``value`` if it names a Redis server as the index takes it.

    Raises:
        ValueError: If it does not; the message says what was expected.
    """
    expected = (
        "expected redis://HOST[:PORT][/DB], rediss://..., unix://PATH or "
        "redis+sentinel://HOST:PORT[,HOST:PORT]/SERVICE[/DB]"
    )
    try:
        parts = urlsplit(value)
        if parts.scheme in ("redis", "rediss"):
            # Reading the port checks it.
            valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        elif parts.scheme == "unix":
            valid = parts.path.startswith("/") and len(parts.path) > 1
        else:
            valid = bool(_SENTINEL_URL.fullmatch(value))
    except ValueError:
        valid = False
    if not valid:
        # The URL itself may carry a password.
        raise ValueError(expected)
    return value
