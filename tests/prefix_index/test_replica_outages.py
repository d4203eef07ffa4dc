"""Redis away, slow, emptied, full of rubbish: the views stay true, and nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time

import pytest
import redis

from prefix_index.replica.lease import LEASE_S
from tests.prefix_index.replica_parts import Engine, Gateway, converge, running
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]


def pair(url: str, engines: list[Engine], **options: float) -> tuple[Gateway, Gateway]:
    one = Gateway(url, engines, name="one", timeout_s=options.get("timeout_s", 1.0))
    return one, Gateway(url, engines, name="two", timeout_s=options.get("timeout_s", 1.0))


async def test_without_redis_from_the_start_everybody_reads_all_events_itself() -> None:
    engine = Engine("w")
    one, two = pair(f"redis://127.0.0.1:{free_port()}", [engine])
    async with running(one, two):
        engine.store([10, 20])
        await converge([one, two], [engine])
        assert (one.role("w"), two.role("w")) == ("alone", "alone")
        assert one.replica.age_s() == 0.0


@pytest.mark.parametrize("fault", ["kill", "stall"])
async def test_an_outage_freezes_no_view_and_ends_in_one_truth(valkey: Valkey, fault: str) -> None:
    engines = [Engine("a"), Engine("b")]
    one, two = pair(valkey.url, engines, timeout_s=0.2)
    async with running(one, two):
        for engine in engines:
            engine.store([10, 20, 30])
        await converge([one, two], engines)
        (valkey.stop if fault == "kill" else valkey.pause)()
        for engine in engines:
            engine.remove([30])
            engine.store([10, 50])
        # Nobody asks Redis, so nobody can wait for it: the truth comes from the workers.
        await converge([one, two], engines)
        await poll_until(lambda: {one.role("a"), two.role("a")} == {"alone"})
        for engine in engines:
            engine.store([70])
        (valkey.start if fault == "kill" else valkey.resume)()
        await poll_until(
            lambda: all(
                {one.role(name), two.role(name)} == {"hold", "tail"} for name in ("a", "b")
            ),
            deadline_s=10,
        )
        for engine in engines:
            engine.store([10, 60])
            engine.remove([50])
        await converge([one, two], engines)
        assert [len(engine.readers) for engine in engines] == [1, 1]


async def test_the_age_grows_until_the_events_are_read_here(valkey: Valkey) -> None:
    engine = Engine("w")
    one, two = pair(valkey.url, [engine], timeout_s=0.2)
    async with running(one, two):
        engine.store([10])
        await converge([one, two], [engine])
        follower = two if one.holds_lease("w") else one
        await poll_until(lambda: follower.replica.age_s() < 2)
        valkey.stop()
        oldest_s = 0.0

        async def is_alone() -> bool:
            nonlocal oldest_s
            oldest_s = max(oldest_s, follower.replica.age_s())
            return follower.role("w") == "alone"

        await poll_until(is_alone)
        assert oldest_s > LEASE_S / 2
        assert follower.replica.age_s() == 0.0


async def test_a_server_that_restarts_empty_under_load_is_filled_again(valkey: Valkey) -> None:
    engines = [Engine("a"), Engine("b")]
    one, two = pair(valkey.url, engines)
    async with running(one, two):
        for at in range(0, 4000, 8):
            engines[0].store([at, at + 4])
        await converge([one, two], engines)
        valkey.stop()
        valkey.start()
        for at in range(0, 2000, 8):
            engines[0].remove([at + 4])
            engines[1].store([at, at + 4])
            if at % 400 == 0:
                await asyncio.sleep(0.02)
        await converge([one, two], engines)
        third = Gateway(valkey.url, engines, name="three")
        async with running(third):
            await converge([third], engines)
            assert third.role("a") == "tail"


@pytest.mark.parametrize(
    "loss", ["flushall", "state", "meta", "stream", "lease", "generations", "all of one worker"]
)
async def test_whatever_is_deleted_under_their_hands_comes_back(valkey: Valkey, loss: str) -> None:
    engine = Engine("w")
    one, two = pair(valkey.url, [engine])
    async with running(one, two):
        engine.store([10, 20, 30])
        await converge([one, two], [engine])
        await poll_until(lambda: one.replica.age_s() < 3 and two.replica.age_s() < 3)
        lease, meta, state = one.replica.leases.keys("w")
        names = {
            "state": [state],
            "meta": [meta],
            "stream": [one.replica.leases.stream],
            "lease": [lease],
            "generations": [one.link.key("pool", "generations")],
            "all of one worker": [lease, meta, state],
        }
        with valkey.client() as client:
            if loss == "flushall":
                client.flushall()
            else:
                assert client.delete(*names[loss])
            await poll_until(lambda: client.exists(lease, meta) == 2)
            engine.store([10, 40])
            engine.remove([30])
            await converge([one, two], [engine])
            await poll_until(lambda: client.hlen(state) == len(engine.truth()))
        async with running(third := Gateway(valkey.url, [engine], name="three")):
            await converge([third], [engine])


HOSTILE = [b"", b"\x00", b"\xff" * 17, os.urandom(40), b"\x80\x04\x95\x00.", b"x" * 100_000]


def spoil(client: redis.Redis, gateway: Gateway, what: str, value: bytes) -> None:
    """Write something that no gateway wrote."""
    lease, meta, state = gateway.replica.leases.keys("w")
    stream = gateway.replica.leases.stream
    keys = {"lease": lease, "meta": meta, "state": state, "stream": stream}
    match what.split():
        case ["type", name]:
            client.delete(keys[name])
            client.rpush(keys[name], value)
        case ["field", "of", "state"]:
            client.hset(state, os.urandom(16), value)
        case ["name", "in", "state"]:
            client.hset(state, value + b"!", b"\x00" + bytes(16))
        case ["value", "of", "lease"]:
            client.set(lease, value)
            client.pexpire(lease, 2000)
        case ["meta", name]:
            client.hset(meta, name, value)
        case ["entry", name]:
            fields = {"w": b"w", "p": b"*", "h": b"", "d": b""} | {name: value}
            client.xadd(stream, fields)  # type: ignore[arg-type]
        case ["entry"]:
            client.xadd(stream, {b"other": value})
        case _:
            raise AssertionError(what)


@pytest.mark.parametrize(
    "what",
    [
        *("type lease", "type meta", "type state", "type stream"),
        *("field of state", "name in state", "value of lease"),
        *("meta id", "meta head", "meta block_size", "meta epoch", "meta sequence"),
        *("entry w", "entry p", "entry h", "entry d", "entry"),
    ],
)
async def test_rubbish_in_redis_is_isolated_and_replaced_by_the_truth(
    valkey: Valkey, what: str
) -> None:
    engines = [Engine("w"), Engine("other")]
    one, two = pair(valkey.url, engines)
    async with running(one):
        await poll_until(lambda: all(one.holds_lease(engine.worker) for engine in engines))
        for engine in engines:
            engine.store([10, 20, 30])
        await poll_until(lambda: all(v.publication.is_empty for v in one.replica.views.values()))
        with valkey.client() as client:
            for value in HOSTILE:
                spoil(client, one, what, value)
        async with running(two):
            await converge([two], engines[1:])
            for engine in engines:
                engine.store([10, 40])
            await converge([one, two], engines)
        assert not any(task.done() for task in one._tasks), "nothing gave up"


async def test_versions_with_other_schemas_run_side_by_side(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine("w")
    old = Gateway(valkey.url, [engine], name="old")
    async with running(old):
        engine.store([10, 20])
        await converge([old], [engine])
        monkeypatch.setattr("prefix_index.replica.keys.SCHEMA", "v2")
        new = Gateway(valkey.url, [engine], name="new")
        monkeypatch.setattr("prefix_index.replica.keys.SCHEMA", "v1")
        new.link.key = lambda pool, *parts: ":".join(  # type: ignore[method-assign]
            ("t", "v2", f"{{{pool}}}", *parts)
        )
        new.replica = type(new.replica)(new.link, "pool", "new", new.index)
        new.replica.add("w", new.sources["w"])
        async with running(new):
            await poll_until(lambda: new.holds_lease("w"))
            engine.store([10, 30])
            await converge([old, new], [engine])
            assert old.holds_lease("w")


async def test_pools_that_disagree_on_the_block_size_do_not_read_each_other(
    valkey: Valkey,
) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one")
    two = Gateway(valkey.url, [engine], name="two", block_size=8)
    async with running(one):
        await poll_until(lambda: one.holds_lease("w"))
        engine.store([10, 20])
        await poll_until(lambda: one.replica.views["w"].publication.is_empty)
        async with running(two):
            await poll_until(lambda: two.role("w") == "alone")
            assert not two.content("w")


async def test_clocks_that_differ_by_seconds_change_nothing(valkey: Valkey) -> None:
    engine = Engine("w")
    one = Gateway(valkey.url, [engine], name="one", clock=lambda: time.monotonic() + 7200)
    two = Gateway(valkey.url, [engine], name="two", clock=lambda: 0.9 * time.monotonic() - 3)
    async with running(one, two):
        engine.store([10, 20])
        await converge([one, two], [engine])
        await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})
        for step in range(30):
            engine.store([10, 100 + 10 * step])
            await asyncio.sleep(0.1)
        await converge([one, two], [engine])
        generations = {view.generation for g in (one, two) for view in g.replica.views.values()}
        assert len(generations) == 1


async def test_a_holder_that_was_frozen_does_not_overwrite_its_successor(valkey: Valkey) -> None:
    """Its process stood still past its lease: what it then sends is refused."""
    engine = Engine("w")
    one, two = pair(valkey.url, [engine])
    async with running(one, two):
        engine.store([10, 20])
        await converge([one, two], [engine])
        await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})
        frozen, other = (one, two) if one.holds_lease("w") else (two, one)
        tick = frozen.replica.leases.tick
        waiting = asyncio.Event()

        async def stand_still(wanted: dict[str, bool]) -> object:
            await waiting.wait()
            return await tick(wanted)

        frozen.replica.leases.tick = stand_still  # type: ignore[method-assign,assignment]
        await poll_until(lambda: other.holds_lease("w"))
        engine.store([10, 30])
        waiting.set()
        await poll_until(lambda: frozen.role("w") == "tail")
        engine.store([10, 40])
        await converge([one, two], [engine])


@pytest.mark.parametrize("call", [1, 2])
async def test_a_load_that_was_cut_off_is_made_again(valkey: Valkey, call: int) -> None:
    """Also where nothing is published afterwards that would show that a part is missing."""
    engine = Engine("w")
    one, two = pair(valkey.url, [engine])
    async with running(one, two):
        engine.store([10 * number for number in range(1, 600)])
        await converge([one, two], [engine])
        await poll_until(lambda: {one.role("w"), two.role("w")} == {"hold", "tail"})
        follower = one if one.role("w") == "tail" else two
        client = follower.link.client
        scan, calls = client.hscan, 0

        async def cut_off(*args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call:
                raise redis.ConnectionError
            return await scan(*args, **options)

        client.hscan = cut_off  # type: ignore[method-assign]
        block, (parent, _) = next(iter(follower.content("w").items()))
        follower.index.set_copies("w", block, parent, 7)
        follower.replica.views["w"].needs_load = True
        await poll_until(lambda: calls >= call)
        await converge([one, two], [engine])


async def test_many_gateways_through_many_outages_come_to_the_truth(valkey: Valkey) -> None:
    rng = random.Random(7)
    engines = [Engine(f"w{number}") for number in range(3)]
    gateways = [Gateway(valkey.url, engines, name=f"g{number}") for number in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running(*gateways))
        for step in range(60):
            engine = rng.choice(engines)
            base = rng.randrange(20) * 100
            match rng.randrange(8):
                case 0:
                    engine.remove([base + 4, base])
                case 1 if step % 3 == 0:
                    engine.reset()
                case 2 if step % 20 == 0:
                    valkey.stop()
                    valkey.start()
                case _:
                    engine.store([base, base + 4, base + 8 + 4 * rng.randrange(5)])
            await asyncio.sleep(rng.random() * 0.1)
        await converge(gateways, engines)
