"""Metrics of several processes on one port: killed ones, restarts, exemplars, one scrape's time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gateway.reload.reloader import ConfigFile
from gateway.settings import load
from gateway.supervisor import child, supervisor
from gateway.supervisor.exposition import SHARED_COUNTERS, accumulate, merge, parse, rendering
from gateway.supervisor.supervisor import Supervisor
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.requests import Telemetry
from tests.support import free_port, poll_until

PROCESSES = 4
# Fifty kills and two.
ROUNDS = 13
# A process as the supervisor sees it, up in a tenth of the real one's time: it counts ten requests
# between two scrapes, has one in flight, and says so on its socket.
COMMAND = (
    sys.executable,
    "-c",
    """
import asyncio, json, sys
role = json.loads(sys.stdin.readline())
count = 0
async def serve(reader, writer):
    global count
    while head := await reader.readuntil(b"\\r\\n\\r\\n"):
        if b"/metrics" in head:
            count += 10
            body = (
                "# TYPE warmlane_requests counter\\n"
                f'warmlane_requests_total{{pool="p"}} {count}\\n'
                "# TYPE warmlane_in_flight_requests gauge\\n"
                'warmlane_in_flight_requests{pool="p"} 1\\n# EOF\\n'
            )
        else:
            body = json.dumps({"at_s": 0, "fleet": [[0, 0, {}], 0, 0], "workers": {}})
        answer = f"HTTP/1.1 200 OK\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n{body}"
        writer.write(answer.encode())
async def main():
    await asyncio.start_unix_server(serve, role["socket"])
    print(json.dumps({"ready": 1}), flush=True)
    await asyncio.Event().wait()
import os
if os.path.exists(role["socket"]):
    os.unlink(role["socket"])
asyncio.run(main())
""",
)


@dataclass
class Running:
    """A supervisor in this process."""

    supervisor: Supervisor
    url: str

    async def scrape(self) -> dict[str, float]:
        async with aiohttp.request("GET", self.url) as response:
            text = await response.text()
        samples = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
        return {name.partition("{")[0]: float(value) for name, _, value in samples}

    @property
    def num_ready(self) -> int:
        return sum(one.is_ready for one in self.supervisor.children)


@asynccontextmanager
async def supervised() -> AsyncIterator[Running]:
    port = free_port()
    config: dict[Any, Any] = {
        ("server",): {
            "host": "127.0.0.1", "port": free_port(), "admin_port": port, "processes": PROCESSES,
            "drain_s": 1,
        },
        ("index",): {"backend": "redis", "url": "redis://127.0.0.1:1"},
        ("pools",): [
            {"name": "p", "models": ["m"], "workers": [{"id": "w", "url": "http://127.0.0.1:1"}]}
        ],
    }  # fmt: skip
    settings, _ = load(None, flags=config, environ={})
    made = Supervisor(settings, file=ConfigFile(None, config), command=COMMAND)
    task = asyncio.create_task(made.run())
    running = Running(made, f"http://127.0.0.1:{port}/metrics")
    try:
        await poll_until(lambda: running.num_ready == PROCESSES, deadline_s=30)
        yield running
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await task == 0


# D09
async def test_fifty_kills_set_no_counter_back_and_a_restart_begins_from_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(child, "MAX_BACKOFF_S", 0.01)
    # Only what is scraped here counts.
    monkeypatch.setattr(supervisor, "SCRAPE_EVERY_S", 3600.0)
    async with supervised() as running:
        children = running.supervisor.children
        folder = Path(children[0].role.socket).parent
        num_files = len(list(folder.iterdir()))
        last = await running.scrape()
        for number in range(1, ROUNDS + 1):
            for victim in children:
                assert victim.pid is not None
                os.kill(victim.pid, signal.SIGKILL)
            # Scraped while they die, are away, and come back.
            while any(one.num_restarts < number or not one.is_ready for one in children):
                found = await running.scrape()
                assert found["warmlane_requests_total"] >= last["warmlane_requests_total"]
                assert found.get("warmlane_in_flight_requests", 0) <= PROCESSES
                last = found
        await poll_until(lambda: running.num_ready == PROCESSES)
        found = await running.scrape()

        assert found["warmlane_in_flight_requests"] == PROCESSES
        assert found["warmlane_processes"] == PROCESSES
        assert found["warmlane_process_restarts_total"] == PROCESSES * ROUNDS
        # Ten by each process that answered each of the scrapes: none was lost, none came twice.
        assert found["warmlane_requests_total"] % 10 == 0
        assert len(list(folder.iterdir())) == num_files
        highest = found["warmlane_requests_total"]
    assert not folder.exists()

    async with supervised() as running:
        again = await running.scrape()
    assert again["warmlane_requests_total"] == 10 * PROCESSES < highest


async def test_what_a_process_said_that_died_meanwhile_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer to a scrape comes, and its process is gone before it is read."""
    monkeypatch.setattr(supervisor, "SCRAPE_EVERY_S", 3600.0)

    async def killed_meanwhile(steps: Any) -> list[Any]:
        victim = running.supervisor.children[0]
        if victim.pid is not None and victim.num_restarts == 0:
            os.kill(victim.pid, signal.SIGKILL)
            await poll_until(lambda: victim.snapshot is None)
        return list(steps)

    async with supervised() as running:
        first = await running.scrape()
        monkeypatch.setattr(child, "in_slices", killed_meanwhile)
        await running.supervisor.children[0].scrape()
        assert running.supervisor.children[0].snapshot is None
        monkeypatch.undo()
        await poll_until(lambda: running.num_ready == PROCESSES)
        second = await running.scrape()

    gained = second["warmlane_requests_total"] - first["warmlane_requests_total"]
    assert gained == 10 * PROCESSES, "what the dead one said last was never shown"


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(names, names, st.floats(0.001, 900.0)), min_size=1, max_size=8))
def test_odd_label_values_and_exemplars_come_through_a_merge(
    seen: list[tuple[str, str, float]],
) -> None:
    processes = [Telemetry(clock=lambda: 5.0) for _ in range(2)]
    for number, (pool, worker, ttft_s) in enumerate(seen):
        record = RequestRecord(
            "r", "chat", pool=pool, worker=f"w{worker}", outcome="ok", reason='a # {b="c"} 1',
            ttft_s=ttft_s, trace_id=f"{number:032x}",
        )  # fmt: skip
        processes[number % 2].observe(record)

    texts = [process.render(open_metrics=True).decode() for process in processes]
    merged = merge([parse(text) for text in texts], {})
    text = "".join(rendering(merged, open_metrics=True)) + "# EOF\n"

    counted, traced = 0.0, set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "warmlane_ttft_seconds_count":
                counted += sample.value
            if sample.exemplar and family.name == "warmlane_ttft_seconds":
                traced.add(sample.exemplar.labels["trace_id"])
    assert counted == len(seen)
    assert traced
    assert traced <= {f"{number:032x}" for number in range(len(seen))}


def test_both_formats_are_read_alike() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(RequestRecord("r", "chat", pool="p", worker="w", outcome="ok", ttft_s=1.0))
    plain, opened = (
        parse(telemetry.render(open_metrics=is_open).decode()) for is_open in (False, True)
    )

    assert plain.keys() == opened.keys()
    for name, family in plain.items():
        if not name.startswith("process_"):
            other = opened[name]
            assert (family.text, family.kind) == (other.text, other.kind)
            assert family.series == other.series


@pytest.mark.parametrize("name", sorted(SHARED_COUNTERS))
def test_a_workers_own_count_is_not_added_up(name: str) -> None:
    text = f'# TYPE {name} counter\n{name}{{pool="p",worker="w"}} 7\n'
    living, ended = [parse(text), parse(text)], parse("")

    accumulate(ended, parse(text))
    [value] = merge(living, ended)[name].series.values()
    assert value == 7
