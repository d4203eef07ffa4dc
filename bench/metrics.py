"""How long a scrape keeps the gateway's event loop, with a large fleet and many tenants.

    python -m bench.metrics [--workers 64] [--tenants 1000] [--tokenizer models/smollm2]

A real gateway in this process, over one engine process that stands for all workers, gets requests
of every tenant. Then a timer of one millisecond notes by how much it is late: without scrapes (the
floor of this machine at this hour), while another process scrapes, and while what four processes
said is read, merged and written as the supervisor does it.

Beside how late it was stands the CPU time that the loop's thread took in one go, between two of its
ticks: on a machine that others use as well, only that is the gateway's own doing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from gateway.runtime import configure_logs, run_loop
from gateway.serve import Gateway
from gateway.settings import load
from gateway.supervisor.exposition import merging, parse, reading, rendering
from gateway.telemetry.exposition import OPEN_TYPE, write
from gateway.telemetry.slices import in_slices
from tests.fakes.engine import DONE, RawEngine, Script, Seen, answer, event

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from gateway.config import Settings
    from gateway.supervisor.exposition import Snapshot

TICK_S = 0.001
# What nothing may keep the event loop for.
LIMIT_MS = 5.0
STREAM = "content-type: text/event-stream"
NUM_SCRAPES = 40
PAUSE_S = 0.25
PROCESSES = 4
# What a real engine says is scraped from each worker every five seconds meanwhile.
ENGINE_TEXT = Path(__file__).parents[1] / "tests" / "data" / "vllm-metrics-0.32.0.txt"
# Whoever scrapes is another process, so that only the gateway's work is seen.
SCRAPER = f"""
import sys, time, urllib.request
request = urllib.request.Request(sys.argv[1], headers={{"accept": "application/openmetrics-text"}})
for _ in range({NUM_SCRAPES}):
    time.sleep({PAUSE_S})
    began_s = time.perf_counter()
    size = len(urllib.request.urlopen(request).read())
    print(size, time.perf_counter() - began_s, flush=True)
"""


class Probe:
    """Notes by how much a timer is late, and what CPU time passed since it fired before."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self.busy_ms: list[float] = []

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            due_s, busy_s = time.perf_counter() + TICK_S, time.thread_time()
            await asyncio.sleep(TICK_S)
            self.late_ms.append(1e3 * max(0.0, time.perf_counter() - due_s))
            self.busy_ms.append(1e3 * (time.thread_time() - busy_s))

    def __str__(self) -> str:
        return f"late {_spread(self.late_ms)}   busy {_spread(self.busy_ms)}"


def _spread(values_ms: list[float]) -> str:
    values = sorted(values_ms)
    over = sum(ms > LIMIT_MS for ms in values)
    return (
        f"median {values[len(values) // 2]:6.3f} p99 {values[len(values) * 99 // 100]:7.3f} "
        f"max {values[-1]:7.3f} ms, {over:4} of {len(values)} over {LIMIT_MS:g}"
    )


@asynccontextmanager
async def probing(what: str) -> AsyncIterator[None]:
    """Say how late the loop was meanwhile."""
    gc.collect()
    probe = Probe()
    task = asyncio.create_task(probe.run())
    yield
    task.cancel()
    print(f"{what:20} {probe}", flush=True)


def respond(seen: Seen) -> Script:
    """Answer as a streaming engine that reports cached tokens."""
    if seen.target == "/metrics":
        return answer(ENGINE_TEXT.read_bytes())
    if seen.method == "GET":
        return answer(b"{}")
    usage = {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41,
             "prompt_tokens_details": {"cached_tokens": 32}}  # fmt: skip
    said = event(choices=[{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}])
    return answer(said + event(choices=[], usage=usage) + DONE, 200, STREAM)


async def run_engine() -> None:
    """Be the engine until killed."""
    async with RawEngine(respond) as engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()


async def load_tenants(url: str, num_tenants: int, per_tenant: int) -> None:
    """Send requests of every tenant."""
    turn = asyncio.Semaphore(64)

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        tenant = f"tenant-{number % num_tenants}"
        messages = [
            {"role": "system", "content": f"What {tenant} always says. " * 20},
            {"role": "user", "content": f"question {number}"},
        ]
        body = {"model": "m", "stream": True, "messages": messages}
        async with turn:
            headers = {"x-tenant-id": tenant}
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as r:
                assert r.status == 200, await r.text()
                await r.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(ask(session, n) for n in range(num_tenants * per_tenant)))


async def scraped(url: str) -> bytes:
    """Scrape from another process, and print sizes and times."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRAPER, f"{url}/metrics", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    rows = [line.split() for line in out.decode().splitlines()]
    times_ms = sorted(1e3 * float(seconds) for _, seconds in rows)
    print(
        f"{NUM_SCRAPES} scrapes of {int(rows[-1][0]) / 1e6:.2f} MB: "
        f"median {times_ms[len(times_ms) // 2]:.0f} ms, max {times_ms[-1]:.0f} ms",
        flush=True,
    )
    headers = {"accept": OPEN_TYPE}
    async with aiohttp.request("GET", f"{url}/metrics", headers=headers) as response:
        return await response.read()


async def supervise(text: str) -> None:
    """Read, merge and write what several processes said, as the supervisor does."""
    for _ in range(NUM_SCRAPES // 4):
        await asyncio.sleep(PAUSE_S)
        living: list[Snapshot] = [{} for _ in range(PROCESSES)]
        for snapshot in living:
            await in_slices(reading(text, snapshot))
        merged: Snapshot = {}
        await in_slices(merging(living, {}, merged))
        await in_slices(rendering(merged, open_metrics=True))


def steps(gateway: Gateway, text: str) -> None:
    """Say what the longest step takes by the thread's CPU clock, the least of some runs.

    Others may run after each step that ends a millisecond: the loop is never held up longer than
    that and one step.
    """
    runs: dict[str, Callable[[], Iterable[object]]] = {
        "write": lambda: write(gateway.telemetry.registry.collect(), open_metrics=True),
        "read": lambda: reading(text, {}),
        "merge": lambda: merging([parse(text)] * PROCESSES, {}, {}),
        "write the merged": lambda: rendering(parse(text), open_metrics=True),
    }
    for what, begin in runs.items():
        times_ms = [list(_step_times_ms(begin())) for _ in range(10)]
        least = [min(same) for same in zip(*times_ms, strict=False)]
        print(f"{what:20} {len(least)} steps, {sum(least):.0f} ms CPU, longest {max(least):.3f} ms")


def _step_times_ms(steps: Iterable[object]) -> Iterator[float]:
    left, done = iter(steps), object()
    while True:
        began_s = time.thread_time()
        is_over = next(left, done) is done
        yield 1e3 * (time.thread_time() - began_s)
        if is_over:
            return


async def measure(options: argparse.Namespace) -> None:
    """Run the phases."""
    engine = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.metrics", "--engine"), stdout=asyncio.subprocess.PIPE
    )
    assert engine.stdout is not None
    try:
        engine_url = (await engine.stdout.readline()).decode().strip()
        gateway = Gateway(_settings(options, engine_url))
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(gateway.run(ready=port.set_result))
        url = f"http://127.0.0.1:{await port}"
        await load_tenants(url, options.tenants, options.requests)
        async with probing("no scrapes"):
            await asyncio.sleep(NUM_SCRAPES * PAUSE_S)
        async with probing("scraped"):
            text = (await scraped(url)).decode()
        async with probing(f"{PROCESSES} processes merged"):
            await supervise(text)
        steps(gateway, text)
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    finally:
        engine.kill()
        await engine.wait()


def _settings(options: argparse.Namespace, engine_url: str) -> Settings:
    workers = [{"id": f"w{n}", "url": engine_url} for n in range(options.workers)]
    pool = {"name": "chat", "models": ["m"], "engine": "openai", "workers": workers}
    if options.tokenizer:
        pool |= {"engine": "vllm", "tokenizer": options.tokenizer}
    flags = {
        ("server",): {
            "host": "127.0.0.1", "port": 0, "access": {"trusted_peers": ["127.0.0.1"]},
        },
        ("pools",): [pool],
        ("tenants",): [
            {"name": f"tenant-{n}", "requests_per_min": 10**6, "tokens_per_min": 10**9}
            for n in range(options.tenants)
        ],
        ("telemetry",): {"log_level": "error"},
    }  # fmt: skip
    return load(None, flags=flags, environ={})[0]


def main() -> int:
    """Run the bench, or its engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=4, help="of each tenant")
    parser.add_argument("--tokenizer", help="folder; without one prompts are not read")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    configure_logs("error")
    run_loop(run_engine() if options.engine else measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
