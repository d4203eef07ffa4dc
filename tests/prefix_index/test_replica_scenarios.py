"""Whatever happens to engines, gateways and Redis, in any order: all views end in the truth."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.prefix_index.replica_parts import Engine, Gateway, converge, running
from tests.support import poll_until
from tests.valkey import Valkey

WORKERS = 3

workers = st.integers(0, WORKERS - 1)
bases = st.integers(0, 12).map(lambda number: 100 * number)
events = st.one_of(
    st.tuples(st.just("store"), workers, bases, st.integers(1, 5)),
    st.tuples(st.just("offload"), workers, bases, st.integers(1, 3)),
    st.tuples(st.just("remove"), workers, bases, st.integers(1, 5)),
    st.tuples(st.just("again"), workers, bases, st.integers(1, 5)),
)
upheavals = st.one_of(
    st.tuples(st.just("reset"), workers),
    st.tuples(st.just("restart"), workers),
    st.tuples(st.just("short buffer"), workers),
    st.tuples(st.just("kill connections")),
    st.tuples(st.just("flush")),
    st.tuples(st.just("restart redis")),
    st.tuples(st.just("lose leases")),
    st.tuples(st.just("trim stream")),
    st.tuples(st.just("replace gateway")),
    st.tuples(st.just("breathe")),
)
# Mostly events, as in life.
steps = st.lists(st.one_of(events, events, events, upheavals), min_size=20, max_size=60)


def happen(step: tuple[object, ...], engines: list[Engine], valkey: Valkey) -> None:
    """Let one thing happen to an engine or to the server."""
    match step:
        case ("store", int(at), int(base), int(length)):
            engines[at].store([base + 4 * number for number in range(length)])
        case ("again", int(at), int(base), int(length)):
            engines[at].store([base + 4 * number for number in range(length)])
            engines[at].store([base + 4 * number for number in range(length)])
        case ("offload", int(at), int(base), int(length)):
            engines[at].store([base + 4 * number for number in range(length)], medium="CPU")
        case ("remove", int(at), int(base), int(length)):
            engines[at].remove([base + 4 * (length - 1)])
        case ("reset", int(at)):
            engines[at].reset()
        case ("restart", int(at)):
            engines[at].restart()
            engines[at].store([1])
        case ("short buffer", int(at)):
            # A reader that is up to date loses nothing; one that begins later gets no more.
            engines[at].first_kept = len(engines[at].log)
        case ("kill connections",):
            with valkey.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
        case ("flush",):
            with valkey.client() as client:
                client.flushall()
        case ("restart redis",):
            valkey.stop()
            valkey.start()
        case ("lose leases",):
            with valkey.client() as client:
                for key in client.keys("*:lease:*"):
                    client.delete(key)
        case ("trim stream",):
            with valkey.client() as client:
                for key in client.keys("*:deltas"):
                    client.xtrim(key, maxlen=0, approximate=False)


async def play(script: list[tuple[object, ...]]) -> None:
    with tempfile.TemporaryDirectory(prefix="wl-valkey-") as folder:
        valkey = Valkey(Path(folder))
        valkey.start()
        try:
            await _play(script, valkey)
        finally:
            valkey.stop()


async def _play(script: list[tuple[object, ...]], valkey: Valkey) -> None:
    engines = [Engine(f"w{number}") for number in range(WORKERS)]
    one, two = (Gateway(valkey.url, engines, name=name) for name in ("one", "two"))
    three: Gateway | None = None
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running(one, two))
        for step in script:
            if step == ("breathe",):
                await asyncio.sleep(0.1)
            elif step == ("replace gateway",) and three is None:
                await one.kill()
                one = three = Gateway(valkey.url, engines, name="three")
                await stack.enter_async_context(running(three))
            else:
                happen(step, engines, valkey)
            await asyncio.sleep(0.002)
        for engine in engines:
            # Whoever could not go on begins with what the buffer has: the truth must be in it.
            engine.first_kept = 0
            engine.reset()
            engine.store([7, 11, 15])
        await converge([one, two], engines, deadline_s=40)
        await poll_until(lambda: one.replica.age_s() < 3 and two.replica.age_s() < 3)
        for engine in engines:
            engine.store([7, 11, 19])
            engine.remove([15])
        await converge([one, two], engines, deadline_s=40)


@pytest.mark.timeout(600)
@settings(
    max_examples=6,
    deadline=None,
    # A failing script is minutes to shrink, and short enough to read.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(steps)
def test_two_gateways_come_to_the_truth_whatever_happens(script: list[tuple[object, ...]]) -> None:
    asyncio.run(play(script))


calm = st.lists(st.one_of(events, events, st.tuples(st.just("breathe"))), min_size=20, max_size=60)


@pytest.mark.timeout(600)
@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(calm, st.lists(st.sampled_from(["flush", "lose leases", "trim stream", "kill connections"])))
def test_no_upheaval_of_redis_alone_costs_a_view_anything(
    script: list[tuple[object, ...]], losses: list[str]
) -> None:
    """Engines lose nothing here, so neither may any view: no reset hides a wrong block."""

    async def calmly() -> None:
        with tempfile.TemporaryDirectory(prefix="wl-valkey-") as folder:
            valkey = Valkey(Path(folder))
            valkey.start()
            engines = [Engine(f"w{number}") for number in range(WORKERS)]
            one, two = (Gateway(valkey.url, engines, name=name) for name in ("one", "two"))
            try:
                async with running(one, two):
                    for number, step in enumerate(script):
                        happen(step, engines, valkey)
                        if number % 10 == 9 and losses:
                            happen((losses[number // 10 % len(losses)],), engines, valkey)
                        await asyncio.sleep(0.1 if step == ("breathe",) else 0.002)
                    await converge([one, two], engines, deadline_s=40)
            finally:
                valkey.stop()

    asyncio.run(calmly())
