"""The same closed-loop workload through several routers, side by side: mean TTFT and prefill work.

    python -m bench.fleet --tokenizer models/smollm2 --sglang VENV/bin/python
    python -m bench.fleet --runners 2 --tokenizer models/smollm2 --sglang VENV/bin/python

Routers: Warmlane, sglang-router cache_aware, sglang-router round_robin. Each round runs all of
them in turn, every one from cold engines; the printed figures are medians over the rounds. The
engines are timed mocks with a paged LRU cache and KV events (``bench/mock_engine.py``), or bundled
runners, where only the prefill tokens they compute say something on a small box.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml

from bench.fleet_workload import Shape, Workload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.fleet_workload import Ask, Conversation

ROUTERS = ("warmlane", "sglang_cache_aware", "round_robin")
# Clients by kind: mostly documents and conversations, some agents, a little noise, and a batch as
# evaluation harnesses send it. Together they keep eight engines busy, not flooded.
CLIENTS = {"document": 48, "chat": 36, "agent": 24, "one_shot": 6, "few_shot": 16}
RUNNER_CLIENTS = {"document": 2, "chat": 2, "few_shot": 1}
# Small enough for 135M parameters on two cores.
RUNNER_SHAPE = Shape(
    documents=6, document_words=900, chat_system_words=300, turn_words=250, few_shot_words=900,
    few_shot_questions=20, output_tokens=8,
)  # fmt: skip
THINK_S = 0.3
# Clients do not start in one moment.
START_S = 10.0
# A client of the batch asks until all its questions are asked.
BATCH = sys.maxsize
READY_DEADLINE_S = 120.0
REQUEST_DEADLINE_S = 300.0
_PREFILL = re.compile(r"^vllm:(prompt_tokens|prefix_cache_hits)_total(?:\{[^}]*\})? (\S+)", re.M)


@dataclass(slots=True)
class Seen:
    """What the clients of one run saw, by kind."""

    ttfts_s: dict[str, list[float]] = field(default_factory=dict)
    failed: int = 0
    prefill_tokens: float = 0.0

    def ttft_s(self) -> list[float]:
        """TTFTs of everybody but the batch, which nobody waits for."""
        return [t for kind, ttfts in self.ttfts_s.items() if kind != "few_shot" for t in ttfts]

    def figures(self) -> dict[str, Any]:
        """Return the run's figures as plain values."""
        ttfts = self.ttft_s()
        return {
            "requests": sum(map(len, self.ttfts_s.values())),
            "failed": self.failed,
            "mean_ttft_s": round(fmean(ttfts), 4),
            "p95_ttft_s": round(quantiles(ttfts, n=20)[-1], 4),
            "prefill_tokens": round(self.prefill_tokens),
            "mean_ttft_by_kind_s": {k: round(fmean(v), 4) for k, v in self.ttfts_s.items() if v},
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def process(command: list[str], log: Path) -> AsyncIterator[None]:
    """Run a command until the block is left."""
    with log.open("ab") as out:
        child = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
        try:
            yield
        finally:
            if child.returncode is None:
                child.terminate()
            try:
                await asyncio.wait_for(child.wait(), 10)
            except TimeoutError:
                child.kill()
                await child.wait()


async def ready(url: str) -> None:
    """Wait until a URL answers 200."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(READY_DEADLINE_S):
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's addresses."""

    url: str
    events: str
    replay: str


def engine_command(options: argparse.Namespace, engine: Engine) -> list[str]:
    """Return the command of one engine, a timed mock or a bundled runner."""
    port = engine.url.rsplit(":", 1)[1]
    events = ["--kv-events", engine.events, "--kv-replay", engine.replay]
    if options.runners:
        return [
            *(sys.executable, "-m", "runner", "--model", options.tokenizer, "--port", port),
            *("--dtype", "bfloat16", "--threads", "1", "--served-model-name", "m"),
            *("--pool-tokens", str(options.pool_tokens or 16_384), *events),
        ]
    return [
        *(sys.executable, "-m", "bench.mock_engine", "--port", port, "--model", "m"),
        *("--tokenizer", options.tokenizer, "--block-size", "16"),
        *("--pool-tokens", str(options.pool_tokens or 120_000), *events),
        *("--slowdown", str(options.slowdown)),
    ]


def router_command(
    router: str, options: argparse.Namespace, engines: list[Engine], port: int, folder: Path
) -> list[str]:
    """Return the command of one router in front of the engines."""
    if router == "warmlane":
        workers = [
            {"id": f"w{i}", "url": e.url, "kv_events": e.events, "kv_replay": e.replay}
            for i, e in enumerate(engines)
        ]
        kind = "runner" if options.runners else "vllm"
        pool: dict[str, Any] = {"name": "p", "models": ["m"], "engine": kind, "workers": workers}
        pool["tokenizer"] = options.tokenizer
        server = {"host": "127.0.0.1", "port": port}
        config = folder / "warmlane.yaml"
        telemetry = {"log_level": "warning"}
        config.write_text(
            yaml.safe_dump({"server": server, "pools": [pool], "telemetry": telemetry})
        )
        return [sys.executable, "-m", "gateway", "serve", "--config", str(config)]
    policy = "cache_aware" if router == "sglang_cache_aware" else "round_robin"
    return [
        *(options.sglang, "-m", "sglang_router.launch_router", "--host", "127.0.0.1"),
        *("--port", str(port), "--policy", policy, "--log-level", "warn"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        *("--worker-urls", *(engine.url for engine in engines)),
    ]


async def ask_one(session: aiohttp.ClientSession, url: str, ask: Ask) -> tuple[float | None, str]:
    """Send one request; return its TTFT, None if it failed, and the answer."""
    body = {
        "model": "m",
        "messages": ask.messages,
        "max_tokens": ask.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    if ask.priority:
        body["priority"] = ask.priority
    started_s = time.monotonic()
    ttft_s, words = None, []
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                return None, ""
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                choices = json.loads(line[6:]).get("choices") or [{}]
                if word := choices[0].get("delta", {}).get("content"):
                    if ttft_s is None:
                        ttft_s = time.monotonic() - started_s
                    words.append(word)
    except (aiohttp.ClientError, TimeoutError):
        return None, ""
    return ttft_s, "".join(words)


async def client_loop(url: str, client: Conversation, seen: Seen, asks: int) -> None:
    """Ask, think and ask again, so many times or until nothing is left to ask."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.sleep(client.rng.uniform(0, START_S))
        for _ in range(asks):
            ask = client.next()
            if ask is None:
                return
            ttft_s, answer = await ask_one(session, url, ask)
            if ttft_s is None:
                seen.failed += 1
            else:
                seen.ttfts_s.setdefault(ask.kind, []).append(ttft_s)
            client.answered(answer)
            if ask.kind != "few_shot":
                await asyncio.sleep(client.rng.expovariate(1 / THINK_S))


async def prefill_tokens(engines: list[Engine]) -> float:
    """Return the prompt tokens that the engines computed, not found in their caches."""
    total = 0.0
    async with aiohttp.ClientSession() as session:
        for engine in engines:
            async with session.get(f"{engine.url}/metrics") as answer:
                for name, value in _PREFILL.findall(await answer.text()):
                    total += float(value) if name == "prompt_tokens" else -float(value)
    return total


async def run_once(router: str, options: argparse.Namespace, seed: int) -> Seen:
    """Run the workload through one router, everything from cold."""
    clients = RUNNER_CLIENTS if options.runners else CLIENTS
    workload = Workload(seed, RUNNER_SHAPE if options.runners else None)
    seen = Seen()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = []
        for i in range(options.runners or options.engines):
            engine = Engine(
                f"http://127.0.0.1:{free_port()}", f"ipc://{folder}/e{i}", f"ipc://{folder}/r{i}"
            )
            engines.append(engine)
            command = engine_command(options, engine)
            await stack.enter_async_context(process(command, folder / "engines.log"))
        for engine in engines:
            await ready(f"{engine.url}/health")
        port = free_port()
        command = router_command(router, options, engines, port, folder)
        await stack.enter_async_context(process(command, folder / "router.log"))
        url = f"http://127.0.0.1:{port}"
        await ready(f"{url}/health/ready" if router == "warmlane" else f"{url}/health")
        loops = [
            client_loop(
                url,
                workload.client(kind, number),
                seen,
                BATCH if kind == "few_shot" else options.asks,
            )
            for kind, number_of in clients.items()
            for number in range(number_of)
        ]
        await asyncio.gather(*loops)
        seen.prefill_tokens = await prefill_tokens(engines)
    return seen


async def run(options: argparse.Namespace) -> None:
    """Run all rounds and print a line per run and the ratios of the medians."""
    results: dict[str, list[dict[str, Any]]] = {router: [] for router in options.routers}
    for round_number in range(options.rounds):
        for router in options.routers:
            seen = await run_once(router, options, options.seed + round_number)
            results[router].append(seen.figures())
            print(json.dumps({"router": router, "round": round_number, **seen.figures()}))
            sys.stdout.flush()
    ours = results.get("warmlane")
    for router, runs in results.items():
        if not ours or router == "warmlane":
            continue
        ratios = {
            name: round(median(a[name] / b[name] for a, b in zip(ours, runs, strict=True)), 3)
            for name in ("mean_ttft_s", "p95_ttft_s", "prefill_tokens")
        }
        print(json.dumps({"warmlane_over": router, **ratios}))


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", required=True, help="model folder; the runners' weights")
    parser.add_argument("--sglang", required=True, help="python with sglang-router installed")
    parser.add_argument("--engines", type=int, default=8, help="timed mock engines")
    parser.add_argument("--runners", type=int, default=0, help="bundled runners instead")
    parser.add_argument("--pool-tokens", type=int, help="KV tokens of each engine")
    # One H100 would ask for more requests a second than one machine can play clients for.
    parser.add_argument("--slowdown", type=float, default=5.0, help="stretches the mocks' times")
    parser.add_argument("--asks", type=int, default=40, help="requests of each client")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
