"""What is found becomes the fleet's workers: joined, drained, moved, refused, seen off."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.discovery.listing import Found, id_from
from gateway.discovery.metrics import DiscoveryCollector
from tests.fakes.engine import RawEngine, answer
from tests.gateway.discovery_parts import (
    engine_of,
    finding,
    pool,
    serving_models,
    settings_of,
    worker,
)
from tests.support import poll_until


async def test_found_workers_join_and_leave_beside_the_configured_ones() -> None:
    async with engine_of("m") as first, engine_of("m") as second:
        settings = settings_of(pool(workers=[{"id": "w0", "url": first.url}]))
        async with finding(settings) as found:
            await found.source.tell(Found(worker("w1", second.url)))
            await found.has("w0", "w1")
            await poll_until(lambda: found.fleet.watches["w1"].checked.is_set())
            await found.source.tell()
            await found.has("w0")
            assert "w1" not in found.fleet.watches
            assert set(found.fleet.pools[0].ring.home("key", 2)) == {"w0"}


async def test_a_worker_gets_nothing_before_it_has_said_what_it_serves() -> None:
    gate = asyncio.Event()
    async with (
        RawEngine(lambda seen: [gate, *serving_models("m")(seen)]) as engine,
        finding(settings_of(pool())) as found,
    ):
        await found.source.tell(Found(worker("w1", engine.url)))
        await poll_until(lambda: "w1" in found.discovery.waiting)
        assert found.ids() == []
        gate.set()
        await found.has("w1")
        assert found.discovery.waiting == {}


async def test_a_worker_that_is_not_up_yet_joins_when_it_is() -> None:
    async with engine_of("m") as engine:
        port = engine.port
    async with finding(settings_of(pool())) as found:
        await found.source.tell(Found(worker("w1", f"http://127.0.0.1:{port}")))
        await poll_until(lambda: "w1" in found.discovery.waiting)
        async with RawEngine(serving_models("m"), port=port):
            await found.has("w1")


async def test_a_worker_goes_to_the_pool_that_serves_its_model() -> None:
    other = pool("other", ["n"], discovery={"type": "static"})
    async with engine_of("n") as engine, finding(settings_of(pool(), other)) as found:
        await found.source.tell(Found(worker("w1", engine.url)))
        await found.has("w1", pool="other")
        assert found.ids("chat") == []


async def test_a_worker_whose_model_nobody_serves_is_refused_visibly() -> None:
    async with engine_of("strange") as engine, finding(settings_of(pool())) as found:
        await found.source.tell(Found(worker("w1", engine.url)))
        await poll_until(lambda: "w1" in found.discovery.refused)
        assert found.discovery.refused["w1"] == "serves strange; pool 'chat' has m"
        assert found.ids() == []
        samples = states_of(found.discovery)
        assert samples["chat", "refused"] == 1
        assert samples["chat", "serving"] == 0


@pytest.mark.parametrize("then", ["n", "strange"])
async def test_a_worker_that_comes_back_with_another_model_changes_its_pool_or_is_refused(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fleet.watch.SCRAPE_EVERY_S", 0.0)
    monkeypatch.setattr("gateway.fleet.watch.CHECK_EVERY_S", 0.02)
    serves = "m"
    other = pool("other", ["n"], discovery={"type": "static"})
    async with (
        RawEngine(lambda seen: serving_models(serves)(seen)) as engine,
        finding(settings_of(pool(), other)) as found,
    ):
        await found.source.tell(Found(worker("w1", engine.url)))
        await found.has("w1")
        serves = then
        await found.has()
        if then == "n":
            await found.has("w1", pool="other")
        else:
            await poll_until(lambda: "w1" in found.discovery.refused)
        serves = "m"
        if then == "n":  # a refused one is not asked any more until it is found anew
            await found.has("w1")


async def test_a_generic_server_may_call_its_model_whatever_it_likes() -> None:
    async with (
        engine_of("/models/some.gguf") as engine,
        finding(settings_of(pool(engine="openai"))) as found,
    ):
        await found.source.tell(Found(worker("w1", engine.url)))
        await found.has("w1")


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ({"pool": "nowhere"}, "there is no pool 'nowhere', which it is labelled with"),
        ({"model": "strange"}, "serves strange; pool 'chat' has m"),
        ({"pool": "other", "model": "m"}, "serves m; pool 'other' has n"),
    ],
)
async def test_labels_that_fit_no_pool_are_refused(label: dict[str, Any], reason: str) -> None:
    other = pool("other", ["n"], discovery={"type": "static"})
    async with engine_of() as engine, finding(settings_of(pool(), other)) as found:
        await found.source.tell(Found(worker("w1", engine.url), **label))
        await poll_until(lambda: found.discovery.refused == {"w1": reason})


async def test_a_labelled_pool_is_obeyed() -> None:
    other = pool("other", ["n"], discovery={"type": "static"})
    async with engine_of("n") as engine, finding(settings_of(pool(), other)) as found:
        await found.source.tell(Found(worker("w1", engine.url), pool="other"))
        await found.has("w1", pool="other")


async def test_one_address_is_one_worker_however_often_it_is_found() -> None:
    async with engine_of("m") as engine:
        configured = {"id": "w0", "url": engine.url}
        async with finding(settings_of(pool(workers=[configured]))) as found:
            await found.source.tell(
                Found(worker("w0", engine.url)), Found(worker("w1", engine.url))
            )
            await poll_until(lambda: "w1" in found.discovery.refused)
            assert found.ids() == ["w0"]
            assert "w0" not in found.discovery.refused


async def test_only_allowed_hosts_are_connected_to() -> None:
    settings = settings_of(pool(worker_allow=["127.0.0.0/8"]))
    async with engine_of("m") as engine, finding(settings) as found:
        spies = worker("w2", engine.url, kv_events="tcp://169.254.169.254:80")
        await found.source.tell(
            Found(worker("w1", "http://10.0.0.1:8000"), model="m"),
            Found(spies, model="m"),
        )
        await poll_until(lambda: len(found.discovery.refused) == 2)
        assert "worker_allow" in found.discovery.refused["w1"]
        assert found.ids() == []


async def test_a_worker_that_is_not_ready_drains_and_comes_back_with_its_cache() -> None:
    async with engine_of("m") as engine, finding(settings_of(pool())) as found:
        one = worker("w1", engine.url)
        await found.source.tell(Found(one))
        await found.has("w1")
        member = found.fleet.pools[0].workers["w1"]
        await found.source.tell(Found(one, is_ready=False))
        await poll_until(lambda: member.draining)
        assert states_of(found.discovery)["chat", "draining"] == 1
        await found.source.tell(Found(one))
        await poll_until(lambda: not member.draining)
        assert found.fleet.pools[0].workers["w1"] is member


async def test_what_an_operator_drained_stays_drained() -> None:
    async with engine_of("m") as engine, finding(settings_of(pool())) as found:
        one = worker("w1", engine.url)
        await found.source.tell(Found(one))
        await found.has("w1")
        found.fleet.drain("w1")
        for is_ready in (False, True):
            await found.source.tell(Found(one, is_ready=is_ready))
            found.discovery.reconcile()
            assert found.fleet.pools[0].workers["w1"].draining


async def test_a_worker_that_was_never_ready_waits_outside() -> None:
    async with engine_of("m") as engine, finding(settings_of(pool())) as found:
        await found.source.tell(Found(worker("w1", engine.url), is_ready=False))
        await poll_until(lambda: "w1" in found.discovery.waiting)
        assert found.ids() == []


async def test_registered_workers_are_not_discoverys_to_remove() -> None:
    async with engine_of("m") as engine, finding(settings_of(pool())) as found:
        found.fleet.add("chat", worker("mine", engine.url), by="admin")
        await found.source.tell()
        await found.source.tell(Found(worker("mine", "http://127.0.0.1:1"), model="m"))
        await poll_until(lambda: "mine" in found.discovery.refused)
        assert found.ids() == ["mine"]


async def test_a_moved_worker_is_another_one_with_the_same_id() -> None:
    async with (
        engine_of("m") as first,
        engine_of("m") as second,
        finding(settings_of(pool())) as found,
    ):
        await found.source.tell(Found(worker("vllm-0", first.url)))
        await found.has("vllm-0")
        before = found.fleet.pools[0].workers["vllm-0"]
        await found.source.tell(Found(worker("vllm-0", second.url)))
        workers = found.fleet.pools[0].workers
        await poll_until(lambda: workers.get("vllm-0", before).url == second.url)
        assert workers["vllm-0"] is not before


async def test_a_request_under_way_ends_well_after_its_worker_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.fleet.fleet.LEFT_CHECK_S", 0.02)
    go_on = asyncio.Event()

    def respond(seen: Any) -> Any:
        if seen.target == "/slow":
            return [go_on, *answer(b"done")]
        return serving_models("m")(seen)

    async with RawEngine(respond) as engine, finding(settings_of(pool())) as found:
        left: list[str] = []
        found.fleet.on_left = lambda one: left.append(one.id)
        await found.source.tell(Found(worker("w1", engine.url)))
        await found.has("w1")
        member = found.fleet.pools[0].workers["w1"]
        upstream = member.upstream
        assert upstream is not None
        member.books.load.in_flight += 1
        task = asyncio.create_task(upstream.request("GET", "/slow", []))
        await poll_until(lambda: any(seen.target == "/slow" for seen in engine.seen))
        await found.source.tell()
        await found.has()
        go_on.set()
        response = await task
        assert await response.read() == b"done"
        response.close()
        assert left == []
        member.books.load.in_flight -= 1
        await poll_until(lambda: left == ["w1"])
        await poll_until(lambda: upstream.num_connections == 0)


async def test_a_source_that_crashes_keeps_its_workers_and_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.discovery.discovery.RESTART_S", 0.01)
    async with engine_of("m") as engine, finding(settings_of(pool())) as found:
        await found.source.tell(Found(worker("w1", engine.url)))
        await found.has("w1")
        listing = found.discovery.listings["chat"]
        before = found.source

        async def crash(_listing: object) -> None:
            raise RuntimeError("source is broken")

        monkeypatch.setattr(type(before), "run", crash)
        task = found.discovery._sources["chat"]
        task.cancel()
        keep = found.discovery._keep(found.discovery._settings.pools[0].discovery, listing)
        again = asyncio.create_task(keep)
        await poll_until(lambda: listing.num_failures >= 2)
        again.cancel()
        assert found.ids() == ["w1"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm-0", "vllm-0"),
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("2001:db8::1:8000", "2001:db8::1:8000"),
    ],
)
def test_short_names_are_ids_as_they_are(name: str, expected: str) -> None:
    assert id_from(name) == expected


def test_long_and_strange_names_become_ids_that_differ_and_stay() -> None:
    names = [f"{'a-very-long-statefulset-name' * 4}-{n}" for n in range(50)] + ["a b", "a/b"]
    ids = [id_from(name) for name in names]
    assert len(set(ids)) == len(names)
    assert ids == [id_from(name) for name in names]
    for worker_id in ids:
        worker(worker_id, "http://127.0.0.1:1")


def states_of(discovery: Any) -> dict[tuple[str, str], float]:
    families = {family.name: family for family in DiscoveryCollector(discovery).collect()}
    return {
        (sample.labels["pool"], sample.labels["state"]): sample.value
        for sample in families["warmlane_discovery_workers"].samples
    }


async def test_a_source_is_up_until_it_fails_and_again_when_it_answers() -> None:
    async with engine_of("m") as engine, finding(settings_of(pool())) as found:
        discovery, listing = found.discovery, found.discovery.listings["chat"]

        def is_up() -> float:
            families = {family.name: family for family in DiscoveryCollector(discovery).collect()}
            (sample,) = families["warmlane_discovery_up"].samples
            return sample.value

        await found.source.tell(Found(worker("w1", engine.url)))
        await found.has("w1")
        assert is_up() == 1
        listing.failed("away")
        assert is_up() == 0
        await found.source.tell(Found(worker("w1", engine.url)))
        await poll_until(lambda: is_up() == 1)
