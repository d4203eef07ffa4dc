"""Redis URL -> client. One server, by TCP, TLS or unix socket, or a service that Sentinels know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

if TYPE_CHECKING:
    from typing import TypeAlias

Client: TypeAlias = "aioredis.Redis"

SCHEMES: Final = ("redis", "rediss", "unix", "redis+sentinel")
_EXPECTED: Final = (
    "expected redis://, rediss:// or unix:// as redis-py takes them, or "
    "redis+sentinel://[[user]:password@]host:port[,host:port]/service[/db][?sentinel_password=...]"
)
_SENTINEL_PORT: Final = 26379


def make_client(url: str, *, timeout_s: float, tls: bool = False) -> Client:
    """Return a client that connects when first used and never repeats a command by itself.

    Args:
        url: Address, see ``SCHEMES``.
        timeout_s: How long connecting and each answer may take.
        tls: Encrypt although the URL's scheme does not say so.

    Raises:
        ValueError: If the URL cannot be understood; its password is not repeated.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # A failed command is repeated by whoever knows what it meant.
        "retry": Retry(NoBackoff(), 0),
        # Flat lists, the same from every server version.
        "protocol": 2,
    }
    try:
        parts = urlsplit(url)
        if parts.scheme == "redis+sentinel":
            return _from_sentinels(parts, options, tls=tls)
        if parts.scheme not in SCHEMES:
            raise ValueError(f"scheme {parts.scheme!r}")
        if tls and parts.scheme == "redis":
            url = "rediss" + url.removeprefix("redis")
        client: Client = aioredis.Redis.from_url(url, **options)
    except ValueError as error:
        raise ValueError(f"index.url: {error}; {_EXPECTED}") from None
    return client


async def close_client(client: Client) -> None:
    """Close a client with all its connections, those to Sentinels too."""
    sentinel = getattr(client.connection_pool, "sentinel_manager", None)
    for part in (client, *(sentinel.sentinels if sentinel is not None else ())):
        await part.aclose()
        await part.connection_pool.disconnect()


def _from_sentinels(parts: SplitResult, options: dict[str, Any], *, tls: bool) -> Client:
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    service, _, database = parts.path.strip("/").partition("/")
    if not service or not hosts:
        raise ValueError("no service name or no sentinel")
    sentinel_password = parse_qs(parts.query).get("sentinel_password", [None])[0]
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [_host_port(item) for item in hosts.split(",")],
        sentinel_kwargs={**options, "password": sentinel_password, "ssl": tls},
    )
    client: Client = sentinel.master_for(
        service,
        db=int(database or 0),
        username=unquote(user) or None,
        password=unquote(password) or None,
        ssl=tls,
        **options,
    )
    return client


def _host_port(item: str) -> tuple[str, int]:
    host, _, port = item.rpartition(":") if ":" in item else (item, "", str(_SENTINEL_PORT))
    if not host or not port.isdigit():
        raise ValueError(f"sentinel {item!r} is no host:port")
    return host.strip("[]"), int(port)
