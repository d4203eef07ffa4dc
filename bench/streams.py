"""Many open streams through one gateway: its memory, the delay it adds, and one slow reader.

An engine and the gateway run in processes of their own; this one is all clients. The engine writes
the time into each chunk (one clock for all processes), so that delays are those of single chunks:
straight from the engine, through a bare relay, and through the gateway. Then one client takes a
megabyte a second of a stream without end, while the gateway's memory is watched.

    python -m bench.streams --streams 2000 --chunks-per-s 5000 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from tests.support import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PADDING = "x" * 100
SLOW_BYTES_PER_S = 1 << 20
SLOW_S = 10.0
# Longer than the pieces of text that engines send, so that the slow reader's stream is a flood.
FLOOD = (
    b"data: " + json.dumps({"choices": [{"delta": {"content": "y" * 16_000}}]}).encode() + b"\n\n"
)
_SENT = re.compile(rb'"sent":(\d+)')


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    """Streams without end: a chunk every ``interval_s``, or as many as fit."""

    interval_s = 1.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.data = b""
        self.loop = asyncio.get_running_loop()
        self.is_flood = False
        self.is_full = False

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.data.startswith(b"GET"):
            self.data = b""
            body = b'{"object":"list","data":[]}'
            head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(head + body)
        elif self.data.endswith(b"}"):
            self.is_flood = b'"flood"' in self.data
            self.data = b""
            self.transport.write(HEAD)
            self.send()

    def send(self) -> None:
        if self.transport.is_closing():
            return
        if self.is_flood:
            while not self.is_full:
                self.transport.write(chunk(FLOOD))
            return
        text = json.dumps(
            {"choices": [{"delta": {"content": PADDING}}], "sent": time.monotonic_ns()},
            separators=(",", ":"),
        )
        self.transport.write(chunk(b"data: " + text.encode() + b"\n\n"))
        self.loop.call_later(self.interval_s, self.send)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if self.is_flood:
            self.send()


def run_engine(port: int, interval_s: float) -> None:
    Engine.interval_s = interval_s
    uvloop.run(serve(Engine, port))


def run_relay(port: int, target_port: int) -> None:
    Relay.target_port = target_port
    uvloop.run(serve(Relay, port))


async def serve(protocol: type[asyncio.Protocol], port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(protocol, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


class Relay(asyncio.Protocol):
    """What any process in between costs on this machine: bytes go from one socket to the other."""

    target_port = 0

    def __init__(self, other: Relay | None = None) -> None:
        self.other = other
        self.transport: Any = None
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        if self.other is None:
            loop = asyncio.get_running_loop()
            connecting = loop.create_connection(lambda: Relay(self), "127.0.0.1", Relay.target_port)
            self.connecting = loop.create_task(connecting)
        else:
            self.other.other = self
            self.transport.write(self.other.early)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.abort()


class Client(asyncio.Protocol):
    """Notes how late each chunk is, and how much its gap to the one before has changed."""

    delays_ms: list[float]
    changes_ms: list[float]

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.last: tuple[int, int] | None = None
        self.is_broken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        for match in _SENT.finditer(data):
            sent = int(match[1])
            Client.delays_ms.append((now - sent) / 1e6)
            if self.last is not None:
                Client.changes_ms.append(abs(now - self.last[0] - (sent - self.last[1])) / 1e6)
            self.last = now, sent

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_broken = True


def request(**fields: object) -> bytes:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "q"}], **fields}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: gw\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def load(port: int, streams: int, seconds: float, pid: int | None) -> dict[str, Any]:
    """Open the streams, let them run, and say how late their chunks were."""
    loop = asyncio.get_running_loop()
    Client.delays_ms, Client.changes_ms = [], []
    clients = []
    for i in range(streams):
        _, client = await loop.create_connection(
            partial(Client, request(user=str(i))), "127.0.0.1", port
        )
        clients.append(client)
        # Spread over the interval between two chunks, as streams in life are.
        await asyncio.sleep(2.0 / streams)
    await asyncio.sleep(2.0)
    Client.delays_ms, Client.changes_ms = [], []
    cpu_s, waited_s = cpu(pid), waited(pid)
    await asyncio.sleep(seconds)
    delays, changes = Client.delays_ms, Client.changes_ms
    broken = sum(client.is_broken for client in clients)
    found = {
        "streams": streams,
        "broken": broken,
        "chunks_per_s": round(len(delays) / seconds),
        "delay_ms": quantiles(delays),
        "gap_change_ms": quantiles(changes),
        "rss_mb": rss_mb(pid),
        "cpu_share": round((cpu(pid) - cpu_s) / seconds, 3),
        # Ready to run and not running, since others had the processors.
        "waiting_share": round((waited(pid) - waited_s) / seconds, 3),
    }
    for client in clients:
        client.transport.abort()
    await asyncio.sleep(1.0)
    return found


async def slow_reader(port: int, pid: int) -> dict[str, Any]:
    """Take a stream without end at a megabyte a second; what memory it costs the gateway."""
    before_mb = rss_mb(pid)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=SLOW_BYTES_PER_S // 16)
    writer.write(request(user="flood"))
    begin_s, got, most_mb = time.monotonic(), 0, 0.0
    while (now_s := time.monotonic()) < begin_s + SLOW_S:
        while got < (now_s - begin_s) * SLOW_BYTES_PER_S:
            got += len(await reader.read(SLOW_BYTES_PER_S // 20))
        most_mb = max(most_mb, rss_mb(pid) or 0.0)
        await asyncio.sleep(0.05)
    writer.transport.abort()
    assert before_mb is not None
    return {
        "mb_per_s": round(got / SLOW_S / (1 << 20), 2),
        "rss_growth_mb": round(most_mb - before_mb, 2),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=1000)
    return {"p50": round(cuts[499], 2), "p99": round(cuts[989], 2), "p99.9": round(cuts[998], 2)}


def rss_mb(pid: int | None) -> float | None:
    if pid is None:
        return None
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return round(int(match[1]) / 1024, 1)


def cpu(pid: int | None) -> float:
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def waited(pid: int | None) -> float:
    return 0.0 if pid is None else int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


@contextlib.contextmanager
def running(target: Callable[..., None], *args: object) -> Iterator[int | None]:
    process = multiprocessing.Process(target=target, args=args, daemon=True)
    process.start()
    try:
        yield process.pid
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def gateway(port: int, engine_port: int, front: str) -> Iterator[int]:
    """Run the whole product in front of the engine; yields its process id."""
    config = {
        "server": {"host": "127.0.0.1", "port": port, "front": front},
        "routing": {"max_wait_s": 3600},
        "pools": [
            {
                "name": "chat",
                "models": ["m"],
                "workers": [{"id": "w0", "url": f"http://127.0.0.1:{engine_port}"}],
                "admission": {"max_queue": 100_000, "deadline_s": 600},
            }
        ],
        "telemetry": {"log_level": "warning"},
    }
    path = Path(f"/tmp/streams-{port}.json")  # noqa: S108  # gone when the run is
    path.write_text(json.dumps(config))
    process = subprocess.Popen([sys.executable, "-m", "gateway", "serve", "--config", str(path)])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        path.unlink()


async def wait_for(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.abort()
            return
        await asyncio.sleep(0.1)
    raise SystemExit("the gateway did not start")


async def run(args: argparse.Namespace) -> dict[str, Any]:
    port, engine_port = free_port(), free_port()
    found: dict[str, Any] = {}
    relay_port = free_port()
    with running(run_engine, engine_port, args.streams / args.chunks_per_s):
        await wait_for(engine_port)
        with running(run_relay, relay_port, engine_port) as relay_pid:
            await wait_for(relay_port)
            found["relay"] = await load(relay_port, args.streams, args.seconds, relay_pid)
        with gateway(port, engine_port, args.front) as pid:
            await wait_for(port)
            await asyncio.sleep(1.0)
            found["gateway"] = await load(port, args.streams, args.seconds, pid)
            found["slow_reader"] = await slow_reader(port, pid)
        found["direct"] = await load(engine_port, args.streams, args.seconds, None)
    p99_ms = {name: found[name]["delay_ms"]["p99"] for name in ("direct", "relay", "gateway")}
    found["added_p99_ms"] = round(p99_ms["gateway"] - p99_ms["direct"], 2)
    found["added_p99_to_relay_ms"] = round(p99_ms["gateway"] - p99_ms["relay"], 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--chunks-per-s", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--front", choices=("raw", "aiohttp"), default="raw")
    print(json.dumps(uvloop.run(run(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
