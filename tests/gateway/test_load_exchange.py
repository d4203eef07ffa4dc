"""Gateways that share their load over a real server: what each sees, and when it stops to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from math import inf

import pytest
from prometheus_client import CollectorRegistry

from gateway.replicas.load import LoadExchange
from gateway.replicas.metrics import LoadCollector
from gateway.routing.pool import Pool
from prefix_index.replica.link import Link
from tests.gateway.routing_parts import make_pool
from tests.support import poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]


class Side:
    """One gateway's end of the exchange, on a clock of its own."""

    def __init__(self, url: str, name: str, *, skew_s: float = 0.0, pool: Pool | None = None):
        self.skew_s = skew_s
        self.pool = make_pool(2, reads=False) if pool is None else pool
        self.link = Link(url, namespace="test", timeout_s=0.3)
        self.exchange = LoadExchange(self.link, [self.pool], gateway=name, clock=self.now_s)
        self._tasks: list[asyncio.Task[None]] = []

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() + self.skew_s

    def start(self) -> None:
        self._tasks = [
            asyncio.ensure_future(self.link.run()),
            asyncio.ensure_future(self.exchange.run()),
        ]

    async def stop(self) -> None:
        for task in reversed(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    def silence(self) -> None:
        """End as kill -9 would: without a word."""
        self.exchange.channels.clear()

    def in_flight(self, worker: str = "w0") -> int:
        assert self.pool.others is not None
        found = self.pool.others.of(worker)
        return 0 if found is None else found.in_flight

    def age_s(self) -> float:
        assert self.pool.others is not None
        return self.pool.others.age_s(self.now_s())


Start = Callable[..., Side]


@pytest.fixture
async def start(valkey: Valkey) -> AsyncIterator[Start]:
    sides: list[Side] = []

    def begin(name: str, **options: float) -> Side:
        side = Side(valkey.url, name, **options)
        side.start()
        sides.append(side)
        return side

    yield begin
    for side in sides:
        await side.stop()


def charge(side: Side, worker: str = "w0", tokens: int = 100):  # type: ignore[no-untyped-def]
    return side.pool.workers[worker].books.charge(
        side.now_s(), prompt_tokens=tokens, uncached_tokens=tokens, prefill_s=0.5
    )


async def test_load_is_seen_by_all_others_and_gone_when_it_is_over(start: Start) -> None:
    sides = [start(name, skew_s=skew) for name, skew in (("a", 0.0), ("b", 2.0), ("c", -2.0))]
    await poll_until(lambda: all(side.age_s() == 0.0 for side in sides))
    charged = charge(sides[0])
    charge(sides[1], tokens=50)

    await poll_until(lambda: [side.in_flight() for side in sides] == [1, 1, 2])
    others = sides[2].pool.others
    assert others is not None
    seen = others.of("w0")
    assert seen is not None
    assert (seen.queued_tokens, seen.queued_s) == (150, pytest.approx(1.0, abs=1e-5))
    assert abs(seen.progress_at_s - sides[2].now_s()) < 1.0, "told on a clock two seconds away"
    sides[0].pool.workers["w0"].books.finish(charged)
    await poll_until(lambda: [side.in_flight() for side in sides] == [1, 0, 1])


async def test_a_gateway_that_is_silent_is_dropped(start: Start) -> None:
    a, b = start("a"), start("b")
    charge(a)
    await poll_until(lambda: b.in_flight() == 1)

    a.silence()

    await poll_until(lambda: b.in_flight() == 0)
    assert b.age_s() == 0.0


async def test_a_gateway_that_says_goodbye_is_dropped_at_once(start: Start) -> None:
    a, b = start("a"), start("b")
    charge(a)
    await poll_until(lambda: b.in_flight() == 1)
    heard_s = b.now_s()

    await a.stop()

    await poll_until(lambda: b.in_flight() == 0)
    assert b.now_s() - heard_s < 1.5


async def test_a_gateway_that_comes_later_sees_what_is_in_flight(start: Start) -> None:
    a = start("a")
    charge(a)
    hashes = [bytes([n]) * 16 for n in range(30)]
    assert a.pool.pending.lead("w0", hashes) is not None
    await poll_until(lambda: a.age_s() == 0.0)

    late = start("late")

    await poll_until(lambda: late.in_flight() == 1)
    await poll_until(lambda: late.pool.pending.credit(hashes) == {"w0": 30})


@pytest.mark.parametrize("fault", ["killed", "stands still"])
async def test_without_the_server_the_view_is_unknown_and_comes_back(
    fault: str, start: Start, valkey: Valkey
) -> None:
    a, b = start("a"), start("b")
    charge(a)
    await poll_until(lambda: b.in_flight() == 1)

    valkey.stop() if fault == "killed" else valkey.pause()

    await poll_until(lambda: b.age_s() > 0.15, what="the age tells at once")
    await poll_until(lambda: b.age_s() == inf and b.in_flight() == 0)
    valkey.start() if fault == "killed" else valkey.resume()
    await poll_until(lambda: b.in_flight() == 1 and b.age_s() < 0.15)


async def test_a_server_that_is_away_at_the_start_is_found_later(
    start: Start, valkey: Valkey
) -> None:
    valkey.stop()
    a, b = start("a"), start("b")
    charge(a)
    await asyncio.sleep(0.1)
    assert b.age_s() == inf

    valkey.start()

    await poll_until(lambda: b.in_flight() == 1)


async def test_hostile_messages_are_counted_and_change_nothing(
    start: Start, valkey: Valkey
) -> None:
    a, b = start("a"), start("b")
    charge(a)
    await poll_until(lambda: b.in_flight() == 1)
    name = next(iter(b.exchange.channels))
    with valkey.client() as client:
        for data in (b"", b"\xc1" * 9, b"x" * 300_000, b"\x91" * 5000):
            client.publish(name, data)

    await poll_until(lambda: b.exchange.errors["BadMessage"] == 4)
    assert b.in_flight() == 1
    registry = CollectorRegistry()
    registry.register(LoadCollector(b.exchange))
    assert registry.get_sample_value("warmlane_load_errors_total", {"kind": "BadMessage"}) == 4
    assert registry.get_sample_value("warmlane_other_gateways", {"pool": "chat"}) == 1
    age = "warmlane_load_age_seconds"
    await poll_until(lambda: registry.get_sample_value(age, {"pool": "chat"}) is not None)


async def test_pools_do_not_hear_each_other(start: Start, valkey: Valkey) -> None:
    a = start("a")
    other = make_pool(2, reads=False)
    other.name = "other"
    b = Side(valkey.url, "b", pool=other)
    b.start()
    charge(a)
    await poll_until(lambda: a.age_s() == b.age_s() == 0.0)
    await poll_until(lambda: b.exchange.num_sent > 2)

    assert b.in_flight() == 0
    assert b.exchange.num_heard == 0
    await b.stop()
