"""The twelve names in a run that hits, evicts, restores and stalls, with a real runner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from runner.config import PoolSize, RunnerConfig
from runner.tiers.host import HostStore
from tests.deploy.toy_model import KV_BYTES_PER_TOKEN, write_toy_model
from tests.fakes.engine import RawEngine
from tests.gateway.tenancy_parts import CHAT, respond
from tests.live_runner import LiveRunner
from tests.support import poll_until
from tests.test_metrics_reference import TWELVE

# A prompt of about 500 tokens; two of them fill the pool, eight the memory beneath it.
POOL_TOKENS = 1536
HOST_BYTES = 4096 * KV_BYTES_PER_TOKEN
TEXT = "Rule {n} of the handbook: parcels of lane {n} leave the house at noon. "
SLOW_S = 0.05
NO_TIERS = {
    *("kv_cache_cpu_usage_bytes", "kv_cache_offload_read_latency"),
    *("kv_cache_offload_write_latency", "gpu_stall_due_to_kv_restore"),
}


@pytest.fixture(scope="module")
def toy(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy") / "model", smollm2_dir)


@pytest.fixture(scope="module")
def runner(toy: Path) -> Iterator[LiveRunner]:
    config = RunnerConfig(
        model=str(toy), port=0, pool=PoolSize(tokens=POOL_TOKENS), served_model_name="m",
        host_bytes=HOST_BYTES,
    )  # fmt: skip
    with LiveRunner.start(config) as live:
        yield live


@dataclass
class Both:
    """A gateway over a runner (``w0``) and an engine that reports as little as vLLM (``v0``)."""

    gateway: Gateway
    url: str
    runner_url: str
    session: aiohttp.ClientSession

    async def ask(self, number: int, model: str = "m") -> None:
        message = {"role": "user", "content": (TEXT.format(n=number) + "\n") * 24}
        body: dict[str, Any] = {
            "model": model, "messages": [message], "max_tokens": 2, "temperature": 0,
            "stream": model == "m", "ignore_eos": True,
        }  # fmt: skip
        async with self.session.post(self.url + CHAT, json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()

    async def read(self, worker: str = "w0") -> dict[str, float]:
        """What the gateway says of a worker, whose metrics it has just read."""
        await self.gateway.fleet.watches[worker]._scrape()
        return await self._names(f"{self.url}/metrics", f'scope="worker",worker="{worker}"')

    async def read_runner(self) -> dict[str, float]:
        return await self._names(f"{self.runner_url}/metrics", 'scope="worker"')

    async def read_fleet(self) -> dict[str, float]:
        return await self._names(f"{self.url}/metrics", 'scope="fleet"')

    async def _names(self, url: str, labels: str) -> dict[str, float]:
        async with self.session.get(url) as response:
            lines = (await response.text()).splitlines()
        samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {
            name: float(value)
            for series, _, value in samples
            if (name := series.partition("{")[0]) in TWELVE and labels in series
        }


@asynccontextmanager
async def both(runner: LiveRunner) -> AsyncIterator[Both]:
    async with RawEngine(respond) as plain, aiohttp.ClientSession() as session:
        pools = [
            {"name": "own", "models": ["m"], "engine": "runner",
             "workers": [{"id": "w0", "url": runner.url}]},
            {"name": "plain", "models": ["v"], "engine": "vllm",
             "workers": [{"id": "v0", "url": plain.url}]},
        ]  # fmt: skip
        settings, _ = load(None, flags={("pools",): pools}, environ={})
        gateway = Gateway(settings)
        await gateway.start()
        listener = await Listener.start(gateway.app, "127.0.0.1", 0)
        try:
            yield Both(gateway, f"http://127.0.0.1:{listener.port}", runner.url, session)
        finally:
            await listener.stop(0.0)
            await gateway.close()


async def test_each_name_moves_as_it_should(
    runner: LiveRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both(runner) as b:
        # Nothing yet: what cannot be known is absent.
        first = await b.read()
        assert not first.keys() & {
            *("prefix_cache_hit_rate", "ttft_avg", "ttft_p95", "ttft_p99"),
            *("kv_cache_offload_read_latency", "kv_cache_offload_write_latency"),
        }

        await b.ask(0)
        cold = await b.read()
        assert cold["prefix_cache_hit_rate"] == cold["prefix_cache_hit_tokens"] == 0
        assert cold["prefix_cache_miss_tokens"] > 400
        assert 0 < cold["ttft_avg"] <= cold["ttft_p99"] * 1.03
        assert cold["ttft_p95"] <= cold["ttft_p99"]
        assert cold["kv_cache_gpu_usage_bytes"] > first.get("kv_cache_gpu_usage_bytes", 0)

        await b.ask(0)
        warm = await b.read()
        assert warm["prefix_cache_hit_tokens"] > 400
        assert 0.4 < warm["prefix_cache_hit_rate"] < 0.6
        missed = warm["prefix_cache_miss_tokens"] - cold["prefix_cache_miss_tokens"]
        assert missed < 20
        assert warm["ttft_avg"] < cold["ttft_avg"], "a hit shortens the wait"

        for number in range(1, 5):
            await b.ask(number)
        evicted = await b.read()
        assert evicted["kv_cache_eviction_count"] > warm["kv_cache_eviction_count"]
        assert evicted["kv_cache_cpu_usage_bytes"] > 0
        assert evicted["kv_cache_offload_write_latency"] > 0
        assert evicted["prefix_cache_hit_rate"] < warm["prefix_cache_hit_rate"]

        await restored(b, 0)
        after = await b.read()
        assert after["kv_cache_offload_read_latency"] > 0
        assert after["prefix_cache_hit_tokens"] > evicted["prefix_cache_hit_tokens"] + 400

        read = HostStore.read

        def slow_read(self: HostStore, wanted: Any, deliver: Any, deadline_s: float) -> Any:
            time.sleep(SLOW_S)  # in the tier's own thread
            return read(self, wanted, deliver, deadline_s)

        monkeypatch.setattr(HostStore, "read", slow_read)
        for number in range(1, 4):
            await restored(b, number)
        slow = await b.read()
        assert slow["kv_cache_offload_read_latency"] > after["kv_cache_offload_read_latency"]
        assert slow["gpu_stall_due_to_kv_restore"] > after["gpu_stall_due_to_kv_restore"]
        assert slow["gpu_stall_due_to_kv_restore"] >= SLOW_S / 2

        # The runner says the same of itself, and the fleet is its workers together.
        own, fleet = await b.read_runner(), await b.read_fleet()
        assert own.keys() == TWELVE == slow.keys()
        for name in ("prefix_cache_hit_tokens", "kv_cache_eviction_count"):
            assert own[name] == slow[name] == fleet[name]
        # Means of workers are no mean of the fleet.
        assert fleet.keys() == TWELVE - {
            "kv_cache_offload_read_latency", "kv_cache_offload_write_latency"
        }  # fmt: skip


async def restored(b: Both, number: int) -> None:
    """Push a prompt out of the pool, and ask for it again."""
    for other in (number + 10, number + 20, number + 30):
        await b.ask(other)
    await b.ask(number)


async def test_what_an_engine_does_not_report_is_absent(runner: LiveRunner) -> None:
    async with both(runner) as b:
        await b.ask(0, model="v")
        await poll_until(lambda: "v0" in b.gateway.telemetry.workers)
        found = await b.read("v0")

    assert found.keys() == {
        "prefix_cache_hit_rate",
        "prefix_cache_hit_tokens",
        "prefix_cache_miss_tokens",
    }


def test_a_runner_without_lower_tiers_has_no_figures_of_them(toy: Path) -> None:
    config = RunnerConfig(model=str(toy), port=0, pool=PoolSize(tokens=256))
    with LiveRunner.start(config) as live:

        async def text() -> str:
            async with aiohttp.request("GET", f"{live.url}/metrics") as response:
                return await response.text()

        lines = asyncio.run(text()).splitlines()

    names = {line.partition("{")[0] for line in lines if not line.startswith("#")}
    assert not names & NO_TIERS
