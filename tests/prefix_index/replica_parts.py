"""Gateways and engines for tests of the shared index: real links, feeds and views on one loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable

from prefix_index.blocks import BlockHash
from prefix_index.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineHash,
    Event,
    EventBatch,
)
from prefix_index.index import Index
from prefix_index.ingest import FeedChange, WorkerFeed
from prefix_index.replica.link import Link
from prefix_index.replica.pool import PoolReplica
from tests.support import poll_until

BLOCK_SIZE = 4
MODEL = "m"
# A loaded machine must not look like an outage.
TIMEOUT_S = 1.0

Content = dict[BlockHash, tuple[BlockHash, int]]


class Engine:
    """One worker's publisher: numbered batches, a bounded buffer, any number of readers.

    A name stands for one content for good, as a digest does.

    Attributes:
        log: All batches of this life of the process.
        first_kept: The buffer reaches back to this batch.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.log: list[EventBatch] = []
        self.first_kept = 0
        self.readers: list[EngineSource] = []
        self.life = 1
        self._chains: dict[int, tuple[int, ...]] = {}

    def publish(self, *events: Event) -> None:
        self.log.append(EventBatch(ts=0.0, events=list(events)))
        for reader in list(self.readers):
            reader.read()

    def store(self, chain: list[int], *, medium: str = "GPU") -> None:
        """Announce a chain of blocks, each named by a number; equal numbers are equal tokens."""
        for number, name in enumerate(chain):
            above = tuple(chain[:number])
            assert self._chains.setdefault(name, above) == above, f"{name} named another block"
        self.publish(*stored(chain, medium=medium))

    def remove(self, names: list[EngineHash], *, medium: str = "GPU") -> None:
        self.publish(BlockRemoved(block_hashes=names, medium=medium))

    def reset(self) -> None:
        self.publish(AllBlocksCleared())

    def restart(self) -> None:
        """Be a new process with an empty cache; readers find out with the next batch."""
        self.log.clear()
        self.first_kept = 0
        self.life += 1

    def digest(self, sequence: int) -> int:
        return self.life * 1_000_003 + sequence

    def truth(self, block_size: int = BLOCK_SIZE) -> Content:
        """Return what a reader of everything from the first batch on must hold."""
        index = Index(block_size)
        feed = WorkerFeed(index, self.worker, MODEL)
        for batch in self.log:
            feed.apply(batch)
        return content(index, self.worker)


class EngineSource:
    """A gateway's reader of one engine, as ``EventSubscriber`` and ``WorkerFeed`` are together."""

    def __init__(self, engine: Engine, index: Index) -> None:
        self.engine = engine
        self.silent = False
        self.clears = 0
        self.feed = WorkerFeed(index, engine.worker, MODEL)
        self._next = 0
        self._digest = 0

    def follow(self, next_sequence: int, digest: int) -> None:
        self._next, self._digest = next_sequence, digest
        self.engine.readers.append(self)
        self.read()

    def unfollow(self) -> None:
        if self in self.engine.readers:
            self.engine.readers.remove(self)

    def clear(self) -> None:
        self.feed.clear()

    def adopt(self, names: list[EngineHash], blocks: list[BlockHash]) -> None:
        self.feed._names.add(names, blocks)

    def names(self) -> list[EngineHash]:
        return [name for name, _ in self.feed._names.items()]

    def block_of(self, name: EngineHash) -> BlockHash | None:
        return self.feed._names.get(name)

    def position(self) -> tuple[int, int]:
        return self._next, self._digest

    def is_silent(self) -> bool:
        return self.silent

    def set_silent(self, is_silent: bool) -> None:
        self.silent = is_silent

    def listen(self, on_change: Callable[[FeedChange], None] | None) -> None:
        self.feed.on_change = on_change

    def read(self) -> None:
        """Take what is new, or begin again where that cannot be continued."""
        engine = self.engine
        is_known = self._next <= len(engine.log) and self._next >= engine.first_kept
        if self._next and not (is_known and engine.digest(self._next - 1) == self._digest):
            self._next = 0
            self.clears += 1
            self.feed.clear()
        self._next = max(self._next, engine.first_kept)
        for sequence in range(self._next, len(engine.log)):
            self._next, self._digest = sequence + 1, engine.digest(sequence)
            self.feed.apply(engine.log[sequence])


class Gateway:
    """One process's view of a pool, its link and its replica."""

    def __init__(
        self,
        url: str,
        engines: list[Engine],
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        max_blocks: int = 1_000_000,
        timeout_s: float = TIMEOUT_S,
        namespace: str = "t",
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.name = name
        self.index = Index(block_size, max_blocks)
        self.link = Link(
            url, namespace=namespace, timeout_s=timeout_s, clock=clock, rng=random.Random(name)
        )
        self.replica = PoolReplica(self.link, "pool", name, self.index, clock=clock)
        self.sources: dict[str, EngineSource] = {}
        for engine in engines:
            self.add(engine)
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, engine: Engine) -> None:
        source = self.sources[engine.worker] = EngineSource(engine, self.index)
        self.replica.add(engine.worker, source)

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self.link.run()),
            asyncio.create_task(self.replica.run()),
        ]

    async def stop(self) -> None:
        """End in good order: leases are given up."""
        for task in reversed(self._tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._tasks = []

    async def kill(self) -> None:
        """Be gone from one moment to the next: nothing is given up."""
        self.replica.leases.holder = "nobody"
        await self.stop()

    def role(self, worker: str) -> str:
        return self.replica.views[worker].role

    def holds_lease(self, worker: str) -> bool:
        return self.role(worker) == "hold"

    def content(self, worker: str) -> Content:
        return content(self.index, worker)


@contextlib.asynccontextmanager
async def running(*gateways: Gateway) -> AsyncIterator[None]:
    for gateway in gateways:
        gateway.start()
    try:
        yield
    finally:
        for gateway in gateways:
            await gateway.stop()


def stored(chain: list[int], *, medium: str = "GPU", parent: int | None = None) -> list[Event]:
    """Return the events of a chain of blocks."""
    tokens = [number for block in chain for number in range(block, block + BLOCK_SIZE)]
    return [
        BlockStored(
            block_hashes=list(chain),
            parent_block_hash=parent,
            token_ids=tokens,
            block_size=BLOCK_SIZE,
            medium=medium,
        )
    ]


def content(index: Index, worker: str) -> Content:
    """Return every held block of a worker with its parent and packed copies."""
    return {block: (parent, copies) for block, parent, copies in index.entries(worker)}


async def converge(gateways: list[Gateway], engines: list[Engine], deadline_s: float = 30) -> None:
    """Wait until all gateways hold of all engines exactly what is true."""

    def is_true() -> bool:
        return all(
            gateway.content(engine.worker) == engine.truth()
            for gateway in gateways
            for engine in engines
        )

    await poll_until(is_true, deadline_s=deadline_s, what="all views equal the truth")
