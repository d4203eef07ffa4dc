"""How long one answer of the console holds the event loop up: 64 workers, full reports.

    python -m bench.console_cost

Prints the longest stretch without giving way, of answers with and without the reports, in ms of
CPU: other processes of the machine do not count.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from gateway.telemetry.record import RequestRecord
from gateway.worth.account import MAX_DOCUMENTS, MAX_TENANTS
from gateway.worth.tier import Tier
from prefix_index.blocks import root_hash
from tests.gateway.console_parts import consoled

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from gateway.console.snapshot import Snapshots
    from gateway.serve import Gateway

NUM_WORKERS = 64
NUM_BLOCKS = 2_000
REPEATS = 60


def fill(gateway: Gateway) -> None:
    """Let a gateway look as after an hour of traffic of many tenants."""
    (pool,) = gateway.fleet.pools
    assert pool.index is not None
    now_s = time.monotonic()
    for number in range(20_000):
        worker = f"w{number % NUM_WORKERS}"
        record = RequestRecord(
            f"request-{number}", "chat", pool=pool.name, worker=worker, outcome="ok",
            reason="longest_prefix", prompt_tokens=4000, observed_hit_tokens=3000 + number % 900,
            predicted_hit_tokens=3000, ttft_s=0.01 * (1 + number % 97), predicted_ttft_s=0.2,
        )  # fmt: skip
        gateway.observing.onlookers.observe(record)
    for number, worker in enumerate(pool.workers.values()):
        worker.capacity_tokens = 100_000
        hashes = [(number << 32 | block).to_bytes(16, "big") for block in range(NUM_BLOCKS)]
        pool.index.store(worker.id, hashes, root_hash(f"{number}"))
    account = gateway.worth.account
    account._tiers.setdefault(pool.name, Tier())
    for number in range(MAX_DOCUMENTS):
        key = f"t{number % MAX_TENANTS}\0document\0d{number}"
        tenant = f"t{number % MAX_TENANTS}"
        group = account._documents.use(pool.name, key, now_s, tenant=tenant, kind="document")
        group.recompute_s += number % 77
    for number in range(MAX_TENANTS):
        account._tenants.use(pool.name, f"t{number}", now_s, tenant=f"t{number}")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with consoled(Path(folder), num_engines=NUM_WORKERS) as running:
            await running.ask(0)
            fill(running.gateway)
            # What was just made is no garbage; walking it is not the console's cost.
            gc.collect()
            gc.freeze()
            console = running.gateway.observing.console
            snapshots = console._snapshots
            looks: list[float] = []
            answers: list[float] = []
            reports: list[float] = []
            for _ in range(REPEATS):
                begun_s = time.thread_time()
                console.alerts.look(time.monotonic())
                looks.append(time.thread_time() - begun_s)
                snapshots._reported_s = float("-inf")
                reports.append(await longest(answer_once(snapshots)))
                answers.append(await longest(answer_once(snapshots)))
            document = await snapshots.make(0.0)
            for name, found in (("alerts", looks), ("answer", answers), ("with reports", reports)):
                middle_ms, worst_ms = statistics.median(found) * 1e3, max(found) * 1e3
                print(f"{name}: median {middle_ms:.2f} ms, worst {worst_ms:.2f} ms")
            print(f"all decisions: {len(orjson.dumps(document)) / 1024:.0f} KiB")


async def answer_once(snapshots: Snapshots) -> None:
    """Make an answer as a page that polls asks for it."""
    orjson.dumps(await snapshots.make(time.time() - 1.0))


async def longest(work: Coroutine[Any, Any, None]) -> float:
    """Return the longest stretch for which some work keeps the loop, in seconds of CPU."""
    worst_s = 0.0

    @types.coroutine
    def driven() -> Generator[Any, Any, None]:
        nonlocal worst_s
        answer = None
        while True:
            begun_s = time.thread_time()
            try:
                waits_for = work.send(answer)
            except StopIteration:
                return
            finally:
                worst_s = max(worst_s, time.thread_time() - begun_s)
            answer = yield waits_for

    await driven()
    return worst_s


if __name__ == "__main__":
    asyncio.run(main())
