"""A runner that has stopped gives its memory back, whatever it has served before."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import httpx
import pytest

from runner.config import PoolSize, RunnerConfig
from tests.live_runner import LiveRunner
from tests.support import poll_until

pytestmark = pytest.mark.timeout(300)
ROOM = 32 * 2**20
DEADLINE_S = 120.0
TEXT = "Handbook rule 7: refunds are accepted within thirty days. " * 12
Serve = Callable[..., LiveRunner]


@pytest.fixture
def serve(smollm2_dir: Path, shared_weights: None) -> Serve:
    """Start a runner over the weights that all tests share."""

    def start(**settings: Any) -> LiveRunner:
        pool = PoolSize(tokens=512)
        config = RunnerConfig(model=str(smollm2_dir), port=0, pool=pool, **settings)
        return LiveRunner.start(config)

    return start


def ask(url: str, path: str = "/v1/completions", **fields: Any) -> int:
    body = {"prompt": TEXT, "max_tokens": 2, "temperature": 0}
    return httpx.post(url + path, json=body | fields, timeout=DEADLINE_S).status_code


def look(url: str) -> int:
    return httpx.get(url, timeout=DEADLINE_S).status_code


async def are_gone(*watched: ref[Any]) -> None:
    def is_freed() -> bool:
        gc.collect()
        return not any(one() is not None for one in watched)

    await poll_until(is_freed, deadline_s=DEADLINE_S, what="what a stopped runner held is freed")


def watch(live: LiveRunner) -> list[ref[Any]]:
    core = live.runner.engine._core
    return [ref(live.runner.engine), ref(core), ref(core._kv), ref(live.runner.service)]


async def empty_pool(live: LiveRunner) -> None:
    """Forget what the pool has, so that it is restored from the tiers."""
    engine = live.runner.engine

    def is_empty() -> bool:
        return bool(engine._ask(engine._core._pool.clear).result(DEADLINE_S))

    await poll_until(is_empty, deadline_s=DEADLINE_S, what="the pool is empty")


async def use_and_stop(serve: Serve, **settings: Any) -> list[ref[Any]]:
    """Ask for everything that can be asked of a runner, stop it, and keep nothing of it."""
    with serve(**settings) as live:
        watched = watch(live)
        assert ask(live.url) == 200
        assert ask(live.url, stream=True) == 200
        assert ask(live.url, temperature=-1) == 400
        assert ask(live.url, "/nowhere") == 404
        await empty_pool(live)
        assert ask(live.url) == 200
        for path in ("/metrics", "/cache", "/cache/decisions", "/health"):
            assert look(live.url + path) == 200
    return watched


@pytest.mark.parametrize("tiers", [(), ("host",), ("ssd",), ("host", "ssd")], ids="+".join)
async def test_a_stopped_runner_gives_its_memory_back(
    serve: Serve, tmp_path: Path, tiers: tuple[str, ...]
) -> None:
    settings: dict[str, Any] = {}
    if "host" in tiers:
        settings |= {"host_bytes": ROOM}
    if "ssd" in tiers:
        settings |= {"ssd_dir": tmp_path, "ssd_bytes": ROOM}
    await are_gone(*await use_and_stop(serve, **settings))


async def test_stopped_runners_that_lent_and_pulled_give_their_memory_back(serve: Serve) -> None:
    async def lend_and_pull() -> list[ref[Any]]:
        with (
            serve(host_bytes=ROOM, serve_peers=True) as lender,
            serve(peers=(lender.url,)) as asking,
        ):
            assert ask(lender.url) == 200
            source = {"source": {"url": lender.url, "tokens": 160}}
            assert ask(asking.url, kv_transfer_params=source) == 200
            return watch(lender) + watch(asking)

    await are_gone(*await lend_and_pull())
