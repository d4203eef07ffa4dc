"""Start and drain: readiness, running streams, new requests, signals, exit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import pytest

from tests.fakes.engine import DONE, FINISH, ROLE, End, RawEngine, content, stream
from tests.fakes.gateway import RawClient, chat, gateway, wire
from tests.support import poll_until

BODY = json.dumps(chat(stream=True)).encode()
PROGRAM = """
import asyncio, sys
from gateway.routing.dispatch import Dispatcher
from gateway.routing.pool import Pool
from gateway.proxy.server import make_app, serve
from tests.fakes.gateway import worker

pool = Pool("chat", models=["m"], workers=[worker("w0", sys.argv[1])])
app = make_app(Dispatcher([pool], seed=0), observe=lambda record: None)
ready = lambda port: print(port, flush=True)
asyncio.run(serve(app, "127.0.0.1", 0, drain_s=float(sys.argv[2]), ready=ready, front=sys.argv[3]))
print("ended", flush=True)
"""


class Process:
    """A gateway in its own process, for signals."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    @staticmethod
    async def start(url: str, drain_s: float, front: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, url, str(drain_s), front),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(20):
            return Process(process, int(await process.stdout.readline()))

    def terminate(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)

    async def ended(self) -> tuple[int | None, bytes]:
        async with asyncio.timeout(10):
            out, _ = await self.process.communicate()
        return self.process.returncode, out.splitlines()[-1]


async def streaming(port: int) -> RawClient:
    """A client whose stream has begun."""
    client = await RawClient.connect(port)
    await client.send(wire(BODY))
    await client.reader.readuntil(b"some")
    return client


async def test_sigterm_lets_a_stream_end_and_turns_new_requests_away(front: str) -> None:
    go_on = asyncio.Event()
    async with RawEngine(lambda _: stream(ROLE, content("some"), go_on, FINISH, DONE)) as engine:
        gw = await Process.start(engine.url, 20, front)
        client = await streaming(gw.port)
        gw.terminate()
        status = 200
        while status == 200:
            late = await RawClient.connect(gw.port)
            await late.send(b"GET /health/ready HTTP/1.1\r\nhost: gw\r\n\r\n")
            status, headers = await late.head()
            await late.close()
        refused = await RawClient.connect(gw.port)
        await refused.send(wire(BODY))
        refusal = await refused.head()
        await refused.close()
        go_on.set()
        rest = await client.rest()
        await client.close()
        ended = await gw.ended()

    assert (status, headers["connection"]) == (503, "close")
    assert refusal[0] == 503
    assert refusal[1]["connection"] == "close"
    assert int(refusal[1]["retry-after"]) >= 1
    assert DONE in rest
    assert ended == (0, b"ended")


@pytest.mark.parametrize("is_hurried", [False, True], ids=["drain time over", "second signal"])
async def test_what_still_runs_then_ends_in_an_error_event(is_hurried: bool, front: str) -> None:
    async with RawEngine(lambda _: stream(ROLE, content("some"), End.HANG)) as engine:
        gw = await Process.start(engine.url, 30 if is_hurried else 0.3, front)
        client = await streaming(gw.port)
        gw.terminate()
        if is_hurried:
            await asyncio.sleep(0.2)
            gw.terminate()
        async with asyncio.timeout(20):
            rest = await client.rest()
        await client.close()
        ended = await gw.ended()
        await poll_until(lambda: engine.num_aborted == 1)

    assert b'"code":"shutting_down"' in rest
    assert DONE not in rest
    assert rest.endswith(b"0\r\n\r\n")
    assert ended == (0, b"ended")


async def test_an_idle_gateway_ends_at_once(front: str) -> None:
    gw = await Process.start("http://127.0.0.1:9", 30, front)
    gw.terminate()

    assert await gw.ended() == (0, b"ended")


async def test_a_request_without_an_answer_gets_503_when_the_drain_time_is_over() -> None:
    async with RawEngine(lambda _: [End.HANG]) as engine, gateway(engine.url) as gw:
        waiting = asyncio.create_task(gw.post())
        await poll_until(lambda: len(engine.seen) == 1)
        await gw.listener.stop(0.1)
        status, body, response = await waiting
        record = await gw.record()

    assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
    assert response.headers["retry-after"] == "1"
    assert (record.outcome, record.status) == ("cancelled", 503)


async def test_an_address_in_use_is_an_error_and_leaves_nothing_running() -> None:
    async with gateway("http://127.0.0.1:9") as gw:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM.replace('"127.0.0.1", 0', f'"127.0.0.1", {gw.port}')),
            *("http://127.0.0.1:9", "1", "aiohttp"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await process.communicate()

    assert process.returncode == 1
    assert b"in use" in err
