"""Addresses that join and leave a running fleet: events, ranks, deadlines and errors."""

from __future__ import annotations

import pytest

from gateway.config import WorkerConfig
from tests.gateway.feed_parts import Telling, stored, telling
from tests.gateway.test_feed_fleet import blocks, fleet_of, payload, pool_of, publisher
from tests.support import poll_until


async def test_an_address_that_joins_is_followed_and_forgotten_when_it_leaves() -> None:
    async with publisher() as source, telling(Telling()) as url, fleet_of() as fleet:
        await source.publish(payload(stored(0, 3)), live=False)
        joined = WorkerConfig(
            id="w1", url=url, kv_events=source.endpoint, kv_replay=source.replay_endpoint
        )
        assert [worker.id for worker in fleet.add("chat", joined)] == ["w1"]
        await poll_until(lambda: blocks(fleet, "w1") == 3)
        assert fleet.remove("w1")
        assert blocks(fleet, "w1") == 0
        assert not fleet.feeds
        assert not fleet.remove("w1")
        fleet.add("chat", joined)
        await poll_until(lambda: blocks(fleet, "w1") == 3)


async def test_all_ranks_behind_an_address_join_drain_and_leave_together() -> None:
    async with publisher() as first, publisher() as second:
        answer = {
            str(rank): {"endpoint": p.endpoint, "replay_endpoint": p.replay_endpoint, "topic": ""}
            for rank, p in enumerate((first, second))
        }
        async with telling(Telling({"/kv_event_sources": answer})) as url, fleet_of() as fleet:
            workers = pool_of(fleet).workers
            fleet.add("chat", WorkerConfig(id="w1", url=url))
            fleet.drain("w1")
            await poll_until(lambda: list(workers) == ["w1#0", "w1#1"])
            # Those that took the place of the first are drained as it was.
            assert all(worker.draining for worker in workers.values())
            fleet.drain("w1", draining=False)
            assert not any(worker.draining for worker in workers.values())
            await poll_until(lambda: len(fleet.feeds) == 2)
            fleet.remove("w1")
            assert not workers
            assert not fleet.feeds
            assert not fleet.watches
            assert not fleet.parities


async def test_an_id_is_given_once_and_pools_must_be_there() -> None:
    async with telling(Telling()) as url, fleet_of({"id": "w0", "url": url}) as fleet:
        with pytest.raises(ValueError, match="'w0' is taken"):
            fleet.add("chat", WorkerConfig(id="w0", url=url))
        with pytest.raises(ValueError, match="there is no pool 'other'"):
            fleet.add("other", WorkerConfig(id="w1", url=url))
        with pytest.raises(KeyError):
            fleet.drain("w1")


async def test_what_joins_before_the_start_is_watched_from_the_start_on() -> None:
    async with telling(Telling()) as url, fleet_of(start=False) as fleet:
        fleet.add("chat", WorkerConfig(id="w1", url=url))
        assert not fleet.watches
        await fleet.start()
        assert fleet.watches["w1"].checked.is_set()
