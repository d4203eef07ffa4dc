"""Workers that are not what most of their pool is serve only if nobody else can."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.fingerprints import (
    Fingerprint,
    Identity,
    differences,
    regroup,
    tell,
    weights_of,
)
from gateway.upstream.client import Upstream
from tests.fakes.engine import RawEngine, Seen, answer
from tests.gateway.routing_parts import Clock, chat, dispatcher, make_pool

A = Fingerprint("llama", "tok", "fp16")


def apart(pool: Any) -> list[str]:
    return [worker.id for worker in pool.workers.values() if worker.is_apart]


@pytest.mark.parametrize(
    "other",
    [A._replace(weights="llama-ft"), A._replace(tokenizer="t2"), A._replace(kv_dtype="fp8")],
    ids=["weights", "tokenizer", "kv_dtype"],
)
async def test_the_one_that_differs_gets_nothing_while_others_can_serve(other: Fingerprint) -> None:
    pool = make_pool(3)
    for name, fingerprint in zip(("w0", "w1", "w2"), (A, other, A), strict=True):
        tell(pool, pool.workers[name], fingerprint)
    routes = dispatcher(pool, Clock())
    chosen = set()
    for i in range(9):
        plan = await routes.plan(pool, chat(f"question {i}"))
        decision = routes.choose(plan)
        routes.admit(plan, decision)
        chosen.add(decision.worker)

    assert apart(pool) == ["w1"]
    assert chosen == {"w0", "w2"}
    assert [c.why for c in decision.input.candidates] == ["ok", "fingerprint", "ok"]
    assert not pool.is_readable(pool.workers["w1"])


async def test_the_one_that_differs_serves_when_nobody_else_can() -> None:
    pool = make_pool(3)
    for name, fingerprint in zip(("w0", "w1", "w2"), (A, A._replace(weights="b"), A), strict=True):
        tell(pool, pool.workers[name], fingerprint)
    pool.drain("w0")
    pool.drain("w2")
    routes = dispatcher(pool, Clock())
    decision = routes.choose(await routes.plan(pool, chat("q")))

    assert decision.worker == "w1"
    assert decision.input.candidates[1].why == "apart"


def test_of_two_groups_as_large_the_one_configured_first_serves() -> None:
    pool = make_pool(4)
    for name, weights in zip(("w0", "w1", "w2", "w3"), "baab", strict=True):
        tell(pool, pool.workers[name], Fingerprint(weights))
    assert apart(pool) == ["w1", "w2"]

    tell(pool, pool.workers["w3"], Fingerprint("a"))
    assert apart(pool) == ["w0"]


def test_what_is_not_known_agrees_with_everything() -> None:
    pool = make_pool(4)
    tell(pool, pool.workers["w0"], Fingerprint("a", "", "fp8"))
    tell(pool, pool.workers["w1"], Fingerprint("", "t", ""))
    tell(pool, pool.workers["w2"], Fingerprint("a", "t", "fp8"))
    assert apart(pool) == []

    tell(pool, pool.workers["w3"], Fingerprint("", "t", "fp16"))
    assert apart(pool) == ["w3"]


def test_a_worker_that_leaves_may_turn_the_majority() -> None:
    pool = make_pool(5)
    for name, weights in zip(("w0", "w1", "w2", "w3", "w4"), "aabbb", strict=True):
        tell(pool, pool.workers[name], Fingerprint(weights))
    assert apart(pool) == ["w0", "w1"]

    pool.remove("w4")
    regroup(pool)
    assert apart(pool) == ["w2", "w3"]
    for name in ("w0", "w1", "w2", "w3"):
        pool.remove(name)
    regroup(pool)
    assert differences(pool) == []


def test_differences_are_named() -> None:
    pool = make_pool(3)
    for name in ("w0", "w1"):
        tell(pool, pool.workers[name], A)
    tell(pool, pool.workers["w2"], Fingerprint("llama", "t2", "fp8"))

    assert [str(difference) for difference in differences(pool)] == [
        "w2: tokenizer is 't2', most of its pool has 'tok'",
        "w2: kv_dtype is 'fp8', most of its pool has 'fp16'",
    ]


@given(st.lists(st.tuples(*[st.sampled_from(["", "a", "b", '"', '","'])] * 3), max_size=7))
def test_exactly_one_group_serves_and_it_is_the_largest(prints: list[tuple[str, str, str]]) -> None:
    pool = make_pool(len(prints), reads=False)
    for worker, print_ in zip(pool.workers.values(), prints, strict=True):
        fingerprint = Fingerprint(*print_)
        tell(pool, worker, fingerprint)
        assert Fingerprint.from_text(worker.fingerprint) == fingerprint
    num_apart = len(apart(pool))

    assert num_apart < len(prints) or not prints
    assert {d.worker for d in differences(pool)} == set(apart(pool))


ROOTS = {
    "/models/Llama-3-8B": "llama-3-8b",
    "/mnt/other/Llama-3-8B/": "llama-3-8b",
    "meta-llama/Llama-3-8B": "llama-3-8b",
    "/root/.cache/hub/models--meta-llama--Llama-3-8B/snapshots/0fbe": "llama-3-8b",
    "C:\\models\\Llama-3-8B": "llama-3-8b",
    "smollm2": "smollm2",
    "": "",
    "/": "",
}


@pytest.mark.parametrize(("root", "expected"), ROOTS.items())
def test_the_place_of_a_model_is_not_part_of_it(root: str, expected: str) -> None:
    adapter = {"id": "sql", "root": "/loras/sql", "parent": "m"}
    base = {"id": "m", "root": root, "parent": None}

    assert weights_of({"data": [adapter, base]}) == expected


@pytest.mark.parametrize("document", [None, [], {"data": [{"id": "m"}, {"id": "m", "root": 5}]}])
def test_a_list_that_names_no_root_names_no_weights(document: Any) -> None:
    assert weights_of(document) == ""


async def test_a_worker_is_asked_what_it_is_and_again_after_a_restart() -> None:
    tokenizer = {"fingerprint": "t1"}

    def served(seen: Seen) -> Any:
        if seen.target == "/tokenizer":
            return answer(json.dumps(tokenizer).encode())
        cards = [{"id": "m", "root": "x/SmolLM2"}, {"id": "sql", "parent": "m"}]
        return answer(json.dumps({"data": cards}).encode())

    pool = make_pool(1, engine="runner")
    worker = pool.workers["w0"]
    async with RawEngine(served) as engine:
        upstream = Upstream(engine.url)
        identity = Identity(pool, [worker], upstream)
        for _ in range(2):
            await identity.check("fp16")
        first = Fingerprint.from_text(worker.fingerprint)
        tokenizer["fingerprint"] = "t2"
        identity.restarted()
        await identity.check()
        upstream.close()

    assert first == Fingerprint("smollm2", "t1", "fp16")
    assert Fingerprint.from_text(worker.fingerprint) == Fingerprint("smollm2", "t2")
    assert worker.adapters == {"sql"}
    assert [seen.target for seen in engine.seen].count("/tokenizer") == 2


async def test_an_engine_that_tells_nothing_is_like_the_others() -> None:
    pool = make_pool(2)
    tell(pool, pool.workers["w0"], A)
    async with RawEngine(lambda _: answer(b"not here", 404)) as engine:
        upstream = Upstream(engine.url)
        await Identity(pool, [pool.workers["w1"]], upstream).check()
        upstream.close()

    assert pool.workers["w1"].fingerprint == ""
    assert apart(pool) == []
