"""Warm-up of two bundled runners with real weights: tokens, hits and events are theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.proxy.server import Listener
from gateway.serve import Gateway
from gateway.settings import load
from runner.config import PoolSize, RunnerConfig
from tests.gateway.warm_parts import Warming, asking, end, item, of, text_of
from tests.live_runner import LiveRunner
from tests.support import poll_until

# Real weights on a busy box: what is computed in a second takes minutes.
pytestmark = pytest.mark.timeout(300)
CHARS = 1200


@pytest.fixture(scope="module")
def runners(smollm2_dir: Path) -> Iterator[list[LiveRunner]]:
    """Two runners, 4,096 tokens of KV each, with events."""
    config = RunnerConfig(
        model=str(smollm2_dir),
        port=0,
        pool=PoolSize(tokens=4096),
        kv_events="tcp://127.0.0.1:0",
        kv_replay="tcp://127.0.0.1:0",
        served_model_name="m",
    )
    with LiveRunner.start(config) as first, LiveRunner.start(config) as second:
        yield [first, second]


@asynccontextmanager
async def over(runners: list[LiveRunner], **pool: Any) -> AsyncIterator[Warming]:
    """Serve over the runners, once their prompts are read and their events are followed."""
    workers = [{"id": f"w{k}", "url": live.url} for k, live in enumerate(runners)]
    config = {"name": "chat", "models": ["m"], "engine": "runner", "workers": workers} | pool
    settings, _ = load(None, flags={("pools",): [config]}, environ={})
    async with aiohttp.ClientSession() as session:
        for live in runners:
            async with session.post(live.url + "/reset_prefix_cache") as response:
                assert response.status == 200
        gateway = Gateway(settings)
        await gateway.start()
        listener = await Listener.start(gateway.app, "127.0.0.1", 0)
        try:
            fleet = gateway.fleet
            await poll_until(
                lambda: (
                    len(fleet.feeds) == 2
                    and all(w.mode == "exact" for w in fleet.pools[0].workers.values())
                ),
                deadline_s=30.0,
                what="both are followed",
            )
            yield Warming(gateway, f"http://127.0.0.1:{listener.port}", session)
        finally:
            await listener.stop(0.0)
            await gateway.close()


async def test_runners_prove_what_was_warmed_and_serve_it(runners: list[LiveRunner]) -> None:
    names = ["alpha", "beta"]
    items = [item(name, text_of(name, CHARS), copies=2) for name in names]
    async with over(runners) as gateway:
        events = await gateway.warm(items)
        assert end(events)["warm"] == 2, events
        verified = of(events, "verified")
        assert len(verified) == 4
        for found in verified:
            assert found["cached_tokens"] == found["held_tokens"] == found["wanted_tokens"] > 200
        assert end(events)["computed_tokens"] == sum(v["wanted_tokens"] for v in verified)
        again = end(await gateway.warm(items))
        assert (again["warm"], again["computed_tokens"]) == (2, 0)
        wanted = {v["id"]: v["wanted_tokens"] for v in verified}
        for name in names:
            body = asking(text_of(name, CHARS), "Who decides?") | {"max_tokens": 1}
            _, answered = await gateway.post("/v1/chat/completions", body)
            cached = answered["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= wanted[name]


async def test_a_runner_that_was_reset_is_filled_again(runners: list[LiveRunner]) -> None:
    keep = {"enabled": True, "store": True}
    async with over(runners, keep_warm=keep) as gateway:
        body = asking(text_of("handbook", 3 * CHARS), "And?") | {"max_tokens": 1}
        headers = {"x-document-id": "handbook"}
        for _ in range(2):
            status, found = await gateway.post("/v1/chat/completions", body, headers=headers)
            assert status == 200, found
        (entry,) = gateway.gateway.warmer.store
        (worker,) = entry.workers
        keeper, pool = gateway.gateway.warmer.keeper, gateway.gateway.fleet.pools[0]
        assert pool.index is not None
        await poll_until(lambda: bool(pool.index) and pool.index.holds(worker, entry.end))
        keeper.look()
        status, _ = await gateway.post(f"/admin/v1/workers/{worker}/reset", {})
        assert status == 200
        keeper.look()
        await poll_until(
            lambda: pool.index is not None and pool.index.holds(worker, entry.end),
            deadline_s=30.0,
            what="it is filled again",
        )
        _, answered = await gateway.post("/v1/chat/completions", body, headers=headers)
        assert answered["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(entry.ids)
