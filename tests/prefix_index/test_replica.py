"""The index shared through a real server: who reads, who follows, and that all see the truth."""

from __future__ import annotations

import asyncio

from tests.prefix_index.replica_parts import Engine, Gateway, converge, running
from tests.support import poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]


async def test_one_gateway_reads_the_events_and_the_other_takes_its_deltas(valkey: Valkey) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    two = Gateway(valkey.url, [engine], name="two")
    async with running(one):
        await poll_until(lambda: one.holds_lease("w"))
        engine.store([10, 20, 30])
        async with running(two):
            await converge([one, two], [engine])
            engine.store([10, 20, 40])
            engine.remove([30])
            engine.store([10], medium="CPU")
            await converge([one, two], [engine])
            assert (one.role("w"), two.role("w")) == ("hold", "tail")
            assert len(engine.readers) == 1
            assert one.replica.age_s() == 0.0
            await poll_until(lambda: two.replica.age_s() < 2.0)


async def test_a_new_gateway_starts_warm_from_the_shared_state(valkey: Valkey) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    async with running(one):
        await poll_until(lambda: one.holds_lease("w"))
        for start in range(0, 5000, 10):
            engine.store([start, start + 4])
        await poll_until(lambda: one.replica.views["w"].publication.is_empty)
        two = Gateway(valkey.url, [engine], name="two")
        async with running(two):
            await converge([two], [engine])
            assert two.replica.views["w"].loads == 1


async def test_a_killed_holder_is_replaced_and_the_next_one_goes_on_where_it_stood(
    valkey: Valkey,
) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    two = Gateway(valkey.url, [engine], name="two")
    async with running(two):
        one.start()
        await poll_until(lambda: one.holds_lease("w") or two.holds_lease("w"))
        first, other = (one, two) if one.holds_lease("w") else (two, one)
        engine.store([10, 20, 30])
        engine.store([10, 20])
        await converge([one, two], [engine])
        generation = other.replica.views["w"].generation
        # The buffer is short: only who goes on from the shared position keeps the cache.
        engine.first_kept = len(engine.log)
        await first.kill()
        await poll_until(lambda: other.holds_lease("w"))
        engine.remove([30])
        engine.remove([20])
        await converge([other], [engine])
        assert other.sources["w"].clears == 0
        assert other.replica.views["w"].generation > generation
        if first is two:
            await one.stop()


async def test_a_gateway_that_ends_gives_its_leases_up_at_once(valkey: Valkey) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    async with running(one):
        await poll_until(lambda: one.holds_lease("w"))
    with valkey.client() as client:
        assert not client.exists(*one.replica.leases.keys("w")[:1])


async def test_a_late_delta_of_a_former_holder_is_refused_by_the_server(valkey: Valkey) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    async with running(one):
        await poll_until(lambda: one.holds_lease("w"))
        engine.store([10])
        await poll_until(lambda: one.replica.views["w"].publication.is_empty)
        with valkey.client() as client:
            key = one.replica.leases.keys("w")[0]
            client.set(key, "other 99", px=60_000)
            before = client.hgetall(one.replica.leases.keys("w")[2])
            engine.store([50])
            await poll_until(lambda: one.replica.publisher.refused["fenced"] > 0)
            assert client.hgetall(one.replica.leases.keys("w")[2]) == before
        await poll_until(lambda: one.role("w") == "tail")
        # What it read and could not publish is not believed: the state in Redis is.
        await poll_until(lambda: len(one.content("w")) == 1)


async def test_a_stream_that_was_trimmed_past_a_gateway_makes_it_read_the_state(
    valkey: Valkey,
) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    two = Gateway(valkey.url, [engine], name="two")
    async with running(one):
        await poll_until(lambda: one.holds_lease("w"))
        async with running(two):
            engine.store([10])
            await converge([one, two], [engine])
            two.replica.tail.at = None  # stands still while the others go on
            with valkey.client() as client:
                two.replica.tail.start = asyncio.Event().wait  # type: ignore[method-assign,assignment]
                engine.store([10, 20])
                await poll_until(lambda: one.replica.views["w"].publication.is_empty)
                client.xtrim(one.replica.leases.stream, maxlen=0)
            del two.replica.tail.start
            engine.store([10, 30])
            await converge([one, two], [engine])
            assert two.replica.views["w"].loads >= 1


async def test_views_come_to_the_truth_while_events_keep_coming(valkey: Valkey) -> None:
    engines = [Engine(f"w{number}") for number in range(3)]
    one = Gateway(valkey.url, engines, name="one")
    two = Gateway(valkey.url, engines, name="two")
    async with running(one):
        await poll_until(lambda: all(one.holds_lease(engine.worker) for engine in engines))
        for step in range(200):
            for number, engine in enumerate(engines):
                engine.store([number * 100_000 + step * 100 + at * 4 for at in range(20)])
        async with running(two):
            for step in range(200):
                for number, engine in enumerate(engines):
                    base = number * 100_000 + step * 100
                    engine.remove([base + 76, base + 72])
                    engine.store([base, base + 4, base + 50])
                    if step == 100 and number == 2:
                        engine.reset()
                await asyncio.sleep(0.005)
            await converge([one, two], engines)


async def test_a_worker_that_restarts_is_void_everywhere(valkey: Valkey) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    two = Gateway(valkey.url, [engine], name="two")
    async with running(one, two):
        await poll_until(lambda: one.holds_lease("w") or two.holds_lease("w"))
        engine.store([10, 20, 30])
        await converge([one, two], [engine])
        engine.restart()
        engine.store([40])
        await converge([one, two], [engine])


async def test_a_removed_worker_leaves_no_key_behind(valkey: Valkey) -> None:
    engines = [Engine("stays"), Engine("goes")]
    one = Gateway(valkey.url, engines, name="one")
    two = Gateway(valkey.url, engines, name="two")
    async with running(one, two):
        for engine in engines:
            engine.store([10, 20])
        await converge([one, two], engines)
        for gateway in (one, two):
            gateway.replica.remove("goes")
            gateway.index.clear("goes")
        with valkey.client() as client:
            await poll_until(lambda: not client.keys("*goes*"))
            assert len(client.keys("*stays*")) == 3
        engines[0].store([10, 20, 30])
        await converge([one, two], engines[:1])
        assert not one.content("goes")


async def test_one_gateways_removal_does_not_take_a_worker_from_those_that_use_it(
    valkey: Valkey,
) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    two = Gateway(valkey.url, [engine], name="two")
    async with running(one, two):
        engine.store([10, 20])
        await converge([one, two], [engine])
        first, other = (one, two) if one.holds_lease("w") else (two, one)
        first.replica.remove("w")
        await poll_until(lambda: other.holds_lease("w"))
        engine.store([10, 30])
        await converge([other], [engine])


async def test_a_worker_that_fell_silent_is_silent_for_all(valkey: Valkey) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    two = Gateway(valkey.url, [engine], name="two")
    async with running(one):
        await poll_until(lambda: one.holds_lease("w"))
        engine.store([10])
        async with running(two):
            await converge([one, two], [engine])
            one.sources["w"].silent = True
            await poll_until(lambda: two.sources["w"].silent)
            one.sources["w"].silent = False
            await poll_until(lambda: not two.sources["w"].silent)
