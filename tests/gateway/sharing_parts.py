"""Gateways that share an index: real links, feeds, sockets and pools, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from gateway.fleet.feed import Feed
from gateway.fleet.follow import Following
from gateway.fleet.sharing import Sharing
from gateway.fleet.sources import EventSource
from gateway.routing.pool import Pool, Worker
from prefix_index import BlockStored, EventBatch, Index
from prefix_index.events import AllBlocksCleared, BlockRemoved, Event, encode_batch
from prefix_index.replica.link import Link
from tests.gateway.feed_parts import TOKENS
from tests.gateway.routing_parts import BLOCK, prompt_reader
from tests.prefix_index.publisher import Publisher
from tests.prefix_index.replica_parts import Content, content
from tests.support import free_port

# A loaded machine must not look like an outage.
TIMEOUT_S = 1.0


class Side:
    """One gateway process: its fleet as far as sharing needs it, its link, its share."""

    def __init__(
        self,
        url: str,
        publishers: dict[str, Publisher],
        *,
        name: str,
        timeout_s: float = TIMEOUT_S,
        max_blocks: int = 1_000_000,
        clock: Callable[[], float] | None = None,
        silent: tuple[str, ...] = (),
    ) -> None:
        import time

        clock = clock or time.monotonic
        self.publishers = publishers
        self.index = Index(BLOCK, max_blocks)
        names = [*publishers, *silent]
        workers = [Worker(worker_id, f"http://{worker_id}:1") for worker_id in names]
        self.pool = Pool(
            "chat", models=["m"], reader=prompt_reader(), index=self.index, workers=workers
        )
        self.pools = [self.pool]
        self.on_followable: Callable[[Worker], object] = self.follow
        self.on_gone: Callable[[Worker], object] = self.unfollow
        self._tasks: set[asyncio.Task[Any]] = set()
        self.following = Following(self._spawn, clock)
        self.link = Link(
            url, namespace="t", timeout_s=timeout_s, clock=clock, rng=random.Random(name)
        )
        self.sharing = Sharing(self, self.link, name=name, clock=clock)  # type: ignore[arg-type]

    def follow(self, worker: Worker, **options: Any) -> Feed | None:
        publisher = self.publishers[worker.id]
        return self.following.follow(
            self.pool,
            worker,
            EventSource(publisher.endpoint, publisher.replay_endpoint, "", None),
            **options,
        )

    def unfollow(self, worker: Worker) -> None:
        self.following.unfollow(worker.id)

    def role(self, worker_id: str) -> str:
        return self.view(worker_id).role

    def view(self, worker_id: str) -> Any:
        return self.sharing.pools["chat"].replica.views[worker_id]

    def content(self, worker_id: str) -> Content:
        return content(self.index, worker_id)

    async def start(self) -> None:
        self._link_task = asyncio.create_task(self.link.run())
        self._share_task = asyncio.create_task(self.sharing.run())
        for worker_id in self.publishers:
            self.on_followable(self.pool.workers[worker_id])

    async def stop(self) -> None:
        for task in (self._share_task, self._link_task, *self._tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.following.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        return task


@contextlib.asynccontextmanager
async def running(*sides: Side) -> AsyncIterator[None]:
    for side in sides:
        await side.start()
    try:
        yield
    finally:
        for side in sides:
            await side.stop()


@contextlib.asynccontextmanager
async def publishing(*worker_ids: str) -> AsyncIterator[dict[str, Publisher]]:
    async with contextlib.AsyncExitStack() as stack:
        yield {
            worker_id: await stack.enter_async_context(Publisher(free_port(), free_port()))
            for worker_id in worker_ids
        }


def blocks(first: int, last: int) -> BlockStored:
    """Return the event of blocks first..last-1 of TOKENS, whose engine hashes are 1, 2, ..."""
    return BlockStored(
        block_hashes=list(range(first + 1, last + 1)),
        parent_block_hash=first or None,
        token_ids=TOKENS[first * BLOCK : last * BLOCK],
        block_size=BLOCK,
    )


def gone(*numbers: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[number + 1 for number in numbers])


def batch(*events: Event) -> bytes:
    return encode_batch(EventBatch(1.0, list(events)))


def cleared() -> AllBlocksCleared:
    return AllBlocksCleared()
