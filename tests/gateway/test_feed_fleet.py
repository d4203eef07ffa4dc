"""The fleet finds publishers, follows each rank on its own, and says what it knows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from gateway.config import Settings
from gateway.fleet.event_health import EventHealth
from gateway.fleet.feed import Feed
from gateway.fleet.fleet import Fleet
from gateway.fleet.metrics import FleetCollector
from gateway.routing.dispatch import Dispatcher, Outcome
from gateway.routing.pool import Pool, Worker
from gateway.telemetry.requests import Telemetry
from prefix_index import AllBlocksCleared, EventBatch, Index, encode_batch
from prefix_index.events import Event
from tests.gateway.feed_parts import TOKENS, Telling, stored, telling
from tests.gateway.routing_parts import BLOCK, ids, prompt_reader
from tests.prefix_index.publisher import Publisher
from tests.support import free_port, neighbour_ports, poll_until


def payload(*events: Event, rank: int | None = None) -> bytes:
    return encode_batch(EventBatch(1.0, list(events), rank))


def publisher(**options: Any) -> Publisher:
    return Publisher(free_port(), free_port(), topic=b"", **options)


@asynccontextmanager
async def fleet_of(
    *workers: dict[str, Any], engine: str = "vllm", start: bool = True
) -> AsyncIterator[Fleet]:
    """Watch workers whose prompts are read, with an index."""
    config = {"name": "chat", "models": ["m"], "engine": engine, "workers": list(workers)}
    fleet = Fleet(Settings.model_validate({"pools": [config]}))
    fleet.pools[0].use_prompts(prompt_reader(), Index(BLOCK))
    try:
        if start:
            await fleet.start()
        yield fleet
    finally:
        await fleet.stop()


def pool_of(fleet: Fleet) -> Pool:
    return fleet.pools[0]


def blocks(fleet: Fleet, worker_id: str) -> int:
    index = pool_of(fleet).index
    assert index is not None
    return sum(index.blocks_by_tier(worker_id).values())


async def test_a_publisher_that_nobody_configured_is_found_and_followed() -> None:
    async with publisher() as source:
        answer = {
            "endpoint": source.endpoint.replace("127.0.0.1", "*"),
            "replay_endpoint": source.replay_endpoint,
            "topic": "",
        }
        await source.publish(payload(stored(0, 3)), live=False)
        async with (
            telling(Telling({"/kv_event_sources": {"0": answer}})) as url,
            fleet_of({"id": "w1", "url": url}) as fleet,
        ):
            await poll_until(lambda: blocks(fleet, "w1") == 3)
            worker = pool_of(fleet).workers["w1"]

            assert fleet.has_events(worker)
            assert (worker.mode, worker.rank) == ("exact", None)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_who_configures_an_empty_list_wants_no_events(engine: str) -> None:
    answers = {
        "/kv_event_sources": {"0": {"endpoint": "tcp://*:5557", "topic": ""}},
        "/server_info": {"kv_events": {"publisher": "zmq", "endpoint_port_base": 5557}},
    }
    async with (
        telling(Telling(answers)) as url,
        fleet_of({"id": "w1", "url": url, "kv_events": []}, engine=engine) as fleet,
    ):
        assert not fleet.has_events(pool_of(fleet).workers["w1"])
        assert not fleet.feeds


async def test_a_worker_that_names_another_host_is_not_followed_and_says_why() -> None:
    answer = {"endpoint": "tcp://10.1.2.3:5557", "topic": ""}
    async with (
        telling(Telling({"/kv_event_sources": {"0": answer}})) as url,
        fleet_of({"id": "w1", "url": url}) as fleet,
    ):
        worker = pool_of(fleet).workers["w1"]
        await poll_until(lambda: fleet.index_state(worker)["why"] is not None)

        assert "10.1.2.3" in fleet.index_state(worker)["why"]
        assert not fleet.feeds
        assert worker.mode == "approximate"


async def test_hits_are_each_ranks_own_and_the_decision_names_worker_and_rank() -> None:
    async with publisher() as first, publisher() as second, telling(Telling()) as url:
        events, replays = zip(
            *[(p.endpoint, p.replay_endpoint) for p in (first, second)], strict=True
        )
        worker = {"id": "w1", "url": url, "kv_events": list(events), "kv_replay": list(replays)}
        async with fleet_of(worker) as fleet:
            await first.publish(payload(stored(0, 8), rank=0), live=False)
            await first.publish(payload(rank=0))
            await poll_until(lambda: blocks(fleet, "w1#0") == 8)
            routes = Dispatcher(fleet.pools, seed=0)
            plan = await routes.plan(pool_of(fleet), ids([*TOKENS, 1, 2, 3]), in_full=True)
            ticket = routes.admit(plan, routes.choose(plan))
            ticket.finish(Outcome.CLIENT_CLOSED)
            hits = {c.worker: c.hit_tokens for c in ticket.decision.input.candidates}

            assert hits == {"w1#0": 8 * BLOCK, "w1#1": 0}
            assert (ticket.worker.id, ticket.worker.rank) == ("w1#0", 0)
            # One address: its connections and its health are everybody's.
            ranks = list(pool_of(fleet).workers.values())
            assert ranks[0].upstream is ranks[1].upstream
            assert ranks[0].health is ranks[1].health
            assert ranks[0].books is not ranks[1].books


async def test_events_that_go_to_the_wrong_rank_are_credited_to_nobody() -> None:
    async with publisher() as first, publisher() as second, telling(Telling()) as url:
        worker = {"id": "w1", "url": url, "kv_events": [second.endpoint, first.endpoint]}
        async with fleet_of(worker) as fleet:
            await first.subscribed()
            await first.publish(payload(stored(0, 8), rank=0))
            await poll_until(lambda: fleet.feeds["w1#1"].misdirected == 1)

            assert blocks(fleet, "w1#1") == 0
            assert fleet.feeds["w1#1"].health is EventHealth.WRONG_RANK


async def test_ranks_that_a_worker_tells_of_later_take_its_place() -> None:
    engine = Telling()
    async with (
        publisher() as first,
        publisher() as second,
        telling(engine) as url,
        fleet_of({"id": "w1", "url": url}) as fleet,
    ):
        assert list(pool_of(fleet).workers) == ["w1"]
        engine.answers["/kv_event_sources"] = {
            str(rank): {"endpoint": p.endpoint, "replay_endpoint": p.replay_endpoint}
            for rank, p in enumerate((first, second))
        }
        engine.metrics = "process_start_time_seconds 5\n"
        fleet.watches["w1"]._scraped_s = float("-inf")
        await poll_until(lambda: len(fleet.feeds) == 2)

        assert list(pool_of(fleet).workers) == ["w1#0", "w1#1"]
        assert sorted(fleet.watches) == sorted(fleet.parities) == ["w1#0", "w1#1"]
        await second.publish(payload(stored(0, 2), rank=1), live=False)
        await second.publish(payload(rank=1))
        await poll_until(lambda: blocks(fleet, "w1#1") == 2)
        assert blocks(fleet, "w1#0") == 0


async def test_one_configured_address_stands_for_all_ranks_of_the_worker() -> None:
    first, second = neighbour_ports()
    answers = {"/kv_event_sources": {str(r): {"endpoint": "tcp://*:1"} for r in (0, 1)}}
    async with Publisher(second, free_port(), topic=b"") as rank1, telling(Telling(answers)) as url:
        worker = {"id": "w1", "url": url, "kv_events": f"tcp://127.0.0.1:{first}"}
        async with fleet_of(worker) as fleet:
            await poll_until(lambda: len(fleet.feeds) == 2)
            await rank1.subscribed()
            await rank1.publish(payload(stored(0, 2), rank=1))
            await poll_until(lambda: blocks(fleet, "w1#1") == 2)


async def test_somebody_else_may_decide_who_follows_whom() -> None:
    async with publisher() as source, telling(Telling()) as url:
        worker = {
            "id": "w1",
            "url": url,
            "kv_events": source.endpoint,
            "kv_replay": source.replay_endpoint,
        }
        async with fleet_of(worker, start=False) as fleet:
            told: list[Worker] = []
            fleet.on_followable = told.append
            await fleet.start()
            one = pool_of(fleet).workers["w1"]
            assert told == [one]
            assert not fleet.feeds

            changes: list[Any] = []
            feed = fleet.follow(one)
            assert isinstance(feed, Feed)
            feed.ingest.on_change = changes.append
            assert fleet.follow(one) is feed
            await source.publish(payload(stored(0, 2)), live=False)
            await source.publish(payload(stored(2, 3)))
            await poll_until(lambda: blocks(fleet, "w1") == 3)
            assert sum(len(change.blocks) for change in changes) == 3
            known = feed.subscriber.last_sequence or 0, feed.subscriber.last_digest

            fleet.unfollow(one)
            await source.publish(payload(stored(3, 5)), live=False)
            assert (blocks(fleet, "w1"), fleet.feeds) == (3, {})

            # Whoever comes next goes on behind what is known, with the names that are known.
            second = fleet.follow(
                one, first_sequence=known[0] + 1, last_digest=known[1], names=feed.ingest._names
            )
            assert second is not None
            await poll_until(lambda: blocks(fleet, "w1") == 5)
            assert (second.restarts, second.ingest.orphans) == (0, 0)


async def test_a_worker_without_a_publisher_cannot_be_followed() -> None:
    async with telling(Telling()) as url, fleet_of({"id": "w1", "url": url}) as fleet:
        assert fleet.follow(pool_of(fleet).workers["w1"]) is None


async def test_workers_that_connect_to_one_address_are_told_apart_by_topic() -> None:
    port = free_port()
    names = ("a", "b")
    sources = [
        Publisher(port, free_port(), topic=f"kv@{name}".encode(), connects=True) for name in names
    ]
    async with sources[0], sources[1], telling(Telling()) as url:
        workers = [
            {"id": name, "url": url, "kv_events": f"tcp://*:{port}", "kv_topic": f"kv@{name}"}
            for name in names
        ]
        async with fleet_of(*workers) as fleet:
            for number, source in enumerate(sources, start=1):
                await source.subscribed()
                await source.publish(payload(stored(0, number)))
            await poll_until(lambda: [blocks(fleet, name) for name in names] == [1, 2])


async def test_two_workers_with_one_topic_are_not_mixed_up() -> None:
    async with publisher() as source, telling(Telling()) as url:
        workers = [{"id": name, "url": url, "kv_events": source.endpoint} for name in ("a", "b")]
        async with fleet_of(*workers) as fleet:
            await source.subscribed()
            await source.publish(payload(stored(0, 2)))
            await poll_until(lambda: blocks(fleet, "a") == 2)

            assert fleet.feeds["b"].health is EventHealth.UNREACHABLE
            assert (blocks(fleet, "b"), pool_of(fleet).workers["b"].mode) == (0, "approximate")


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        ("vllm", "/reset_prefix_cache"),
        ("runner", "/reset_prefix_cache"),
        ("sglang", "/flush_cache"),
    ],
)
async def test_a_reset_through_us_clears_the_index_before_the_engine_says_so(
    engine: str, path: str
) -> None:
    one = Telling(on_post=lambda asked: web.Response(status=200 if asked == path else 404))
    async with publisher() as source, telling(one) as url:
        config = {"id": "w1", "url": url, "kv_events": source.endpoint}
        async with fleet_of(config, engine=engine) as fleet:
            await source.subscribed()
            await source.publish(payload(stored(0, 3)))
            await poll_until(lambda: blocks(fleet, "w1") == 3)
            worker = pool_of(fleet).workers["w1"]

            assert await fleet.reset_cache(worker)
            assert blocks(fleet, "w1") == 0
            await source.publish(payload(AllBlocksCleared(), stored(0, 1)))
            await poll_until(lambda: blocks(fleet, "w1") == 1)


async def test_a_reset_that_the_events_told_first_clears_nothing_new() -> None:
    one = Telling()
    async with publisher() as source, telling(one) as url:
        config = {"id": "w1", "url": url, "kv_events": source.endpoint}
        async with fleet_of(config) as fleet:
            await source.subscribed()
            await source.publish(payload(stored(0, 3)))
            await poll_until(lambda: blocks(fleet, "w1") == 3)

            async def reset(path: str) -> web.Response:
                assert path == "/reset_prefix_cache"
                await source.publish(payload(AllBlocksCleared(), stored(0, 1)))
                await poll_until(lambda: blocks(fleet, "w1") == 1)
                return web.Response()

            one.on_post = reset
            assert await fleet.reset_cache(pool_of(fleet).workers["w1"])
            assert blocks(fleet, "w1") == 1


@pytest.mark.parametrize(
    "answer",
    [{"status": 500}, {"status": 404}, {"text": '{"success": false}'}],
    ids=["fails", "is not there", "is refused"],
)
async def test_a_reset_that_did_not_happen_clears_nothing(answer: dict[str, Any]) -> None:
    one = Telling(on_post=lambda _: web.Response(**answer))
    async with publisher() as source, telling(one) as url:
        config = {"id": "w1", "url": url, "kv_events": source.endpoint}
        async with fleet_of(config) as fleet:
            await source.subscribed()
            await source.publish(payload(stored(0, 3)))
            await poll_until(lambda: blocks(fleet, "w1") == 3)

            assert not await fleet.reset_cache(pool_of(fleet).workers["w1"])
            assert blocks(fleet, "w1") == 3


async def test_a_new_process_is_a_new_cache_whatever_its_events_say() -> None:
    engine = Telling(metrics="process_start_time_seconds 5\n")
    async with publisher() as source, telling(engine) as url:
        config = {"id": "w1", "url": url, "kv_events": source.endpoint}
        async with fleet_of(config) as fleet:
            await source.subscribed()
            await source.publish(payload(stored(0, 3)))
            await poll_until(lambda: blocks(fleet, "w1") == 3)
            engine.metrics = "process_start_time_seconds 6\n"
            fleet.watches["w1"]._scraped_s = float("-inf")
            await poll_until(lambda: blocks(fleet, "w1") == 0)

            assert fleet.feeds["w1"].restarts == 1
            assert pool_of(fleet).workers["w1"].epoch == 6


async def test_a_restart_that_its_events_showed_first_loses_nothing_of_the_new_process() -> None:
    engine = Telling(metrics="process_start_time_seconds 5\n")
    async with publisher() as source, telling(engine) as url:
        config = {"id": "w1", "url": url, "kv_events": source.endpoint}
        async with fleet_of(config) as fleet:
            await source.subscribed()
            await source.publish(payload(stored(0, 3)))
            await poll_until(lambda: blocks(fleet, "w1") == 3)
            source.sequence = 0
            await source.publish(payload(stored(0, 1)))
            await poll_until(lambda: blocks(fleet, "w1") == 1)
            engine.metrics = "process_start_time_seconds 6\n"
            fleet.watches["w1"]._scraped_s = float("-inf")
            await poll_until(lambda: pool_of(fleet).workers["w1"].epoch == 6)
            await source.publish(payload(stored(1, 2)))
            await poll_until(lambda: blocks(fleet, "w1") == 2)


async def test_an_operator_sees_how_each_worker_is_known() -> None:
    async with publisher() as source, telling(Telling()) as url:
        workers = [
            {
                "id": "w1",
                "url": url,
                "kv_events": source.endpoint,
                "kv_replay": source.replay_endpoint,
            },
            {"id": "w2", "url": url},
        ]
        async with fleet_of(*workers) as fleet:
            await source.subscribed()
            await source.publish(payload(stored(0, 3)))
            await source.publish(b"\xc1")
            await poll_until(lambda: fleet.feeds["w1"].subscriber.decode_errors == 1)
            first, second = (fleet.index_state(w) for w in pool_of(fleet).workers.values())
            telemetry = Telemetry()
            telemetry.register(FleetCollector(fleet, telemetry, lambda: 0.0))
            text = telemetry.render().decode()

    assert (first["mode"], first["health"]) == ("exact", "kv_events_undecodable")
    assert first["why"]
    assert (first["last_sequence"], first["behind_batches"], first["lag_s"]) == (1, 0, 0.0)
    assert (first["stored"], first["decode_errors"], first["gaps"]) == (3, 1, 0)
    assert first["blocks"] == {"gpu": 3}
    assert first["source"]["replay"] == source.replay_endpoint
    assert (second["mode"], second["health"], second["followed"]) == ("approximate", "off", False)
    assert second["source"] is None
    at = '{pool="chat",worker="w1"}'
    assert f"warmlane_kv_event_decode_errors_total{at} 1.0" in text
    assert f"warmlane_kv_event_stored_blocks_total{at} 3.0" in text
    state = 'warmlane_kv_event_health{pool="chat",state="kv_events_undecodable",worker="w1"} 1.0'
    assert state in text
    assert 'worker="w2"} 1.0' not in text.split("warmlane_kv_event_health")[-1]
