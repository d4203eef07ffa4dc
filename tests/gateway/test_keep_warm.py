"""Keep warm: a worker whose cache became empty is filled again before it has its full share."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.scrape import Scrape
from gateway.replicas.load import LoadExchange
from gateway.routing.others import OthersLoad
from gateway.routing.slow_start import FIRST_SHARE, LASTS_S, SlowStart
from gateway.warm.store import EXPIRES_S, PromptStore, Stored
from tests.fakes.engine import RawEngine, Script, Seen, answer
from tests.gateway.routing_parts import Clock, chat, dispatcher, hold, make_pool
from tests.gateway.warm_parts import (
    Caching,
    Warming,
    asking,
    end,
    item,
    text_of,
    warming,
    warming_over,
)
from tests.support import poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]

KEEP = {"keep_warm": {"enabled": True, "store": True}}
CHARS = 1200


async def use(gateway: Warming, names: list[str], *, times: int = 2) -> None:
    """Let clients ask about documents, often enough that their beginning is known to be shared."""
    for number in range(times):
        for name in names:
            await gateway.ask(text_of(name, CHARS), f"{number}?", name)


async def restart(gateway: Warming, engine: Caching, worker: str = "w0") -> None:
    """Have a worker come back as a new process, and let the gateway see it."""
    engine.restart()
    watch = gateway.gateway.fleet.watches[worker]
    await watch._scrape()
    gateway.gateway.warmer.keeper.look()


def done(gateway: Warming) -> bool:
    tasks = gateway.gateway.warmer.keeper._tasks.values()
    return all(task.done() for task in tasks)


async def test_a_restarted_worker_gets_back_what_it_served(tmp_path: Path) -> None:
    engine = Caching()
    names = [f"d{k}" for k in range(4)]
    async with warming_over(tmp_path, engine, **KEEP) as (gateway, _):
        await use(gateway, names)
        await restart(gateway, engine)
        await poll_until(lambda: done(gateway), what="it is filled")
        before = engine.computed_tokens
        answers = [await gateway.ask(text_of(name, CHARS), "new?", name) for name in names]
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
        assert min(cached) >= 1024
        assert engine.computed_tokens - before < 0.5 * sum(
            a["usage"]["prompt_tokens"] for a in answers
        )
        worker = gateway.gateway.fleet.pools[0].workers["w0"]
        assert worker.slow_start is None
        async with gateway.session.get(gateway.url + "/metrics") as response:
            text = await response.text()
        assert 'warmlane_warm_keep_runs_total{pool="chat",why="restarted"} 1.0' in text
        (state,) = (await gateway.get("/admin/v1/warm"))["keep_warm"]
        assert (state["worker"], state["why"], state["warm"]) == ("w0", "restarted", 4)


async def test_a_reset_cache_is_filled_again(tmp_path: Path) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine, **KEEP) as (gateway, _):
        await use(gateway, ["a"])
        gateway.gateway.warmer.keeper.look()
        status, row = await gateway.post("/admin/v1/workers/w0/reset", {})
        assert status == 200, row
        gateway.gateway.warmer.keeper.look()
        await poll_until(lambda: bool(engine.held) and done(gateway), what="it is filled")
        assert gateway.gateway.warmer.counts.keep_runs["chat", "cleared"] == 1


async def test_without_keep_warm_nothing_is_kept_or_filled(tmp_path: Path) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine) as (gateway, _):
        await use(gateway, ["a"])
        await restart(gateway, engine)
        assert len(gateway.gateway.warmer.store) == 0
        assert not engine.held
        assert gateway.gateway.fleet.pools[0].workers["w0"].slow_start is None


async def test_without_store_no_prompt_is_kept(tmp_path: Path) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine, keep_warm={"enabled": True}) as (gateway, _):
        assert any("store: true" in warning for warning in gateway.gateway.warnings)
        await use(gateway, ["a"])
        assert end(await gateway.warm([item("b")]))["warm"] == 1
        assert len(gateway.gateway.warmer.store) == 0
        await restart(gateway, engine)
        # There is nothing that its users would have to wait for.
        assert gateway.gateway.fleet.pools[0].workers["w0"].slow_start is None


async def test_the_budget_bounds_what_is_filled(tmp_path: Path) -> None:
    engine = Caching()
    keep = {"keep_warm": {"enabled": True, "store": True, "budget_tokens": 2200}}
    async with warming_over(tmp_path, engine, **keep) as (gateway, _):
        await use(gateway, [f"d{k}" for k in range(4)])
        # The hottest ones are chosen.
        await use(gateway, ["d3", "d1"], times=3)
        await restart(gateway, engine)
        await poll_until(lambda: done(gateway), what="it is filled")
        run = gateway.gateway.warmer.keeper.runs["w0"][1]
        assert set(run.standing.results) == {"chat/document:d3", "chat/document:d1"}
        assert run.standing.computed_tokens <= 2200


async def test_a_worker_starts_slowly_while_it_is_filled(tmp_path: Path) -> None:
    gate = asyncio.Event()
    engines = [Caching(), Caching()]

    def wait(seen: Seen) -> Script | None:
        is_warming = seen.target == "/v1/completions"
        return [gate, *answer(b"{}", 500)] if is_warming and not gate.is_set() else None

    async with warming_over(tmp_path, *engines, **KEEP) as (gateway, _):
        await use(gateway, [f"d{k}" for k in range(6)])
        pool = gateway.gateway.fleet.pools[0]
        first = next(w for w in pool.workers if engines[int(w[1])].held)
        engine = engines[int(first[1])]
        engine.before = wait
        await restart(gateway, engine, first)
        (row,) = (r for r in (await gateway.get("/admin/v1/workers"))["workers"]
                  if r["id"] == first)  # fmt: skip
        assert row["state"] == "warming"
        assert FIRST_SHARE <= row["share"] < 0.5
        whys = set()
        for number in range(12):
            await gateway.ask(text_of(f"cold {number}"), "?")
            _, told = await gateway.post("/admin/v1/explain",
                                         {"model": "m", "messages": [{"role": "user",
                                          "content": f"{number}"}]})  # fmt: skip
            whys |= {c["reason"] for c in told["candidates"] if c["worker"] == first}
        assert "warming" in whys
        gate.set()
        await poll_until(
            lambda: pool.workers[first].slow_start is None, deadline_s=60.0, what="its full share"
        )


async def test_what_had_no_room_beside_requests_is_filled_when_they_are_over(
    tmp_path: Path,
) -> None:
    engine, gate = Caching(capacity_tokens=4096), asyncio.Event()
    async with warming_over(tmp_path, engine, **KEEP) as (gateway, _):
        await use(gateway, ["a", "b"])
        late: Script = [gate, *answer(b"{}", 500)]
        engine.before = lambda seen: late if "/chat/" in seen.target else None
        long = asyncio.create_task(gateway.ask(text_of("long", 3000), "?"))
        books = gateway.gateway.fleet.pools[0].workers["w0"].books
        await poll_until(lambda: books.active_tokens > 3000, what="it is in flight")
        await restart(gateway, engine)
        runs = gateway.gateway.warmer.keeper.runs
        await poll_until(
            lambda: "w0" in runs and runs["w0"][1].standing.num_without_room == 2,
            what="there is no room",
        )
        assert not engine.held
        engine.before = None
        gate.set()
        await asyncio.gather(long, return_exceptions=True)
        await poll_until(lambda: done(gateway), what="it is filled")
        answers = [await gateway.ask(text_of(name, CHARS), "new?", name) for name in "ab"]
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
        assert min(cached) >= 1024


async def test_a_worker_that_was_away_starts_slowly_until_it_is_known_to_be_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.warm.keep.DOUBT_S", 60.0)
    async with warming_over(tmp_path, Caching(), **KEEP) as (gateway, _):
        keeper = gateway.gateway.warmer.keeper
        worker = gateway.gateway.fleet.pools[0].workers["w0"]
        watch = gateway.gateway.fleet.watches["w0"]
        await watch._scrape()
        keeper.look()
        now_s = asyncio.get_running_loop().time()
        while worker.health.ready:
            worker.health.check_failed(now_s, timed_out=False, is_streaming=False)
        watch.scrape = Scrape()
        keeper.look()
        worker.health.check_succeeded(now_s)
        keeper.look()
        # Whoever waited for it would all go there now, and it may be empty.
        assert worker.slow_start is not None
        assert worker.slow_start.share(now_s) < 0.5
        await watch._scrape()
        keeper.look()
        assert worker.slow_start is None


async def test_a_worker_that_dies_while_it_is_filled_is_given_up(tmp_path: Path) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine, **KEEP) as (gateway, _):
        await use(gateway, ["a", "b"])
        engine.before = lambda _: answer(b"{}", 500)
        await restart(gateway, engine)
        await poll_until(lambda: done(gateway), what="it gives up")
        assert gateway.gateway.fleet.pools[0].workers["w0"].slow_start is None
        assert gateway.gateway.warmer.counts.failed["w0"] == 2


async def heard(teller: Warming, hearer: Warming) -> None:
    """Wait until one gateway has heard of all that another has routed so far."""
    text = text_of(f"the last of {teller.url}")
    await teller.ask(text, "?")
    pool = hearer.gateway.fleet.pools[0]
    assert pool.reader is not None
    assert pool.index is not None
    index, last = pool.index, pool.reader.chat(asking(text, "?")).complete().block_hashes[-1]
    await poll_until(lambda: index.holds("w0", last), what="it is heard")


async def test_of_several_gateways_one_fills_a_worker_and_all_let_it_start_slowly(
    tmp_path: Path, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A box that is busy for longer must not make them believe that they are alone.
    monkeypatch.setattr("gateway.routing.others.GONE_S", 60.0)
    engine = Caching()
    index = {"backend": "redis", "url": valkey.url}
    async with (
        RawEngine(engine.respond) as raw,
        warming(tmp_path, raw.url, index=index, **KEEP) as first,
        warming(tmp_path, raw.url, index=index, **KEEP) as second,
    ):
        both = [first.gateway, second.gateway]
        exchanges = [gateway.exchange for gateway in both]
        await poll_until(
            lambda: all(e is not None and len(e.others["chat"]) == 1 for e in exchanges),
            what="they hear each other",
        )
        for gateway in (first, second):
            await use(gateway, ["a", "b"])
            gateway.gateway.warmer.keeper.look()
        # A process that starts takes longer than news of what was routed to the one before.
        await heard(first, second)
        await heard(second, first)
        raw.seen.clear()
        engine.restart()
        for gateway in (first, second):
            await gateway.gateway.fleet.watches["w0"]._scrape()
            gateway.gateway.warmer.keeper.look()
        await poll_until(lambda: done(first) and done(second), what="it is filled")
        assert sum(g.warmer.counts.keep_runs["chat", "restarted"] for g in both) == 1
        assert sum(seen.target == "/v1/completions" for seen in raw.seen) == 2
        # The other one ends the slow start when its time has come, or its own index says so.
        slow = [g.fleet.pools[0].workers["w0"].slow_start for g in both]
        assert sum(start is None for start in slow) >= 1


async def test_the_hot_list_can_be_warmed_at_once(tmp_path: Path) -> None:
    engines = [Caching(), Caching()]
    async with warming_over(tmp_path, *engines, **KEEP) as (gateway, _):
        await use(gateway, ["a", "b"])
        for engine in engines:
            engine.held.clear()
        async with gateway.session.post(
            gateway.url + "/admin/v1/warm", json={"from_live": {"limit": 10}, "model": "m"}
        ) as response:
            lines = (await response.read()).splitlines()
        assert b'"warm":2' in lines[-1]


# The share of a worker that starts slowly.


def test_the_share_grows_from_little_to_all_and_ends_by_itself() -> None:
    start = SlowStart(100.0)
    assert start.share(100.0) == pytest.approx(FIRST_SHARE)
    assert start.share(100.0 + LASTS_S / 2) == pytest.approx(FIRST_SHARE + (1 - FIRST_SHARE) / 4)
    assert start.share(100.0 + LASTS_S) == 1.0
    assert not start.is_over(99.0 + LASTS_S)
    assert start.is_over(100.0 + LASTS_S)


def test_as_many_requests_are_let_in_as_the_share_says() -> None:
    start = SlowStart(0.0)
    let_in = sum(start.lets_in(LASTS_S / 2) for _ in range(1000))
    assert let_in == pytest.approx(1000 * start.share(LASTS_S / 2), abs=1)


async def test_what_a_slow_worker_holds_goes_there_at_once() -> None:
    pool, clock = make_pool(2), Clock()
    routes = dispatcher(pool, clock)
    plan = await routes.plan(pool, chat("x" * 500), in_full=True)
    hold(pool, "w0", plan.prompt)
    pool.workers["w0"].slow_start = SlowStart(clock())
    for _ in range(5):
        assert routes.choose(plan).worker == "w0"
    cold = await routes.plan(pool, chat("y" * 500), in_full=True)
    assert [routes.choose(cold).worker for _ in range(9)] == ["w1"] * 9
    # Nobody is turned away for it.
    pool.workers["w1"].draining = True
    assert routes.choose(cold).worker == "w0"
    pool.workers["w1"].draining = False
    clock.now_s += LASTS_S
    assert [c.why for c in routes.choose(cold).input.candidates] == ["ok", "ok"]


def test_one_of_the_gateways_that_hear_each_other_fills_a_worker() -> None:
    pool, clock = make_pool(1), Clock()

    class Named(LoadExchange):
        def __init__(self, name: str, others: list[str]) -> None:
            self._gateway, self._clock, self._heard_self_s = name, clock, clock()
            load = OthersLoad()
            for other in others:
                load.report(other, {}, clock())
            self.channels = {"c": type("Channel", (), {"others": load, "pool": pool.name})()}

    names = ["g1", "g2", "g3"]
    for worker in (f"w{k}" for k in range(20)):
        chosen = [
            name
            for name in names
            if Named(name, [n for n in names if n != name]).is_first(pool.name, worker)
        ]
        assert len(chosen) == 1
    assert Named("alone", []).is_first(pool.name, "w0")


# What is kept.


def stored(
    key: str, *, tenant: str = "", tokens: int = 512, value: str = "", **more: Any
) -> Stored:
    version = value.partition("@")[2]
    ids = array("I", range(tokens))
    return Stored("chat", key, "document", value or key, tenant, version, "m", "", ids,
                  key.encode().ljust(16), 0.0, **more)  # fmt: skip


def test_what_nobody_asks_for_expires_unless_it_is_pinned() -> None:
    clock = Clock()
    store = PromptStore(clock)
    store._put(stored("a"), "w0")
    store._put(stored("b", is_pinned=True), "w0")
    clock.now_s += EXPIRES_S - 1
    assert store.expire() == 0
    clock.now_s += 2
    assert store.expire() == 1
    assert [entry.ring_key for entry in store] == ["b"]


def test_another_version_takes_the_place_of_the_one_before() -> None:
    store = PromptStore(Clock())
    store._put(stored("k1", value="handbook@1"), "w0")
    store._put(stored("k2", value="other@1"), "w0")
    store._put(stored("k3", value="handbook@1", tenant="acme"), "w0")
    store._put(stored("k4", value="handbook@2"), "w0")
    assert [entry.ring_key for entry in store] == ["k2", "k3", "k4"]


def test_memory_is_bounded_and_nobody_displaces_others() -> None:
    store = PromptStore(Clock(), max_bytes=60_000)
    for number in range(3):
        store._put(stored(f"small{number}", tenant="small"), "w0")
    for number in range(200):
        store._put(stored(f"large{number}", tenant="large"), "w0")
        assert store.num_bytes <= 60_000
    assert sum(entry.tenant == "small" for entry in store) == 3
    assert sum(entry.num_bytes for entry in store) == store.num_bytes


async def test_a_changed_text_under_the_same_id_takes_the_place_of_the_old_one(
    tmp_path: Path,
) -> None:
    async with warming_over(tmp_path, Caching(), **KEEP) as (gateway, _):
        store = gateway.gateway.warmer.store
        for text in (text_of("old", CHARS), text_of("new", CHARS)):
            for question in ("1?", "2?"):
                await gateway.ask(text, question, "handbook")
            (entry,) = store
            reader = gateway.gateway.fleet.pools[0].reader
            assert reader is not None
            prompt = reader.chat({"messages": [{"role": "system", "content": text}]}).complete()
            assert list(entry.ids) == list(prompt.token_ids[: len(entry.ids)])
