"""Small maps that all gateways share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from prefix_index.replica.link import Link
from prefix_index.replica.shared_map import MAX_VALUE_BYTES, SharedMap
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]


class Side:
    """One gateway's side of a map, with what it heard."""

    def __init__(self, url: str, *, first_wins: bool = False, max_entries: int = 100) -> None:
        self.link = Link(url, namespace="t", timeout_s=1.0)
        self.heard: dict[bytes, bytes] = {}
        self.map = SharedMap(
            self.link,
            "orders",
            max_entries=max_entries,
            first_wins=first_wins,
            on_entry=self.heard.__setitem__,
        )


@contextlib.asynccontextmanager
async def running(*sides: Side) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(part.run()) for s in sides for part in (s.link, s.map)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_entry_reaches_the_others_and_those_who_start_later(valkey: Valkey) -> None:
    one, two, late = (Side(valkey.url) for _ in range(3))
    async with running(one, two):
        one.map.put(b"k", b"v")
        await poll_until(lambda: two.heard == {b"k": b"v"})
        async with running(late):
            await poll_until(lambda: late.heard == {b"k": b"v"})


async def test_the_first_writer_wins_and_the_loser_is_told(valkey: Valkey) -> None:
    one, two = (Side(valkey.url, first_wins=True) for _ in range(2))
    async with running(one, two):
        one.map.put(b"k", b"first")
        await poll_until(lambda: not one.map.num_waiting)
        two.map.put(b"k", b"second")
        await poll_until(lambda: not two.map.num_waiting)
        assert two.heard == {b"k": b"first"}
        await asyncio.sleep(0)
        assert one.heard.get(b"k", b"first") == b"first"


async def test_the_last_writer_wins_where_that_is_wanted(valkey: Valkey) -> None:
    one, two = (Side(valkey.url) for _ in range(2))
    async with running(one, two):
        one.map.put(b"k", b"1")
        await poll_until(lambda: two.heard == {b"k": b"1"})
        two.map.put(b"k", b"2")
        await poll_until(lambda: one.heard == {b"k": b"2"})


async def test_the_map_is_bounded_in_the_server(valkey: Valkey) -> None:
    one = Side(valkey.url, max_entries=10)
    async with running(one):
        for number in range(200):
            one.map.put(b"%d" % number, b"v")
        await poll_until(lambda: not one.map.num_waiting)
        late = Side(valkey.url, max_entries=10)
        async with running(late):
            await poll_until(lambda: len(late.heard) >= 10)
            assert sorted(late.heard) == sorted(b"%d" % number for number in range(190, 200))


async def test_what_is_put_while_redis_is_away_is_written_when_it_comes(valkey: Valkey) -> None:
    one, two = (Side(valkey.url) for _ in range(2))
    async with running(one, two):
        await poll_until(lambda: one.link.is_up and two.link.is_up)
        valkey.stop()
        await poll_until(lambda: not one.link.is_up)
        one.map.put(b"k", b"v")
        valkey.start()
        await poll_until(lambda: two.heard == {b"k": b"v"})


async def test_what_waits_for_redis_is_bounded() -> None:
    one = Side(f"redis://127.0.0.1:{free_port()}")
    for number in range(10_000):
        one.map.put(b"%d" % number, b"v")
    one.map.put(b"large", bytes(MAX_VALUE_BYTES + 1))
    one.map.put(b"k" * 1000, b"v")
    assert one.map.num_waiting == 4096
    assert one.map.dropped == 10_000 - 4096 + 2


@pytest.mark.parametrize("kind", ["map", "order", "changes"])
async def test_a_key_of_a_wrong_type_is_replaced(valkey: Valkey, kind: str) -> None:
    one, two = (Side(valkey.url) for _ in range(2))
    with valkey.client() as client:
        client.set(one.link.key("orders", kind), b"rubbish")
    async with running(one, two):
        one.map.put(b"k", b"v")
        await poll_until(lambda: two.heard == {b"k": b"v"})


@pytest.mark.parametrize("first_wins", [True, False])
async def test_entries_of_strangers_are_counted_and_skipped(
    valkey: Valkey, first_wins: bool
) -> None:
    one, two = (Side(valkey.url, first_wins=first_wins) for _ in range(2))
    with valkey.client() as client:
        client.hset(one.link.key("orders", "map"), b"x" * 1000, b"v")
        async with running(one, two):
            await poll_until(lambda: two.map.decode_errors == 1)
            client.xadd(one.link.key("orders", "changes"), {b"other": b"field"})
            await poll_until(lambda: two.map.decode_errors == 2)
            one.map.put(b"k", b"v")
            await poll_until(lambda: two.heard == {b"k": b"v"})
