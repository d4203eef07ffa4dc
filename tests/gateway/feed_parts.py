"""Feeds with a clock to move and without sockets, and engines that tell where they publish."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import zmq.asyncio
from aiohttp import web

from gateway.fleet.event_health import EventHealth
from gateway.fleet.feed import Feed
from gateway.routing.pool import Pool, Worker
from prefix_index import BlockStored, EventBatch, Index, hash_blocks, root_hash
from prefix_index.events import Event
from tests.gateway.routing_parts import BLOCK, Clock, prompt_reader

TOKENS = list(range(BLOCK * 8))
OURS = hash_blocks(TOKENS, BLOCK, root_hash("m"))


def stored(first: int, last: int, **more: Any) -> BlockStored:
    """Return the event of blocks first..last-1 of TOKENS, whose engine hashes are 1, 2, ..."""
    fields: dict[str, Any] = {
        "block_hashes": list(range(first + 1, last + 1)),
        "parent_block_hash": first or None,
        "token_ids": TOKENS[first * BLOCK : last * BLOCK],
        "block_size": BLOCK,
        **more,
    }
    return BlockStored(**fields)


@dataclass
class Fed:
    """One worker with a feed that is handed its batches."""

    pool: Pool
    worker: Worker
    feed: Feed
    clock: Clock
    sequence: int = 0

    def take(self, *events: Event, rank: int | None = None) -> None:
        self.feed._apply(self.sequence, EventBatch(1.0, list(events), rank))
        self.sequence += 1

    def passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.feed.check()

    def mode(self) -> str:
        return self.worker.mode

    def health(self) -> EventHealth:
        return self.feed.health

    @property
    def hit(self) -> int:
        """Blocks of TOKENS that the index credits to it."""
        index = self.pool.index
        assert index is not None
        hit = index.match(OURS).get(self.worker.id)
        return 0 if hit is None else hit.total // BLOCK


@asynccontextmanager
async def fed(**worker: Any) -> AsyncIterator[Fed]:
    """Give one worker, which is exact as after a start."""
    index = Index(BLOCK)
    clock = Clock()
    one = Worker("w0", "http://h:1", mode="exact", **worker)
    pool = Pool("chat", models=["m"], reader=prompt_reader(), index=index, workers=[one])
    context = zmq.asyncio.Context()
    try:
        feed = Feed(
            pool, one, index, events="tcp://127.0.0.1:1", replay=None, context=context, clock=clock
        )
        yield Fed(pool, one, feed, clock)
    finally:
        context.destroy(linger=0)


@dataclass
class Telling:
    """An engine that answers what a gateway asks about itself."""

    answers: dict[str, Any] = field(default_factory=dict)
    metrics: str = ""
    asked: list[str] = field(default_factory=list)
    on_post: Callable[[str], web.Response | Awaitable[web.Response]] | None = None

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.method == "POST" and self.on_post is not None:
            answer = self.on_post(request.path)
            return await answer if isinstance(answer, Awaitable) else answer
        if request.path == "/health":
            return web.Response()
        if request.path == "/metrics":
            return web.Response(text=self.metrics)
        if request.path in self.answers:
            return web.json_response(self.answers[request.path])
        return web.Response(status=404)


@asynccontextmanager
async def telling(engine: Telling, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve such an engine; gives its base URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
