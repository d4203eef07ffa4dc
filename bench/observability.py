"""CPU per request of a gateway with everything on that observes it, against one with nothing on.

On: metrics (scraped every 15 s), usage, the console's decisions, the request log, traces of 1 %
to a collector. Off: the same gateway with its onlookers taken out; what routing itself learns from
finished requests stays. Each part alone is measured beside them. The gateways run in turns on
CPU 0, those not measured are stopped; engines, collector and clients are one process on CPU 1. What
is quoted is each gateway's own CPU clock per request, and the ratio to the one that is off in the
same round: wall time belongs to whoever else uses the machine.

With ``--collector`` the time to answer is compared instead, for a collector that is away, one that
never answers, and none.

    python -m bench.observability --tokenizer models/smollm2 --rounds 9
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.fleet import free_port

ROOT = Path(__file__).parents[1]
NUM_ENGINES = 4
CLIENTS = 16
STREAM_EVENTS = 20
EVENT_EVERY_S = 0.005
# Probes, lost ticks and connections that were closed meanwhile.
RESUME_S = 0.1
WARM_REQUESTS = 400
# Prometheus' usual interval, in seconds of load.
SCRAPE_EVERY_S = 15.0
# A turn is short, so that all gateways meet the same moments of the machine.
TURNS, TURN_REQUESTS = 10, 20
# The gateway as its command line runs it, without the onlookers that are not named.
BOOT = """
import asyncio, sys
kept = sys.argv.pop(1).split(",")
from gateway.observing import Observing
from gateway.onlookers import Onlookers
from gateway.telemetry.requests import Telemetry
from gateway.usage.usage import Usage
from gateway.console.decisions import Decisions
if "metrics" not in kept:
    Telemetry.observe = Usage.observe = Usage.finished = lambda *_: None
    Decisions.add = lambda *_: None
    if "log" not in kept:
        Onlookers.observe = lambda self, record: self._parts.fleet.observe(record)
    async def idle(self):
        await asyncio.Event().wait()
    Observing.run = idle
from gateway.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
PARTS = {
    "off": "none",
    "metrics": "metrics",
    "log": "log",
    "traces": "traces",
    "all": "metrics,log,traces",
}
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
USAGE = {
    "prompt_tokens": 300,
    "completion_tokens": STREAM_EVENTS,
    "prompt_tokens_details": {"cached_tokens": 256},
}


class Engine(asyncio.Protocol):
    """Answers whatever it is asked; chats with words, collectors' requests with 200."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end]
            found = LENGTH.search(head)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._data) < size:
                return
            body, self._data = self._data[end + 4 : size], self._data[size:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST /v1/chat"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        elif b'"stream":true' in body:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._event(0)
        else:
            self._transport.write(WHOLE)

    def _event(self, number: int) -> None:
        if number < STREAM_EVENTS:
            self._transport.write(WORD)
            asyncio.get_running_loop().call_later(EVENT_EVERY_S, self._event, number + 1)
        else:
            self._transport.write(LAST)


def chunk(document: Any) -> bytes:
    data = b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def choice(finish: str | None, **more: Any) -> dict[str, Any]:
    part = {"index": 0, "finish_reason": finish, **more}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [part]}


WORD = chunk(choice(None, delta={"content": "word "}))
LAST = (
    chunk(choice("stop", delta={}))
    + chunk({"id": "chatcmpl-1", "choices": [], "usage": USAGE})
    + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
_DOCUMENT = json.dumps(choice("stop", message={"content": "word " * 20}) | {"usage": USAGE})
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(_DOCUMENT),
    _DOCUMENT.encode(),
)


@dataclass
class Gateway:
    """One variant's process, and CPU per request in microseconds of each round by scenario."""

    name: str
    port: int
    process: asyncio.subprocess.Process
    rounds: dict[str, list[float]] = field(default_factory=dict)
    unscraped_s: float = 0.0
    times_s: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        # Linux: the clock id of another process's CPU time.
        return time.clock_gettime((~self.process.pid << 3) | 2)


def bodies(*, stream: bool) -> list[bytes]:
    """Return chats of about 1 KB, as many as a busy minute has different ones."""
    rng = random.Random(1)
    words = ("the", "lane", "keeps", "a", "prompt", "warm", "where", "its", "blocks", "are")
    texts = (" ".join(rng.choices(words, k=180)) for _ in range(64))
    return [
        json.dumps(
            {"model": "m", "stream": stream, "messages": [{"role": "user", "content": text}]},
            separators=(",", ":"),
        ).encode()
        for text in texts
    ]


async def client(port: int, bodies: list[bytes], until: Any, times_s: list[float]) -> int:
    """Send one after the other until ``until`` says no; return how many."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: gw\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer sk-x\r\ncontent-length: %d\r\n\r\n"
    )
    done = 0
    while until():
        body = random.choice(bodies)
        begun_s = time.perf_counter()
        writer.write(head % len(body) + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a bad answer: {answer!r}")
        found = LENGTH.search(answer)
        if found:
            await reader.readexactly(int(found[1]))
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        times_s.append(time.perf_counter() - begun_s)
        done += 1
    writer.close()
    return done


async def load(gateway: Gateway, sent: list[bytes], seconds: float, clients: int) -> int:
    end_s = time.monotonic() + seconds
    times_s: list[float] = []
    counts = await asyncio.gather(
        *(
            client(gateway.port, sent, lambda: time.monotonic() < end_s, times_s)
            for _ in range(clients)
        )
    )
    gateway.times_s += times_s
    return sum(counts)


async def get(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: gw\r\nconnection: close\r\n\r\n".encode())
    said = await reader.read()
    writer.close()
    return said


async def start(
    stack: AsyncExitStack, folder: Path, name: str, parts: str, engines: list[int], collector: str
) -> Gateway:
    port = free_port()
    workers = [{"id": f"m{k}", "url": f"http://127.0.0.1:{p}"} for k, p in enumerate(engines)]
    telemetry: dict[str, Any] = {"log_level": "info" if "log" in parts else "warning"}
    if "traces" in parts:
        telemetry["otlp_endpoint"] = collector
    pool = {
        "name": "chat",
        "models": ["m"],
        "engine": "openai",
        "tokenizer": str(folder / "tokenizer"),
        "capacity_tokens": 400_000,
        "workers": workers,
    }
    server = {"host": "127.0.0.1", "port": port}
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump({"server": server, "pools": [pool], "telemetry": telemetry}))
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    command = ["taskset", "-c", "0", sys.executable, "-c", BOOT, parts, "serve", "--config"]
    process = await asyncio.create_subprocess_exec(
        *command, str(config), stdout=log, stderr=log, cwd=ROOT
    )
    gateway = Gateway(name, port, process)

    def end() -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            if process.returncode is None:
                os.kill(process.pid, number)

    stack.callback(end)
    deadline_s = time.monotonic() + 120
    while True:
        try:
            if b" 200 " in (await get(port, "/health/ready"))[:20]:
                return gateway
        except OSError:
            pass
        if time.monotonic() > deadline_s or process.returncode is not None:
            raise SystemExit((folder / f"{name}.log").read_text())
        await asyncio.sleep(0.2)


def report(found: list[Gateway], scenarios: list[str]) -> None:
    off = found[0]
    print("| CPU us per request | " + " | ".join(g.name for g in found) + " |")
    print("|---" * (len(found) + 1) + "|")
    for scenario in scenarios:
        cells = []
        for gateway in found:
            values = gateway.rounds[scenario]
            pairs = zip(values, off.rounds[scenario], strict=True)
            ratios = sorted(mine / its for mine, its in pairs)
            cells.append(
                f"{statistics.median(values):.1f} x {statistics.median(ratios):.3f} "
                f"[{ratios[0]:.2f} to {ratios[-1]:.2f}]"
            )
        print(f"| {scenario} | " + " | ".join(cells) + " |", flush=True)


async def cpu(options: argparse.Namespace, found: list[Gateway]) -> None:
    """Measure all gateways in turns."""
    scenarios = {"1 KB, whole": False, f"1 KB, {STREAM_EVENTS} events": True}
    for gateway in found:
        for stream in scenarios.values():
            sent = bodies(stream=stream)
            os.kill(gateway.process.pid, signal.SIGCONT)
            done = 0
            while done < WARM_REQUESTS:
                done += await load(gateway, sent, 0.5, CLIENTS)
        os.kill(gateway.process.pid, signal.SIGSTOP)
    for _ in range(options.rounds):
        for scenario, stream in scenarios.items():
            sent = bodies(stream=stream)
            spent = {gateway.name: [0.0, 0] for gateway in found}
            for _turn in range(TURNS):
                for gateway in random.sample(found, len(found)):
                    os.kill(gateway.process.pid, signal.SIGCONT)
                    await asyncio.sleep(RESUME_S)
                    begun_s = gateway.cpu_s()
                    done = await load(gateway, sent, options.seconds / TURNS, CLIENTS)
                    gateway.unscraped_s += options.seconds / TURNS
                    if "metrics" in PARTS[gateway.name] and gateway.unscraped_s >= SCRAPE_EVERY_S:
                        gateway.unscraped_s = 0.0
                        await get(gateway.port, "/metrics")
                    spent[gateway.name][0] += gateway.cpu_s() - begun_s
                    spent[gateway.name][1] += done
                    os.kill(gateway.process.pid, signal.SIGSTOP)
            for gateway in found:
                used_s, done = spent[gateway.name]
                gateway.rounds.setdefault(scenario, []).append(used_s / done * 1e6)
    report(found, list(scenarios))


async def collectors(options: argparse.Namespace, found: list[Gateway]) -> None:
    """Compare the time to answer of gateways whose collectors behave differently."""
    sent = bodies(stream=False)
    for gateway in found:
        await load(gateway, sent, 1.0, 1)
        gateway.times_s.clear()
    for _ in range(options.rounds * TURNS):
        for gateway in random.sample(found, len(found)):
            more = partial(next, itertools.repeat(True, TURN_REQUESTS), False)
            await client(gateway.port, sent, more, gateway.times_s)
    for gateway in found:
        times = sorted(gateway.times_s)
        p50, p99 = (times[int(len(times) * share)] * 1e3 for share in (0.5, 0.99))
        print(f"{gateway.name}: {len(times)} requests, p50 {p50:.2f} ms, p99 {p99:.2f} ms")


async def run(options: argparse.Namespace) -> None:
    os.sched_setaffinity(0, {1})
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "tokenizer").symlink_to(ROOT / options.tokenizer)
        ports = []
        for _ in range(NUM_ENGINES):
            server = await loop.create_server(Engine, "127.0.0.1", 0)
            ports.append(server.sockets[0].getsockname()[1])
        silent = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        endpoints = {
            "away": f"http://127.0.0.1:{free_port()}",
            "silent": f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}",
        }
        collector = f"http://127.0.0.1:{ports[0]}"
        found = []
        if options.collector:
            found.append(await start(stack, folder, "none", "metrics,log", ports, ""))
            for name, url in endpoints.items():
                found.append(await start(stack, folder, name, PARTS["all"], ports, url))
            await collectors(options, found)
            return
        for name in options.only:
            gateway = await start(stack, folder, name, PARTS[name], ports, collector)
            found.append(gateway)
        await cpu(options, found)


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--tokenizer", default="models/smollm2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--collector", action="store_true", help="compare times to answer instead")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
