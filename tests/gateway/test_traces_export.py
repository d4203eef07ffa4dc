"""Collectors that are away, silent, refusing or hostile, which no request may notice. D13."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import yaml

import gateway.tracing.export as export_module
from gateway.tracing.export import Export, traces_url
from tests.fakes.collector import Collector
from tests.fakes.engine import openai_engine
from tests.gateway.tenancy_parts import CHAT, asking, serving
from tests.gateway.trace_parts import tracing
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["valkey"]

# A gateway's process with nothing to do has this long to end.
STOP_S = 3.0


class Silent:
    """Takes connections and what comes, and says what it was given to say, if anything.

    Attributes:
        num_connections: That it was sent.
    """

    def __init__(self, said: bytes = b"", *, for_ever: bytes = b"") -> None:
        self.num_connections = 0
        self._said = said
        self._for_ever = for_ever
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Silent:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._said:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self._said)
            while self._for_ever:
                writer.write(self._for_ever)
                await writer.drain()
            await asyncio.Event().wait()
        except ConnectionError:
            pass  # the exporter has heard enough
        finally:
            writer.transport.abort()


def answered(status: int, *lines: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status} Some", *lines, "", ""])
    return head.encode()


HOSTILE = {
    "silent": Silent,
    "says half a head": lambda: Silent(b"HTTP/1.1 200 O"),
    "is no HTTP": lambda: Silent(b"220 mail.example ESMTP\r\n\r\n"),
    "an answer without end": lambda: Silent(
        answered(200, "content-length: 99999999999"), for_ever=b"x" * 65536
    ),
    "a head without end": lambda: Silent(b"HTTP/1.1 200 OK\r\n", for_ever=b"x-y: z\r\n" * 1000),
    "busy for an hour": lambda: Silent(answered(503, "retry-after: 3600", "content-length: 0")),
    "busy": lambda: Silent(answered(429, "content-length: 0")),
    "refuses": lambda: Silent(answered(400, "content-length: 0")),
    "sends elsewhere": lambda: Silent(
        answered(307, "location: http://127.0.0.1:1/v1/traces", "content-length: 0")
    ),
}


@asynccontextmanager
async def endpoint(kind: str) -> AsyncIterator[str]:
    if kind == "away":
        yield f"http://127.0.0.1:{free_port()}"
    else:
        async with HOSTILE[kind]() as collector:
            yield collector.url


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues and delays short enough for a test."""
    monkeypatch.setattr(export_module, "MAX_WAITING_SPANS", 60)
    monkeypatch.setattr(export_module, "_BATCH_SPANS", 20)
    monkeypatch.setattr(export_module, "_EVERY_S", 0.05)


def samples(exposition: bytes) -> dict[str, float]:
    """Return ``warmlane_spans_total`` by result."""
    lines = [
        line
        for line in exposition.decode().splitlines()
        if line.startswith("warmlane_spans_total{")
    ]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


@pytest.mark.parametrize("kind", ["away", *HOSTILE])
@pytest.mark.usefixtures("small")
async def test_d13_no_request_notices_what_its_collector_does(kind: str) -> None:
    async with endpoint(kind) as url, openai_engine() as engine:
        told = {"otlp_endpoint": url, "trace_sample": 1.0}
        async with serving(engine, telemetry=told) as gw:
            statuses = [(await gw.post(CHAT, asking()))[0] for _ in range(200)]
            exporting = gw.gateway.observing.tracing
            assert exporting is not None
            export: Any = exporting.export
            counts = samples(gw.gateway.telemetry.render())
            begun_s = time.monotonic()
        stop_s = time.monotonic() - begun_s

    assert statuses == [200] * 200
    # Spans are made whole requests at a time.
    assert export.num_waiting < 60 + 3
    assert counts["dropped"] + export.exported + export.failed + export.num_waiting == 600
    # What is behind the status of an answer is nobody's business.
    assert (counts["exported"] > 0) == (kind == "an answer without end")
    assert stop_s < STOP_S


@pytest.mark.usefixtures("small")
async def test_d13_spans_flow_again_once_the_collector_is_back() -> None:
    async with openai_engine() as engine, tracing(engine) as traced:
        traced.collector.status = 400
        await traced.gw.post(CHAT, asking())
        await poll_until(lambda: len(traced.collector.requests) > 0, what="a refused batch")
        traced.collector.status = 200
        await traced.gw.post(CHAT, asking())
        await poll_until(lambda: len(traced.spans) == 3, what="the next batch")
        counts = samples(traced.gw.gateway.telemetry.render())

    assert counts == {"exported": 3, "dropped": 0, "failed": 3}


async def test_without_a_collector_there_is_no_series_and_no_thread() -> None:
    async with openai_engine() as engine, serving(engine) as gw:
        assert gw.gateway.observing.tracing is None
        assert samples(gw.gateway.telemetry.render()) == {}


@pytest.mark.usefixtures("small")
async def test_failures_are_told_once_a_minute_without_a_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=CANARY-HEADER")
    now_s = 100.0
    url = f"http://user:CANARY-PASS@127.0.0.1:{free_port()}/CANARY-PATH?key=CANARY-QUERY"
    monkeypatch.setattr(
        export_module.OTLPSpanExporter,
        "export",
        lambda *_: (_ for _ in ()).throw(RuntimeError("CANARY-ERROR")),
    )
    export = Export(url, clock=lambda: now_s)
    with structlog.testing.capture_logs() as logs:
        for number in range(1, 200):
            export._counted.export([object()])  # type: ignore[list-item]
            if number == 100:
                now_s += export_module.WARN_EVERY_S
        await export.close()

    assert [(line["event"], line["collector"], line["spans"]) for line in logs] == [
        ("traces_not_taken", "127.0.0.1", 1),
        ("traces_not_taken", "127.0.0.1", 100),
    ]
    said = capfd.readouterr()
    assert "CANARY" not in said.out + said.err + json.dumps(logs)


@pytest.mark.usefixtures("small")
async def test_the_librarys_own_failures_stay_out_of_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with openai_engine() as engine:
        told = {"otlp_endpoint": f"http://127.0.0.1:{free_port()}", "trace_sample": 1.0}
        async with serving(engine, telemetry=told) as gw:
            export: Any = gw.gateway.observing.tracing.export  # type: ignore[union-attr]
            for _ in range(100):
                await gw.post(CHAT, asking())
    said = capfd.readouterr()

    assert said.out.count("traces_not_taken") + said.err.count("traces_not_taken") <= 1
    assert export.exported == 0
    for word in ("Transient error", "Failed to export", "Queue full", "Traceback"):
        assert word not in said.out + said.err


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces/", "http://c:4318/v1/traces"),
        ("https://c/otlp", "https://c/otlp/v1/traces"),
        ("https://u:p@[::1]:1/x/?k=v", "https://u:p@[::1]:1/x/v1/traces?k=v"),
    ],
)
def test_an_endpoint_may_be_the_collectors_or_that_of_its_traces(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


# Whole processes.


@asynccontextmanager
async def process(
    folder: Path, engine_url: str, **config: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run ``warmlane serve`` until it is ready; yields the process and its URL."""
    port = free_port()
    pool = {
        "name": "chat",
        "models": ["m"],
        "engine": "vllm",
        "workers": [{"id": "w0", "url": engine_url}],
    }
    server = {"host": "127.0.0.1", "port": port} | config.pop("server", {})
    document = {"server": server, "pools": [pool], **config}
    (folder / "warmlane.yaml").write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(folder / "warmlane.yaml")]
    with (folder / "log").open("wb") as log:
        running = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:

        def ready() -> bool:
            assert running.returncode is None, (folder / "log").read_text()
            return b'"ready"' in (folder / "log").read_bytes()

        await poll_until(ready, deadline_s=30, what="the gateway is ready")
        yield running, f"http://127.0.0.1:{port}"
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


async def ask(url: str, times: int) -> list[int]:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        statuses = []
        for _ in range(times):
            async with session.post(url + CHAT, json=asking()) as response:
                await response.read()
                statuses.append(response.status)
        return statuses


@pytest.mark.parametrize("kind", ["away", "silent"])
async def test_d13_a_process_ends_at_once_whatever_its_collector_does(
    kind: str, tmp_path: Path
) -> None:
    async with endpoint(kind) as url, openai_engine() as engine:
        telemetry = {"otlp_endpoint": url, "trace_sample": 1.0}
        async with process(tmp_path, engine.url, telemetry=telemetry) as (running, own_url):
            statuses = await ask(own_url, 20)
            running.send_signal(signal.SIGTERM)
            async with asyncio.timeout(STOP_S):
                code = await running.wait()

    assert (statuses, code) == ([200] * 20, 0)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert all(json.loads(line) for line in log.splitlines())


async def test_each_of_several_processes_exports_its_own(tmp_path: Path, valkey: Valkey) -> None:
    async with (
        Collector() as collector,
        openai_engine() as engine,
        process(
            tmp_path,
            engine.url,
            server={"processes": 2},
            index={"backend": "redis", "url": valkey.url},
            telemetry={"otlp_endpoint": collector.url, "trace_sample": 1.0},
        ) as (running, own_url),
    ):

        async def both_have_answered() -> bool:
            assert await ask(own_url, 1) == [200]
            return len({span.resource["service.instance.id"] for span in collector.spans}) == 2

        await poll_until(both_have_answered, deadline_s=20, what="spans of both processes")
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0
    ids = [span.span_id for span in collector.spans]

    assert len(ids) == len(set(ids))
    assert all(span.resource["service.name"] == "warmlane" for span in collector.spans)
