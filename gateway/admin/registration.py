"""``POST /admin/v1/workers`` and ``DELETE /admin/v1/workers/{id}``: workers come and go by request.

Whoever may register a worker has the gateway connect to an address of theirs. So only hosts that
the pool allows are taken (``gateway/allowed.py``), judged before anything is connected to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog
from pydantic import ValidationError

from gateway.allowed import AllowedHosts, HostRefusedError
from gateway.config import WorkerConfig
from gateway.config.words import in_words
from gateway.errors import Forbidden, InvalidRequest, NotFound
from gateway.proxy.body import parse_json, read_body
from gateway.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aiohttp import web

    from gateway.config import PoolConfig
    from gateway.fleet.fleet import Fleet
    from gateway.proxy.limits import Limits
    from gateway.routing.pool import Worker

log = structlog.get_logger("warmlane")

_FIELDS = frozenset({"pool", *WorkerConfig.model_fields})
# Who added it, as the fleet remembers.
BY = "admin"


class Registration:
    """The handlers' work; one per process.

    Args:
        fleet: Takes the workers.
        pools: Returns the configured pools by name, as they are now.
        limits: Bound on bodies.
    """

    def __init__(
        self, fleet: Fleet, pools: Callable[[], Mapping[str, PoolConfig]], limits: Limits
    ) -> None:
        self._fleet = fleet
        self._pools = pools
        self._limits = limits

    async def add(self, request: web.Request) -> tuple[str, list[Worker]]:
        """Register a worker; return its pool's name and what the address is made of.

        Raises:
            InvalidRequest: If the body says no worker, or its id is taken.
            Forbidden: If no worker of that pool may be there.
        """
        document = parse_json(await read_body(request, self._limits))
        if not isinstance(document, dict):
            raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
        if unknown := sorted(set(document) - _FIELDS):
            raise InvalidRequest(
                f"Unknown field {unknown[0]!r}; expected {', '.join(sorted(_FIELDS))}.",
                param=unknown[0],
            )
        pool = self._pool(document)
        config = _worker(document)
        await self._judge(pool, config)
        self._refuse_twice(config)
        try:
            workers = self._fleet.add(pool.name, config, by=BY)
        except (ValueError, ConfigError) as error:
            raise InvalidRequest(f"{error}.", code="worker_not_added") from error
        log.info("worker_registered", worker=config.id, pool=pool.name, url=config.url)
        return pool.name, workers

    def remove(self, worker_id: str) -> None:
        """Take a worker out; its running requests go on.

        Raises:
            NotFound: If there is none.
        """
        if not self._fleet.remove(worker_id):
            raise NotFound(f"No worker has the id {worker_id!r}; GET /admin/v1/workers lists them.")
        log.info("worker_removed", worker=worker_id)

    def _refuse_twice(self, config: WorkerConfig) -> None:
        """Refuse an address that is a worker already: its blocks and its load would count twice."""
        there = (w for pool in self._fleet.pools for w in pool.workers.values())
        if other := next((w for w in there if w.url == config.url), None):
            raise InvalidRequest(
                f"Worker {other.id!r} is at {config.url!r} already.",
                param="url",
                code="worker_not_added",
            )

    def _pool(self, document: dict[str, Any]) -> PoolConfig:
        pools = self._pools()
        name = document.get("pool")
        if name is None and len(pools) == 1:
            return next(iter(pools.values()))
        pool = pools.get(name) if isinstance(name, str) else None
        if pool is None:
            raise InvalidRequest(f"pool: expected one of {', '.join(pools)}.", param="pool")
        return pool

    async def _judge(self, pool: PoolConfig, config: WorkerConfig) -> None:
        allowed = AllowedHosts(pool.worker_allow)
        try:
            for host, port in _addresses(config):
                await allowed.resolve(host, port)
        except HostRefusedError as error:
            log.warning("worker_refused", pool=pool.name, reason=str(error))
            raise Forbidden(
                f"{error}; pools[{pool.name}].worker_allow says where workers may be.",
                code="worker_not_allowed",
            ) from error
        except OSError as error:
            raise InvalidRequest(
                f"The host of {config.url!r} cannot be resolved.", param="url"
            ) from error


def _worker(document: dict[str, Any]) -> WorkerConfig:
    """Read a worker; without an id it is named after its address."""
    given = {name: value for name, value in document.items() if name != "pool"}
    url = given.get("url")
    if not isinstance(url, str):
        raise InvalidRequest("'url' is required and must be a string.", param="url")
    try:
        # Before it is checked it may be anything.
        given.setdefault("id", urlsplit(url).netloc.replace("[", "").replace("]", "") or "worker")
        return WorkerConfig.model_validate(given)
    except (ValidationError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise InvalidRequest("url: expected http://HOST[:PORT].", param="url") from error
        problem = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in problem["loc"])
        raise InvalidRequest(
            f"{name}: {in_words(problem, WorkerConfig)}.", param=name or None
        ) from error


def _addresses(config: WorkerConfig) -> Iterator[tuple[str, int]]:
    """Yield every host and port that a worker's registration would have us connect to.

    Raises:
        HostRefusedError: If it would have us listen, or open a local socket.
    """
    parts = urlsplit(config.url)
    yield parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    for given in (config.kv_events, config.kv_replay):
        for address in [given] if isinstance(given, str) else given or []:
            events = urlsplit(address)
            if events.scheme != "tcp" or not events.hostname or events.hostname == "*":
                raise HostRefusedError(
                    f"no registered worker may publish at {address!r}; expected tcp://HOST:PORT"
                )
            yield events.hostname, events.port or 0
