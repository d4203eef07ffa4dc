"""A real gateway in this process: real dispatcher, real connections, records kept for reading."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from gateway.proxy.server import LIFECYCLE, Front, Listener, make_app
from gateway.routing.dispatch import Dispatcher
from gateway.routing.pool import Pool, Worker
from gateway.upstream.client import Upstream
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from ssl import SSLContext

    from gateway.proxy.lifecycle import Lifecycle
    from gateway.proxy.limits import Limits
    from gateway.telemetry.record import RequestRecord

CHAT = "/v1/chat/completions"
# A busy machine takes seconds to accept a hundred connections, which is no fault to tell of.
CONNECT_S = 30.0
# The front of the gateways that a test starts.
default_front: Front = "raw"


@dataclass
class Gateway:
    """What a test needs of it."""

    listener: Listener
    pools: list[Pool]
    dispatcher: Dispatcher
    lifecycle: Lifecycle
    session: aiohttp.ClientSession
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(
        self, path: str = CHAT, body: Any = None, **options: Any
    ) -> tuple[int, bytes, aiohttp.ClientResponse]:
        """POST ``body`` as JSON (a short chat by default) and read the whole answer."""
        if body is None:
            body = chat()
        if "data" not in options:
            options["json"] = body
        async with self.session.post(self.url + path, **options) as response:
            return response.status, await response.read(), response

    async def get(self, path: str, **options: Any) -> tuple[int, bytes, aiohttp.ClientResponse]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.read(), response

    async def record(self, index: int = -1) -> RequestRecord:
        """The record of a request, once there are as many."""
        await poll_until(lambda: bool(self.records), what="a record")
        return self.records[index]

    @property
    def num_in_flight(self) -> int:
        return sum(w.books.in_flight for pool in self.pools for w in pool.workers.values())


def chat(text: str = "q", **fields: Any) -> dict[str, Any]:
    """A chat body for the model the tests serve."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def worker(worker_id: str, url: str, **options: Any) -> Worker:
    """A worker with connections."""
    return Worker(worker_id, url, upstream=Upstream(url, **options))


@asynccontextmanager
async def gateway(
    *urls: str,
    limits: Limits | None = None,
    pools: list[Pool] | None = None,
    aliases: dict[str, str] | None = None,
    front: Front | None = None,
    host: str = "127.0.0.1",
    ssl: SSLContext | None = None,
) -> AsyncIterator[Gateway]:
    """Run a gateway over workers ``w0, w1, ...``; afterwards nothing may be in flight.

    Without ``front`` it has the one of the test (``tests/gateway/conftest.py``).
    """
    if pools is None:
        workers = [worker(f"w{i}", url, connect_timeout_s=CONNECT_S) for i, url in enumerate(urls)]
        pools = [Pool("chat", models=["m"], aliases=aliases or {}, workers=workers)]
    dispatcher = Dispatcher(pools, seed=0)
    records: list[RequestRecord] = []
    app = make_app(dispatcher, observe=records.append, limits=limits)
    listener = await Listener.start(app, host, 0, front=front or default_front, ssl=ssl)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        running = Gateway(listener, pools, dispatcher, app[LIFECYCLE], session, records)
        try:
            yield running
            await poll_until(lambda: running.lifecycle.num_running == 0, what="no request runs")
            assert running.num_in_flight == 0
            books = [w.books for pool in pools for w in pool.workers.values()]
            assert [(b.queued_tokens, b.context_tokens, b.active_tokens) for b in books] == [
                (0, 0, 0)
            ] * len(books)
        finally:
            await listener.stop(0.0)
            await poll_until(lambda: listener.num_raw_connections == 0, what="no connection left")
            for pool in pools:
                for each in pool.workers.values():
                    if each.upstream is not None:
                        each.upstream.close()
            await asyncio.sleep(0)


class RawClient:
    """A client that sends exactly the bytes a test gives it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @staticmethod
    async def connect(port: int, host: str = "127.0.0.1", **options: Any) -> RawClient:
        return RawClient(*await asyncio.open_connection(host, port, **options))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read a response head: status and headers by lower-case name."""
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw.rstrip().split("\r\n")
        pairs = (line.split(":", 1) for line in lines)
        return int(first.split()[1]), {k.lower(): v.strip() for k, v in pairs}

    async def rest(self) -> bytes:
        """Read to the end of the connection."""
        return await self.reader.read()

    async def close(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)


def wire(body: bytes, *headers: str, version: str = "HTTP/1.1", path: str = CHAT) -> bytes:
    """A POST as it stands on the wire, with a content length unless headers say chunked."""
    lines = [f"POST {path} {version}", "host: gw", "content-type: application/json", *headers]
    if not any(h.lower().startswith(("transfer-encoding", "content-length")) for h in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body
