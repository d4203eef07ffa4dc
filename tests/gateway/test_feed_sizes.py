"""Block sizes: what a pool takes, what its workers may have, and what the operator is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models

from gateway.config import Settings
from gateway.fleet.event_health import MAX_BARREN_BATCHES, MAX_SILENCE_S, EventHealth
from gateway.fleet.fleet import Fleet
from gateway.routing.dispatch import Dispatcher, Outcome
from gateway.routing.outcome import Usage
from gateway.routing.pool import Pool
from gateway.telemetry.record import RequestRecord
from tests.gateway.feed_parts import Telling, fed, stored, telling
from tests.gateway.routing_parts import BLOCK, CHATML, Clock, ids
from tests.prefix_index.publisher import Publisher
from tests.support import free_port, poll_until


async def test_events_of_larger_blocks_are_believed() -> None:
    async with fed() as worker:
        worker.take(stored(0, 8, block_hashes=[1, 2], block_size=4 * BLOCK))
        worker.feed.subscriber.last_event_s = worker.clock.now_s

        assert worker.worker.block_size == 4 * BLOCK
        assert (worker.hit, worker.mode(), worker.health()) == (8, "exact", EventHealth.OK)
        assert worker.pool.is_readable(worker.worker)

        # Metrics may say something else: what is announced counts.
        worker.worker.block_size = BLOCK
        worker.passes(0)
        assert worker.worker.block_size == 4 * BLOCK


@pytest.mark.parametrize("size", [BLOCK // 2, BLOCK * 3 // 2, 24 * BLOCK + 8])
async def test_events_of_blocks_that_are_no_multiple_are_reported(size: int) -> None:
    with capture_logs() as logs:
        async with fed() as worker:
            worker.take(
                stored(0, 1, token_ids=[*range(2 * size)], block_hashes=[1, 2], block_size=size)
            )
            for _ in range(3):
                worker.worker.block_size = BLOCK  # as metrics say again and again
                worker.passes(1)

            assert worker.worker.block_size == size
            assert worker.health() is EventHealth.BLOCK_SIZE
            assert not worker.pool.is_readable(worker.worker)
            assert worker.hit == 0
    (told,) = [line for line in logs if line["event"] == "kv_events_block_size"]
    assert (told["block_size"], told["expected"]) == (size, BLOCK)
    assert "set pools[].block_size to 8" in told["effect"]


@pytest.mark.parametrize(("size", "reported"), [(64, None), (64, 16), (16, 64), (528, 16)])
async def test_a_conflict_with_the_pool_or_the_metrics_is_reported_once(
    size: int, reported: int | None
) -> None:
    with capture_logs() as logs:
        async with fed(block_size=reported) as worker:
            ids = [*range(2 * size)]
            for _ in range(3):
                worker.take(stored(0, 1, token_ids=ids, block_hashes=[1, 2], block_size=size))
                worker.worker.block_size = reported
                worker.passes(1)
            assert worker.worker.block_size == size
    (told,) = [line for line in logs if line["event"] == "kv_events_block_size"]
    assert (told["worker"], told["block_size"], told["reported"]) == ("w0", size, reported)


@pytest.mark.parametrize(
    ("size", "length", "is_missed"),
    [(64, 63, False), (64, 65, True), (16, 33, True), (528, 527, False)],
)
async def test_only_prompts_long_enough_to_be_announced_are_missed(
    size: int, length: int, is_missed: bool
) -> None:
    async with AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(Publisher(free_port(), free_port(), topic=b""))
        async with started(16, size, events=publisher.endpoint) as fleet:
            pool, routes = pool_of(fleet), Dispatcher(fleet.pools, seed=0, on_finish=fleet.finished)
            await poll_until(lambda: "w1" in fleet.feeds)
            feed = fleet.feeds["w1"]
            feed._clock = clock = Clock()
            for at in range(3):
                plan = await routes.plan(pool, ids([at, *range(1, length)]), in_full=True)
                decision = routes.choose(plan, exclude=("w0",))
                ticket = routes.admit(plan, decision)
                ticket.finish(Outcome.OK, Usage(length, 1, 0))
                assert len(feed._awaited) == (at + 1 if is_missed else 0)
            fleet.observe(
                RequestRecord("r", "chat", worker="w1", prompt_tokens=length, outcome="ok")
            )
            clock.now_s += MAX_SILENCE_S
            feed.check()
            assert (feed.health is EventHealth.SILENT) == is_missed


async def test_a_prompts_beginning_in_large_blocks_brings_useless_events_back() -> None:
    async with fed() as worker:
        tail = stored(4, 8, block_hashes=[2], parent_block_hash=1, block_size=4 * BLOCK)
        for _ in range(MAX_BARREN_BATCHES):
            worker.take(tail)
        assert worker.health() is EventHealth.USELESS

        beginning = stored(0, 4, block_hashes=[1], block_size=4 * BLOCK)
        worker.take(beginning)
        worker.take(beginning)
        assert (worker.mode(), worker.hit) == ("exact", 4)


def engine(size: int | None) -> Telling:
    """Return a bundled runner that tells its block size and hands out a tokenizer."""
    metrics = "" if size is None else f'vllm:cache_config_info{{block_size="{size}"}} 1\n'
    answers = {
        "/tokenizer": {
            "tokenizer_json": Tokenizer(models.BPE({"a": 0}, [])).to_str(),
            "tokenizer_config": {"eos_token": "<|im_end|>"},
            "chat_template": CHATML,
        }
    }
    return Telling(answers=answers, metrics=metrics)


@asynccontextmanager
async def started(*sizes: int | None, events: str = "", **pool: Any) -> AsyncIterator[Fleet]:
    """Start a fleet over workers of these block sizes, the last of which may publish."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(telling(engine(size))) for size in sizes]
        workers = [{"id": f"w{at}", "url": url} for at, url in enumerate(urls)]
        if events:
            workers[-1]["kv_events"] = events
        config = {"name": "chat", "models": ["m"], "engine": "runner", "workers": workers, **pool}
        fleet = Fleet(Settings.model_validate({"pools": [config]}))
        try:
            await fleet.start()
            yield fleet
        finally:
            await fleet.stop()


def pool_of(fleet: Fleet) -> Pool:
    return fleet.pools[0]


@pytest.mark.parametrize("sizes", [(528, 64, 16), (16, 64, 528), (64, 16, 528), (64, 64, 64)])
async def test_a_pool_takes_the_smallest_block_size_of_its_workers(sizes: tuple[int, ...]) -> None:
    async with started(*sizes) as fleet:
        pool = pool_of(fleet)
        assert pool.block_size == min(sizes)
        assert all(pool.is_readable(worker) for worker in pool.workers.values())


async def test_a_worker_that_does_not_tell_its_block_size_is_not_waited_for_long() -> None:
    async with started(64, None, 32) as fleet:
        await poll_until(lambda: pool_of(fleet).reader is not None)
        assert pool_of(fleet).block_size == 32


async def test_a_configured_block_size_stays() -> None:
    async with started(64, 528, block_size=16) as fleet:
        await poll_until(lambda: pool_of(fleet).reader is not None)
        assert pool_of(fleet).block_size == 16
        assert all(pool_of(fleet).is_readable(w) for w in pool_of(fleet).workers.values())
