"""LoRA adapters are models of the workers that have them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.adapters import MAX_ADAPTERS, fetch_models, take_adapters
from gateway.routing.dispatch import Inbound, Outcome
from gateway.routing.pool import Pool
from gateway.upstream.client import Upstream
from tests.fakes.engine import End, RawEngine, answer, openai_engine
from tests.fakes.gateway import chat as body_of
from tests.fakes.gateway import gateway, worker
from tests.gateway.routing_parts import Clock, chat, dispatcher, hold, make_pool
from tests.support import free_port

# As vLLM 0.32 lists a base model with two adapters.
LIST = {
    "object": "list",
    "data": [
        {"id": "m", "object": "model", "root": "/models/m", "parent": None, "max_model_len": 4096},
        {"id": "sql", "object": "model", "root": "/loras/sql", "parent": "m"},
        {"id": "law", "object": "model", "root": "/loras/law", "parent": "m"},
    ],
}


def of(text: str, model: str) -> Inbound:
    inbound = chat(text)
    inbound.model = model
    inbound.body["model"] = model
    return inbound


def test_a_list_of_models_tells_which_adapters_a_worker_has() -> None:
    pool = make_pool(2)
    take_adapters(pool, pool.workers["w1"], LIST)

    assert pool.workers["w1"].adapters == {"sql", "law"}
    assert pool.adapters == {"sql", "law"}
    assert (pool.adapter_of("sql"), pool.adapter_of("m"), pool.adapter_of("x")) == ("sql", "", "")
    assert pool.serves("law")


def test_a_configured_name_is_no_adapter() -> None:
    pool = make_pool(1, aliases={"sql": "m"})
    take_adapters(pool, pool.workers["w0"], LIST)

    assert pool.workers["w0"].adapters == {"law"}


def test_an_adapter_that_was_unloaded_stays_known_and_is_not_listed() -> None:
    pool = make_pool(1)
    take_adapters(pool, pool.workers["w0"], LIST)
    take_adapters(pool, pool.workers["w0"], {"data": LIST["data"][:2]})

    assert pool.adapters_served() == {"sql"}
    assert pool.serves("law")


NO_LISTS: list[Any] = [
    None,
    [],
    "models",
    {},
    {"data": None},
    {"data": "x"},
    {"data": [None, 1, [], "m"]},
    {"data": [{"id": None, "parent": "m"}, {"id": "", "parent": "m"}]},
    {"data": [{"id": "x" * 300, "parent": "m"}, {"id": "a", "parent": ["m"]}]},
]


@pytest.mark.parametrize("document", NO_LISTS, ids=repr)
def test_what_is_no_list_of_models_names_no_adapter(document: Any) -> None:
    pool = make_pool(1)
    take_adapters(pool, pool.workers["w0"], document)

    assert pool.workers["w0"].adapters == frozenset()


KEYS = st.sampled_from(["data", "id", "parent", "root"])
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(KEYS, x)
)


@given(ANYTHING)
def test_no_answer_of_a_worker_raises(document: Any) -> None:
    pool = make_pool(1)
    take_adapters(pool, pool.workers["w0"], {"data": document})


def test_names_without_end_are_not_remembered() -> None:
    pool = make_pool(1)
    for i in range(0, 4 * MAX_ADAPTERS, 2000):
        data = [{"id": f"a{k}", "parent": "m"} for k in range(i, i + 2000)]
        take_adapters(pool, pool.workers["w0"], {"data": data})

    assert len(pool.adapters) <= MAX_ADAPTERS


async def test_requests_for_an_adapter_go_only_to_workers_that_have_it() -> None:
    pool = make_pool(4)
    for name in ("w1", "w3"):
        take_adapters(pool, pool.workers[name], LIST)
    routes = dispatcher(pool, Clock())
    chosen = set()
    for i in range(12):
        plan = await routes.plan(pool, of(f"question {i}", "sql"))
        decision = routes.choose(plan)
        chosen.add(decision.worker)
        assert {c.why for c in decision.input.candidates if not c.eligible} == {"adapter"}
        routes.admit(plan, decision)

    assert chosen == {"w1", "w3"}


async def test_an_adapters_blocks_are_not_the_base_models() -> None:
    pool = make_pool(2)
    for name in ("w0", "w1"):
        take_adapters(pool, pool.workers[name], LIST)
    routes = dispatcher(pool, Clock())
    text = "the same text for both " * 20
    base = await routes.plan(pool, of(text, "m"))
    hold(pool, "w0", base.prompt)
    adapted = await routes.plan(pool, of(text, "sql"))
    other = await routes.plan(pool, of(text, "law"))

    assert adapted.adapter == "sql"
    assert routes.choose(base).hit_tokens > 0
    assert routes.choose(adapted).hit_tokens == 0
    hold(pool, "w1", adapted.prompt)
    decision = routes.choose(adapted)
    assert (decision.worker, decision.hit_tokens > 0) == ("w1", True)
    assert routes.choose(other).hit_tokens == 0


async def test_panic_sends_no_adapter_to_a_worker_without_it() -> None:
    pool = make_pool(2)
    take_adapters(pool, pool.workers["w0"], LIST)
    for each in pool.workers.values():
        for _ in range(3):
            each.health.check_failed(1000.0, timed_out=False, is_streaming=False)
    routes = dispatcher(pool, Clock())
    decision = routes.choose(await routes.plan(pool, of("q", "sql")))

    assert decision.worker == "w0"
    pool.remove("w0")
    assert routes.choose(await routes.plan(pool, of("q", "sql"))).worker is None


async def test_clients_see_adapters_and_get_503_where_no_worker_has_one_any_more() -> None:
    async with openai_engine() as one, openai_engine() as two:
        pool = Pool("chat", models=["m"], workers=[worker("w0", one.url), worker("w1", two.url)])
        async with gateway(pools=[pool]) as gw:
            assert (await gw.post(body=body_of(model="sql")))[0] == 404
            take_adapters(pool, pool.workers["w1"], LIST)
            statuses = [(await gw.post(body=body_of(f"q{i}", model="sql")))[0] for i in range(4)]
            listed = json.loads((await gw.get("/v1/models"))[1])["data"]
            pool.drain("w1")
            gone, body, response = await gw.post(body=body_of(model="sql"))

    assert statuses == [200] * 4
    assert (len(one.seen), [seen.json()["model"] for seen in two.seen]) == (0, ["sql"] * 4)
    assert [(card["id"], card.get("parent")) for card in listed] == [
        ("m", None),
        ("law", "m"),
        ("sql", "m"),
    ]
    assert (gone, json.loads(body)["error"]["type"]) == (503, "overloaded_error")
    assert "retry-after" in response.headers


async def test_a_workers_own_list_is_fetched() -> None:
    async with RawEngine(lambda _: answer(json.dumps(LIST).encode())) as engine:
        upstream = Upstream(engine.url)
        assert await fetch_models(upstream) == LIST
        upstream.close()

    assert engine.seen[0].target == "/v1/models"


@pytest.mark.parametrize(
    "script",
    [answer(b"{}", 404), answer(b"{", 200), answer(b"\xff", 200), [End.FIN]],
    ids=["404", "no JSON", "no text", "broken off"],
)
async def test_a_worker_that_has_no_list_to_give_leaves_everything_as_it_was(script: Any) -> None:
    async with RawEngine(lambda _: script) as engine:
        upstream = Upstream(engine.url)
        assert await fetch_models(upstream) is None
        upstream.close()
    dead = Upstream(f"http://127.0.0.1:{free_port()}")
    assert await fetch_models(dead) is None
    dead.close()


async def test_an_adapter_is_released_like_any_request() -> None:
    pool = make_pool(1)
    take_adapters(pool, pool.workers["w0"], LIST)
    routes = dispatcher(pool, Clock())
    plan = await routes.plan(pool, of("q", "sql"))
    routes.admit(plan, routes.choose(plan)).finish(Outcome.OK)

    assert pool.workers["w0"].books.in_flight == 0
