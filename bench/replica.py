"""The shared index: loading, looking up, publishing, following; and what a block costs in Redis.

    python -m bench.replica [--blocks 1000000] [--workers 64]

Starts its own Valkey on a unix socket. Prints one figure per line, with its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prefix_index.blocks import BlockHash, root_hash
from prefix_index.index import Index
from prefix_index.ingest import FeedChange
from prefix_index.names import NameBudget, Names
from prefix_index.replica.link import Link
from prefix_index.replica.lookup import Lookup
from prefix_index.replica.pool import PoolReplica
from tests.valkey import Valkey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from prefix_index.events import EngineHash

BLOCK_SIZE = 64
CHAIN_BLOCKS = 2000
BATCH_BLOCKS = 128
IDLE_TURN_S = 0.0002
LOOKUPS = 300


class BenchSource:
    """A worker whose batches are handed over ready hashed: ingest has its own benchmark."""

    def __init__(self, index: Index, worker: str, budget: NameBudget) -> None:
        self._index = index
        self._worker = worker
        self._names = Names(budget, lambda block: index.holds(worker, block))
        self._tell: Callable[[FeedChange], None] | None = None
        self._sequence = 0

    def store(self, chain: list[BlockHash], parent: BlockHash) -> None:
        self._index.store(self._worker, chain, parent)
        names: list[EngineHash] = [block[::-1] * 2 for block in chain]
        self._names.add(names, chain)
        self._sequence += 1
        if self._tell is not None:
            self._tell(FeedChange(False, dict(zip(chain, names, strict=True))))

    def follow(self, next_sequence: int, digest: int) -> None:
        self._sequence = next_sequence

    def unfollow(self) -> None: ...

    def clear(self) -> None:
        self._index.clear(self._worker)
        self._names.clear()

    def adopt(self, names: list[EngineHash], blocks: list[BlockHash]) -> None:
        self._names.add(names, blocks)

    def names(self) -> Iterable[EngineHash]:
        return [name for name, _ in self._names.items()]

    def block_of(self, name: EngineHash) -> BlockHash | None:
        return self._names.get(name)

    def position(self) -> tuple[int, int]:
        return self._sequence, 0

    def is_silent(self) -> bool:
        return False

    def set_silent(self, is_silent: bool) -> None: ...

    def listen(self, on_change: Callable[[FeedChange], None] | None) -> None:
        self._tell = on_change


class Gateway:
    """One process's view and share."""

    def __init__(self, url: str, name: str, num_workers: int, max_blocks: int) -> None:
        self.index = Index(BLOCK_SIZE, max_blocks)
        self.link = Link(url, namespace="bench", timeout_s=2.0)
        self.replica = PoolReplica(self.link, "pool", name, self.index)
        budget = NameBudget.for_blocks(max_blocks)
        self.sources = [BenchSource(self.index, f"w{i}", budget) for i in range(num_workers)]
        for i, source in enumerate(self.sources):
            self.replica.add(f"w{i}", source)

    @property
    def views(self) -> list:
        return list(self.replica.views.values())


@contextlib.asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[None]:
    tasks = [
        asyncio.create_task(gateway.link.run()),
        asyncio.create_task(gateway.replica.run()),
    ]
    try:
        yield
    finally:
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def watching_the_loop() -> AsyncIterator[list[float]]:
    """Collect the CPU seconds that other tasks took between two turns of this one.

    CPU and not wall clock: on a shared machine a process waits for its turn as well.
    """
    turns: list[float] = []

    async def watch() -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            turns.append(now_s - before_s)
            before_s = now_s
            if turns[-1] < IDLE_TURN_S:
                await asyncio.sleep(0.001)  # nothing else to do: do not spin
                before_s = time.thread_time()

    task = asyncio.create_task(watch())
    try:
        yield turns
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for knows nothing of this
        await asyncio.sleep(0.005)


def show(what: str, value: float, unit: str, bound: str = "") -> None:
    print(f"{what:<58} {value:>10,.2f} {unit}{f'   (bound: {bound})' if bound else ''}", flush=True)


def show_turns(what: str, turns: list[float]) -> None:
    turns = sorted(turns) or [0.0]
    show(f"{what}: longest turn of the loop, CPU", turns[-1] * 1e3, "ms", "5 ms")
    show(f"{what}: 99.9th percentile of turns", turns[int(0.999 * (len(turns) - 1))] * 1e3, "ms")


async def show_lookups(lookup: Lookup, chain: list[BlockHash], workers: list[str], by: str) -> None:
    times = []
    cpu_s = time.thread_time()
    for _ in range(LOOKUPS):
        asked_s = time.perf_counter()
        await lookup.find(chain, workers)
        times.append(time.perf_counter() - asked_s)
    cpu_s = time.thread_time() - cpu_s
    what = f"look-up, {len(chain)} blocks, {len(workers)} workers, held by {by}"
    show(f"{what}: median", statistics.median(times) * 1e3, "ms", "1.5 ms")
    show(f"{what}: least", min(times) * 1e3, "ms")
    show(f"{what}: CPU here", cpu_s / LOOKUPS * 1e3, "ms")


async def bench(url: str, valkey: Valkey, num_blocks: int, num_workers: int) -> None:
    root = root_hash("m")
    per_worker = num_blocks // num_workers
    one = Gateway(url, "one", num_workers, 2 * num_blocks)
    async with running(one):
        await until(lambda: all(view.role == "hold" for view in one.views))
        with valkey.client() as client:
            empty_bytes = client.info("memory")["used_memory"]
        chains: list[list[BlockHash]] = []
        start_s, cpu_s = time.perf_counter(), time.thread_time()
        async with watching_the_loop() as turns:
            for source in one.sources:
                for _ in range(per_worker // CHAIN_BLOCKS or 1):
                    chain = [os.urandom(16) for _ in range(min(CHAIN_BLOCKS, per_worker))]
                    chains.append(chain)
                    parent = root
                    for at in range(0, len(chain), BATCH_BLOCKS):
                        part = chain[at : at + BATCH_BLOCKS]
                        source.store(part, parent)
                        parent = part[-1]
                        await asyncio.sleep(0)
            await until(lambda: all(view.publication.is_empty for view in one.views))
        stored = sum(len(chain) for chain in chains)
        show("blocks stored and published", stored, "blocks")
        show("store and publish", stored / (time.perf_counter() - start_s), "blocks/s")
        show("CPU to store and publish", (time.thread_time() - cpu_s) / stored * 1e6, "us/block")
        show_turns("publish", turns)
        with valkey.client() as client:
            client.xtrim(one.replica.leases.stream, maxlen=0)
            used = client.info("memory")["used_memory"] - empty_bytes
        show("Redis memory per (worker, block), 32-byte engine hashes", used / stored, "bytes")

        lookup = Lookup(one.link, one.replica.leases, one.index)
        workers = list(one.replica.views)
        await show_lookups(lookup, chains[0], workers, "one")
        unseen = [os.urandom(16) for _ in range(CHAIN_BLOCKS)]
        await show_lookups(lookup, unseen, workers, "nobody")
        shared_chain = chains[0]
        for source in one.sources:
            for at in range(0, CHAIN_BLOCKS, BATCH_BLOCKS):
                part = shared_chain[at : at + BATCH_BLOCKS]
                source.store(part, shared_chain[at - 1] if at else root)
            await asyncio.sleep(0)
        await until(lambda: all(view.publication.is_empty for view in one.views))
        await show_lookups(lookup, shared_chain, workers, "all")

        two = Gateway(url, "two", num_workers, 2 * num_blocks)
        total = one.index.num_blocks
        start_s, cpu_s = time.perf_counter(), time.thread_time()
        async with watching_the_loop() as turns, running(two):
            await until(lambda: two.index.num_blocks >= total)
            show(f"snapshot of {total} blocks loaded", time.perf_counter() - start_s, "s", "10 s")
            show("of that CPU here", time.thread_time() - cpu_s, "s")
            show_turns("load", turns)
            turns.clear()
            followed = 100_000
            start_s = time.perf_counter()
            before = two.index.num_blocks
            for number in range(followed // BATCH_BLOCKS):
                chain = [os.urandom(16) for _ in range(BATCH_BLOCKS)]
                one.sources[number % num_workers].store(chain, root)
                await asyncio.sleep(0)
            await until(lambda: two.index.num_blocks >= before + followed // BATCH_BLOCKS * 128)
            rate = followed / (time.perf_counter() - start_s)
            show("published and followed in one process", rate, "blocks/s")
            show_turns("follow", turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--tcp", action="store_true", help="loopback instead of a unix socket")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wl-bench-") as folder:
        valkey = Valkey(Path(folder))
        valkey.start()
        url = valkey.url if options.tcp else f"unix://{valkey.socket_path}"
        try:
            asyncio.run(bench(url, valkey, options.blocks, options.workers))
        finally:
            valkey.stop()


if __name__ == "__main__":
    main()
