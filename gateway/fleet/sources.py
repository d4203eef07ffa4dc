"""Where a worker publishes its KV events: as configured, or as it says itself.

What a worker says is only believed about itself: an address on another host is refused, or any
worker could make the gateway connect wherever it likes.

Source: vLLM 0.32 ``entrypoints/serve/instrumentator/basic.py`` (``/kv_event_sources``, captured),
SGLang 0.5.23 ``runtime_context.py`` (``/server_info``; ``/get_server_info`` before).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import orjson
import structlog

from gateway.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.config import WorkerConfig
    from gateway.upstream.client import Upstream

# The answer is in the engine's memory; a busy one takes a second to its HTTP thread.
DEADLINE_S = 5.0
# Ranks of one address; the largest expert-parallel deployments have a few hundred.
MAX_RANKS = 1024
_PATHS = {
    "vllm": ("/kv_event_sources",),
    "runner": ("/kv_event_sources",),
    "sglang": ("/server_info", "/get_server_info"),
}
_ANY_HOSTS = ("*", "0.0.0.0", "::")  # noqa: S104  # compared, not bound

log = structlog.get_logger("warmlane")


class EventSource(NamedTuple):
    """One publisher.

    Attributes:
        events: Where it sends.
        replay: Where its buffer answers; None = nowhere.
        topic: Prefix of its topics.
        rank: Data-parallel rank that it speaks for; None = the worker has no ranks.
    """

    events: str
    replay: str | None
    topic: str
    rank: int | None


class Discovered(NamedTuple):
    """What a worker tells about itself; None = it does not say.

    Attributes:
        sources: Its publishers by rank; empty = it does not publish.
        block_size: Tokens of one KV block.
        capacity_tokens: What its device pool holds.
    """

    sources: list[EventSource]
    block_size: int | None = None
    capacity_tokens: int | None = None


class SourceRefusedError(ValueError):
    """A worker names an address that is not its own; the message names it."""


def configured(config: WorkerConfig) -> list[EventSource]:
    """Return the publishers that a worker's configuration names, one for each rank."""
    if config.kv_events is None:
        return []
    host = _host_of(config.url)
    events = [config.kv_events] if isinstance(config.kv_events, str) else list(config.kv_events)
    replays: list[str | None] = (
        [config.kv_replay] * len(events)
        if config.kv_replay is None or isinstance(config.kv_replay, str)
        else list(config.kv_replay)
    )
    # A buffer's socket always listens, so an address for any host means the worker's own.
    replays = [replay and _with_host(replay, host) for replay in replays]
    topic = config.kv_topic or ""
    return _ranked(
        EventSource(event, replay, topic, rank)
        for rank, (event, replay) in enumerate(zip(events, replays, strict=True))
    )


def spread(source: EventSource, num_ranks: int) -> list[EventSource]:
    """Return the publishers of several ranks, of which one address was configured.

    Rank r has the port r further on, as both engines place it.
    """
    if num_ranks < 2 or not source.events.startswith("tcp://"):
        return [source]
    return [
        source._replace(
            events=_shifted(source.events, rank),
            replay=source.replay and _shifted(source.replay, rank),
            rank=rank,
        )
        for rank in range(num_ranks)
    ]


async def discover(upstream: Upstream, engine: str) -> Discovered | None:
    """Ask a worker where it publishes.

    Args:
        upstream: Its connections.
        engine: Kind of engine.

    Returns:
        What it tells; None if nothing that can be understood.

    Raises:
        SourceRefusedError: If an address is not the worker's own.
    """
    for path in _PATHS.get(engine, ()):
        document = await _ask(upstream, path)
        if document is None:
            continue
        host = _host_of(upstream.url)
        found = (_sglang if engine == "sglang" else _vllm)(document)
        if found is None:
            return None
        own = await _addresses_of(host) if found.sources else set()
        return found._replace(
            sources=_ranked(
                source._replace(
                    events=_own(source.events, host, own),
                    replay=source.replay and _own(source.replay, host, own),
                )
                for source in found.sources
            )
        )
    return None


def can_ask(engine: str) -> bool:
    """Whether workers of this kind can be asked."""
    return engine in _PATHS


def _ranked(sources: Iterable[EventSource]) -> list[EventSource]:
    """Leave the rank out where there is only one: such a worker needs no header."""
    found = sorted(sources, key=lambda source: source.rank or 0)
    return found if len(found) > 1 else [source._replace(rank=None) for source in found]


def _vllm(document: Any) -> Discovered | None:
    """Read a map from rank to publisher, or a list of publishers with their ranks."""
    if isinstance(document, dict):
        items = list(document.items())
    elif isinstance(document, list):
        items = [(item.get("data_parallel_rank"), item) for item in document if _is_map(item)]
    else:
        return None
    found = []
    for name, item in items[:MAX_RANKS]:
        rank = int(name) if str(name).isdigit() and len(str(name)) < 5 else None
        if rank is None or not _is_map(item) or not isinstance(item.get("endpoint"), str):
            return None
        if item.get("publisher", "zmq") != "zmq":
            continue
        replay, topic = item.get("replay_endpoint"), item.get("topic")
        found.append(
            EventSource(
                item["endpoint"],
                replay if isinstance(replay, str) else None,
                topic if isinstance(topic, str) else "",
                rank,
            )
        )
    return Discovered(found)


def _sglang(document: Any) -> Discovered | None:
    """Read the server's own sizes, and the block that gives the first rank's port."""
    if not _is_map(document):
        return None
    block = document.get("kv_events")
    sizes = Discovered(
        [], _positive(document.get("page_size")), _positive(document.get("max_total_num_tokens"))
    )
    if not _is_map(block) or block.get("publisher") != "zmq":
        return sizes
    sources = _sglang_sources(block)
    if sources is None:
        return None
    return sizes._replace(
        sources=sources, block_size=_positive(block.get("block_size")) or sizes.block_size
    )


def _sglang_sources(block: dict[str, Any]) -> list[EventSource] | None:
    """Read the block that gives the first rank's port; the others follow."""
    host, topic = block.get("endpoint_host", "*"), block.get("topic", "")
    port: Any = block.get("endpoint_port_base")
    ranks = block.get("dp_size", 1)
    if type(ranks) is not int or not 0 < ranks <= MAX_RANKS or not _are_ports(port, ranks):
        return None
    replay: Any = block.get("replay_endpoint_port_base")
    first = int(port)
    first_replay = int(replay) if _are_ports(replay, ranks) else None
    if not isinstance(host, str) or not isinstance(topic, str):
        return None
    return [
        EventSource(
            f"tcp://{host}:{first + rank}",
            None if first_replay is None else f"tcp://{host}:{first_replay + rank}",
            topic,
            rank,
        )
        for rank in range(ranks)
    ]


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _shifted(endpoint: str, ports: int) -> str:
    host, port = _split(endpoint)
    return f"tcp://{_bracketed(host)}:{port + ports}"


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _are_ports(first: Any, number: int) -> bool:
    return type(first) is int and first > 0 and first + number <= 2**16


async def _ask(upstream: Upstream, path: str) -> Any:
    """Return the document at a path; None if there is none."""
    try:
        response = await upstream.request(
            "GET", path, [], first_byte_s=DEADLINE_S, total_s=DEADLINE_S
        )
        try:
            body = await response.read()
        finally:
            response.close()
        return orjson.loads(body) if response.status == 200 else None
    except (UpstreamError, orjson.JSONDecodeError):
        return None


def _own(endpoint: str, host: str, addresses: set[str]) -> str:
    """Return an endpoint of a worker as we reach it.

    Raises:
        SourceRefusedError: If it is not on the worker's host.
    """
    if endpoint.startswith("ipc://"):
        # A path on our machine, unless the worker is here too.
        if any(ipaddress.ip_address(address).is_loopback for address in addresses):
            return endpoint
        raise SourceRefusedError(f"{endpoint} is a file of another machine than {host}'s")
    named, port = _split(endpoint)
    if named in _ANY_HOSTS or named in (host, "localhost") or named in addresses:
        return f"tcp://{_bracketed(host)}:{port}"
    try:
        if ipaddress.ip_address(named).is_loopback:
            return f"tcp://{_bracketed(host)}:{port}"
    except ValueError:
        pass
    raise SourceRefusedError(f"{endpoint} is not on the worker's own host {host}")


def _with_host(endpoint: str, host: str) -> str:
    """Put a worker's host where an endpoint stands for any."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    named, port = _split(endpoint)
    return f"tcp://{_bracketed(host)}:{port}" if named in _ANY_HOSTS else endpoint


def _split(endpoint: str) -> tuple[str, int]:
    scheme, _, rest = endpoint.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not port.isdigit() or not 0 < int(port) < 2**16:
        raise SourceRefusedError(f"{endpoint!r} is no tcp://HOST:PORT and no ipc://PATH")
    return host.strip("[]"), int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


async def _addresses_of(host: str) -> set[str]:
    """Return the addresses of a host; none if it has no name any more."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(info[4][0]) for info in infos}
