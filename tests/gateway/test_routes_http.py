"""Routes, fallback pools, weights and waiting as clients meet them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.proxy.server import API
from gateway.routing.learner import Learner
from gateway.routing.pool import Pool, Retry
from gateway.routing.routes import Route, Routes
from gateway.tenancy import TrustedPeers
from tests.fakes.engine import DONE, FINISH, End, RawEngine, answer, content, openai_engine, stream
from tests.fakes.gateway import CONNECT_S, Gateway, chat, gateway, worker
from tests.gateway.gate_parts import SLOW
from tests.support import free_port, poll_until


def pool_of(name: str, *urls: str, **options: object) -> Pool:
    ids = {f"{name}-{i}": url for i, url in enumerate(urls)}
    workers = [worker(id_, url, connect_timeout_s=CONNECT_S) for id_, url in ids.items()]
    return Pool(name, models=["m"], workers=workers, **options)  # type: ignore[arg-type]


async def test_a_route_by_header_sends_a_models_traffic_to_another_pool() -> None:
    async with openai_engine() as one, openai_engine() as two:
        a, b = pool_of("a", one.url), pool_of("b", two.url)
        async with gateway(pools=[a, b]) as gw:
            gw.dispatcher.routes = Routes([a, b], [Route(b, headers=(("x-team", "search"),))])
            await gw.post()
            await gw.post(headers={"X-Team": "search"})
            pools = [(await gw.record(i)).pool for i in (0, 1)]

    assert pools == ["a", "b"]
    assert (len(one.seen), len(two.seen)) == (1, 1)


async def test_a_route_by_length_sends_the_body_that_came() -> None:
    async with openai_engine() as one, openai_engine() as two:
        a, b = pool_of("a", one.url), pool_of("b", two.url)
        async with gateway(pools=[a, b]) as gw:
            route = Route(b, prompt_tokens=(100, 1e9), is_by_class=True)
            gw.dispatcher.routes = Routes([a, b], [route])
            await gw.post(body=chat("short"))
            await gw.post(body=chat("long " * 400))

    assert len(one.seen) == 1
    assert two.seen[0].json() == chat("long " * 400)


async def test_a_canary_gets_its_share() -> None:
    async with openai_engine() as one, openai_engine() as two:
        a, b = pool_of("a", one.url), pool_of("b", two.url)
        a.weight, b.weight = 3, 1
        async with gateway(pools=[a, b]) as gw:
            for i in range(60):
                await gw.post(headers={"x-session-id": f"s{i}"})
            counts = Counter(record.pool for record in gw.records)

    assert len(one.seen) + len(two.seen) == 60
    assert 5 <= counts["b"] <= 25


@pytest.mark.parametrize("state", ["drained", "not ready", "no workers"])
async def test_the_fallback_pool_serves_while_a_pool_has_no_worker(state: str) -> None:
    async with openai_engine() as one, openai_engine() as two:
        a, b = pool_of("a", one.url), pool_of("b", two.url, aliases={"m2": "m"})
        a.fallback = b
        if state == "drained":
            a.drain("a-0")
        elif state == "no workers":
            gone = a.remove("a-0")
            assert gone is not None
            assert gone.upstream is not None
            gone.upstream.close()
        else:
            for _ in range(3):
                a.workers["a-0"].health.check_failed(0.0, timed_out=False, is_streaming=False)
        async with gateway(pools=[a, b]) as gw:
            status, _, _ = await gw.post()
            record = await gw.record()

    assert (status, record.pool, record.worker, record.attempts) == (200, "b", "b-0", 1)
    assert one.seen == []


async def test_a_fallback_of_a_fallback_serves_and_when_all_are_gone_it_is_a_503() -> None:
    async with openai_engine() as engine:
        pools = [pool_of("a", engine.url), pool_of("b", engine.url), pool_of("c", engine.url)]
        pools[0].fallback, pools[1].fallback = pools[1], pools[2]
        async with gateway(pools=pools) as gw:
            for name in "ab":
                gw.dispatcher.pools[name].drain(f"{name}-0")
            served, _, _ = await gw.post()
            pools[2].drain("c-0")
            refused, _, response = await gw.post()
            records = [await gw.record(0), await gw.record(1)]

    assert (served, records[0].pool) == (200, "c")
    assert (refused, records[1].outcome) == (503, "unavailable")
    assert "retry-after" in response.headers


async def test_a_request_whose_workers_all_fail_goes_to_the_fallback_pool() -> None:
    async with openai_engine() as two:
        a = pool_of("a", f"http://127.0.0.1:{free_port()}")
        b = pool_of("b", two.url)
        b.aliases = {"gpt": "m"}
        a.aliases = {"gpt": "other-name"}
        a.fallback = b
        async with gateway(pools=[a, b]) as gw:
            status, _, _ = await gw.post(body=chat(model="gpt"))
            record = await gw.record()

    assert (status, record.pool, record.worker, record.attempts) == (200, "b", "b-0", 2)
    assert two.seen[0].json()["model"] == "m"


async def test_a_not_ready_pool_is_asked_all_the_same_when_its_fallback_has_nobody() -> None:
    async with openai_engine() as one, openai_engine() as two:
        a, b = pool_of("a", one.url), pool_of("b", two.url)
        a.fallback = b
        b.drain("b-0")
        for _ in range(3):
            a.workers["a-0"].health.check_failed(0.0, timed_out=False, is_streaming=False)
        async with gateway(pools=[a, b]) as gw:
            status, _, _ = await gw.post()
            record = await gw.record()

    assert (status, record.pool, record.worker) == (200, "a", "a-0")


@pytest.mark.parametrize(("attempts", "budget", "asked"), [(1, 0.2, 1), (3, 0.2, 3), (3, 0.0, 1)])
async def test_each_pool_has_its_own_retries(attempts: int, budget: float, asked: int) -> None:
    async with RawEngine(lambda _: [End.FIN]) as broken:
        a = pool_of("a", *[broken.url] * 4)
        a.retry = Retry(budget, attempts)
        async with gateway(pools=[a]) as gw:
            status, _, _ = await gw.post()

    assert (status, len(broken.seen)) == (502, asked)


async def test_a_workers_rank_goes_with_the_request_and_a_clients_does_not() -> None:
    async with openai_engine() as engine:
        a = pool_of("a", engine.url)
        async with gateway(pools=[a]) as gw:
            await gw.post(headers={"X-Data-Parallel-Rank": "7"})
            a.workers["a-0"].rank = 3
            await gw.post(headers={"X-Data-Parallel-Rank": "7"})

    assert [seen.headers.get("x-data-parallel-rank") for seen in engine.seen] == [None, "3"]


@pytest.mark.parametrize(
    ("networks", "expected"),
    [((), ""), (("127.0.0.0/8",), "acme"), (("10.0.0.0/8", "::1"), "")],
    ids=str,
)
async def test_a_tenant_header_counts_only_from_a_trusted_peer(
    networks: tuple[str, ...], expected: str
) -> None:
    async with openai_engine() as engine, gateway(engine.url) as gw:
        gw.listener._runner.app[API].tenancy.peers = TrustedPeers(networks)
        await gw.post(headers={"X-Tenant-Id": "acme"})
        record = await gw.record()

    assert record.tenant == expected


# Waiting.


@asynccontextmanager
async def busy(
    *, deadline_s: float = 30.0
) -> AsyncIterator[tuple[Gateway, RawEngine, Pool, asyncio.Event]]:
    """A gateway whose only worker computes a long prompt until the event is set."""
    go = asyncio.Event()
    async with RawEngine(lambda _: stream(content("b"), FINISH, DONE)) as engine:
        pool = pool_of("a", engine.url)
        pool.deadline_s = deadline_s
        pool.workers["a-0"].learner = Learner(SLOW)
        async with gateway(pools=[pool]) as gw:
            engine.scripts.append([go, *stream(content("a"), FINISH, DONE)])
            first = asyncio.create_task(gw.post(body=chat("x" * 40_000, stream=True)))
            await poll_until(lambda: len(engine.seen) == 1)
            try:
                yield gw, engine, pool, go
            finally:
                go.set()
                await first


async def test_a_request_waits_for_the_only_worker_and_is_told_how_long() -> None:
    async with busy() as (gw, engine, _pool, go):
        second = asyncio.create_task(gw.post(body=chat(stream=True)))
        await poll_until(lambda: gw.dispatcher.gate.num_waiting("a") == 1)
        assert len(engine.seen) == 1
        go.set()
        status, _, response = await second
        await poll_until(lambda: len(gw.records) == 2)
        record = next(record for record in gw.records if record.queue_s)

    assert (status, record.attempts, record.outcome) == (200, 1, "ok")
    queued_ms = float(response.headers["server-timing"].rpartition("queue;dur=")[2])
    assert queued_ms == pytest.approx(record.queue_s * 1000, abs=0.001)
    assert queued_ms > 0


async def test_a_request_that_waits_too_long_is_a_429_with_retry_after() -> None:
    async with busy(deadline_s=0.2) as (gw, engine, _pool, _go):
        status, body, response = await gw.post()
        record = await gw.record()

    error = json.loads(body)["error"]
    assert (status, error["code"], error["type"]) == (429, "queue_timeout", "overloaded_error")
    assert int(response.headers["retry-after"]) >= 60
    assert (record.status, record.outcome, record.worker) == (429, "unavailable", "")
    assert record.queue_s >= 0.2
    assert len(engine.seen) == 1


async def test_a_request_too_many_is_a_429_at_once() -> None:
    async with busy() as (gw, _engine, pool, go):
        pool.max_queue = 1
        second = asyncio.create_task(gw.post(body=chat(stream=True)))
        await poll_until(lambda: gw.dispatcher.gate.num_waiting("a") == 1)
        status, body, response = await gw.post()
        go.set()
        assert (await second)[0] == 200

    assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1


async def test_a_client_that_leaves_while_it_waits_is_not_sent() -> None:
    async with busy() as (gw, engine, _pool, _go):
        second = asyncio.create_task(gw.post(body=chat(stream=True)))
        await poll_until(lambda: gw.dispatcher.gate.num_waiting("a") == 1)
        second.cancel()
        await poll_until(lambda: gw.dispatcher.gate.num_waiting("a") == 0)
        record = await gw.record()

    assert (record.status, record.outcome, record.attempts) == (499, "client_closed", 0)
    assert len(engine.seen) == 1


async def test_those_who_wait_when_the_gateway_stops_are_told_so() -> None:
    async with busy() as (gw, _engine, _pool, _go):
        second = asyncio.create_task(gw.post(body=chat(stream=True)))
        await poll_until(lambda: gw.dispatcher.gate.num_waiting("a") == 1)
        stopping = asyncio.create_task(gw.listener.stop(0.1))
        status, body, _ = await second
        await stopping

    assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")


async def test_those_who_wait_for_a_worker_that_dies_get_the_fallback_pool() -> None:
    async with openai_engine() as other, busy() as (gw, _engine, pool, go):
        fallback = pool_of("b", other.url)
        pool.fallback = fallback
        second = asyncio.create_task(gw.post(body=chat(stream=True)))
        await poll_until(lambda: gw.dispatcher.gate.num_waiting("a") == 1)
        pool.drain("a-0")
        go.set()
        status, _, _ = await second
        record = next(record for record in gw.records if record.worker == "b-0")
        assert fallback.workers["b-0"].upstream is not None
        fallback.workers["b-0"].upstream.close()

    assert (status, record.pool, len(other.seen)) == (200, "b", 1)


async def test_an_answer_that_is_not_streamed_lets_others_go_at_its_end() -> None:
    async with busy() as (gw, engine, _pool, go):
        second = asyncio.create_task(gw.post())
        await poll_until(lambda: gw.dispatcher.gate.num_waiting("a") == 1)
        engine.scripts.append(answer(b"{}"))
        go.set()
        assert (await second)[0] == 200


@pytest.mark.parametrize("wished", ["c", "", 5, ["b"]])
async def test_a_pool_that_cannot_be_had_is_refused_with_those_that_can(wished: object) -> None:
    async with openai_engine() as one, openai_engine() as two:
        a, b = pool_of("a", one.url), pool_of("b", two.url)
        async with gateway(pools=[a, b]) as gw:
            status, text, _ = await gw.post(body=chat("hi") | {"warmlane": {"pool": wished}})
            served, _, _ = await gw.post(body=chat("hi") | {"warmlane": {"pool": "b"}})

    error = json.loads(text)["error"]
    assert (status, error["param"], served) == (400, "warmlane.pool", 200)
    assert "a, b" in error["message"]
    assert one.seen == []
    # Engines are never told of it.
    assert [seen.json() for seen in two.seen] == [chat("hi")]
