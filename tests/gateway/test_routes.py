"""Which pool a request goes to."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Settings
from gateway.routing.configured import make_dispatcher
from gateway.routing.dispatch import Dispatcher, Inbound, Target
from gateway.routing.pool import Pool, Retry, Worker
from gateway.routing.routes import Route, Routes
from prefix_index.index import Index
from tests.gateway.routing_parts import BLOCK, Clock, hold, prompt_reader


def pool(name: str, *models: str, **options: Any) -> Pool:
    made = Pool(name, models=models or ("m",), workers=[Worker(f"{name}-0", "http://h")], **options)
    made.weight = None
    return made


def reading_pool(name: str) -> Pool:
    return pool(name, reader=prompt_reader(), index=Index(BLOCK), engine="vllm")


def request(model: str = "m", *, tenant: str = "", text: str = "q", **headers: str) -> Inbound:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return Inbound("chat", body, named, model, tenant)


def name_of(target: Target | None) -> str | None:
    return None if target is None else target.pool.name


def test_without_routes_a_model_goes_to_its_pool() -> None:
    a, b = pool("a", "m", aliases={"gpt": "m"}), pool("b", "n")
    routes = Routes([a, b])

    assert [name_of(routes.target(request(m))) for m in ("m", "gpt", "n", "x")] == [
        *("a", "a", "b"),
        None,
    ]
    assert (routes.default("gpt"), routes.default("x")) == (a, None)


def test_the_first_route_that_matches_counts() -> None:
    a, b, c = pool("a"), pool("b"), pool("c")
    routes = Routes([a, b, c], [Route(b, tenant="batch"), Route(c)])

    assert name_of(routes.target(request(tenant="batch"))) == "b"
    assert name_of(routes.target(request())) == "c"


MATCHES: list[tuple[dict[str, Any], Inbound, bool]] = [
    ({"tenant": "t"}, request(tenant="t"), True),
    ({"tenant": "t"}, request(tenant="T"), False),
    ({"tenant": "t"}, request(), False),
    ({"model": "m"}, request("m"), True),
    ({"model": "m"}, request("n"), False),
    ({"headers": (("x-team", "search"),)}, request(x_team="search"), True),
    ({"headers": (("x-team", "search"),)}, request(x_team="searching"), False),
    ({"headers": (("x-team", "search"),)}, request(), False),
    ({"tenant": "t", "headers": (("x-team", "s"),)}, request(tenant="t", x_team="s"), True),
    ({"tenant": "t", "headers": (("x-team", "s"),)}, request(x_team="s"), False),
    ({}, request("n"), True),
    ({}, request("z"), False),
]


@pytest.mark.parametrize(("match", "inbound", "expected"), MATCHES)
def test_a_route_takes_what_is_all_that_it_says(
    match: dict[str, Any], inbound: Inbound, expected: bool
) -> None:
    default, special = pool("default", "m", "n", "z"), pool("special", "m", "n")
    routes = Routes([default, special], [Route(special, **match)])
    target = routes.target(inbound)

    assert name_of(target) == ("special" if expected else "default")
    assert target is not None
    assert (target.route is not None) is expected


def test_weights_share_a_model_and_a_session_stays_where_it_is() -> None:
    a, b, c = pool("a"), pool("b"), pool("c")
    a.weight, b.weight, c.weight = 90, 10, 0
    routes = Routes([a, b, c])
    first = {i: name_of(routes.target(request(x_session_id=f"s{i}"))) for i in range(2000)}
    counts = Counter(first.values())

    assert counts.keys() == {"a", "b"}
    assert abs(counts["b"] - 200) < 60
    again = {
        i: name_of(routes.target(request(x_session_id=f"s{i}", text="another"))) for i in first
    }
    assert again == first
    assert first == {
        i: name_of(Routes([a, b, c]).target(request(x_session_id=f"s{i}"))) for i in first
    }


def test_a_growing_canary_only_takes_over_sessions() -> None:
    a, b = pool("a"), pool("b")
    taken = []
    for weight in (1, 10, 50, 99):
        a.weight, b.weight = 100 - weight, weight
        routes = Routes([a, b])
        taken.append(
            {i for i in range(500) if name_of(routes.target(request(x_session_id=f"s{i}"))) == "b"}
        )

    assert all(small <= large for small, large in pairwise(taken))


def test_a_pool_without_weight_beside_some_with_one_gets_only_what_a_route_sends() -> None:
    a, b, c = pool("a"), pool("b"), pool("c")
    b.weight, c.weight = 1, 1
    routes = Routes([a, b, c], [Route(a, tenant="t")])
    found = Counter(name_of(routes.target(request(x_session_id=f"s{i}"))) for i in range(100))

    assert found.keys() == {"b", "c"}
    assert name_of(routes.target(request(tenant="t"))) == "a"


async def placed(dispatch: Dispatcher, inbound: Inbound) -> str:
    """Return the pool a request ends up in."""
    target = dispatch.target(inbound)
    assert target is not None
    plan = await dispatch.plan(target.pool, inbound, in_full=True)
    return dispatch.redirected(plan, target).pool.name


async def test_a_route_by_length_looks_at_the_prompts_tokens() -> None:
    short, long = reading_pool("short"), reading_pool("long")
    route = Route(long, prompt_tokens=(1000, float("inf")), is_by_class=True)
    dispatch = Dispatcher([short, long], clock=Clock(), routes=Routes([short, long], [route]))

    assert await placed(dispatch, request(text="x" * 100)) == "short"
    assert await placed(dispatch, request(text="x" * 1500)) == "long"


async def test_a_route_by_reuse_looks_at_what_the_pool_it_would_go_to_holds() -> None:
    usual, cold = reading_pool("usual"), reading_pool("cold")
    route = Route(cold, known_reuse=(0, 0.5), prompt_tokens=(500, 1e9), is_by_class=True)
    dispatch = Dispatcher([usual, cold], clock=Clock(), routes=Routes([usual, cold], [route]))
    text = "a document of some length " * 50
    assert await placed(dispatch, request(text=text)) == "cold"

    plan = await dispatch.plan(usual, request(text=text), in_full=True)
    hold(usual, "usual-0", plan.prompt)
    assert await placed(dispatch, request(text=text)) == "usual"
    assert await placed(dispatch, request(text="short")) == "usual"


async def test_class_and_identity_combine_in_the_order_of_the_routes() -> None:
    usual, long, team = reading_pool("usual"), reading_pool("long"), reading_pool("team")
    routes = Routes(
        [usual, long, team],
        [
            Route(long, tenant="t", prompt_tokens=(100, 1e9), is_by_class=True),
            Route(team, headers=(("x-team", "s"),)),
        ],
    )
    dispatch = Dispatcher([usual, long, team], clock=Clock(), routes=routes)

    assert await placed(dispatch, request(tenant="t", text="x" * 300, x_team="s")) == "long"
    assert await placed(dispatch, request(tenant="t", text="x", x_team="s")) == "team"
    assert await placed(dispatch, request(text="x" * 300, x_team="s")) == "team"
    assert await placed(dispatch, request(tenant="t", text="x")) == "usual"


async def test_a_pool_that_cannot_read_prompts_judges_by_an_estimate() -> None:
    usual, long = pool("usual"), pool("long")
    route = Route(long, prompt_tokens=(100, 1e9), is_by_class=True)
    dispatch = Dispatcher([usual, long], clock=Clock(), routes=Routes([usual, long], [route]))

    assert await placed(dispatch, request(text="word " * 200)) == "long"
    assert await placed(dispatch, request(text="word " * 20)) == "usual"


async def test_the_plan_knows_the_route_that_placed_it() -> None:
    a, b = reading_pool("a"), reading_pool("b")
    route = Route(b, tenant="t", max_offload_tokens=0)
    dispatch = Dispatcher([a, b], clock=Clock(), routes=Routes([a, b], [route]))
    inbound = request(tenant="t")
    target = dispatch.target(inbound)
    assert target is not None
    plan = await dispatch.plan(target.pool, inbound)
    dispatch.redirected(plan, target)

    assert plan.route is route


CONFIG: dict[str, Any] = {
    "routing": {"mode": "cost", "share": 25, "max_wait_s": 3, "seed": 4},
    "pools": [
        {
            "name": "a",
            "models": ["m"],
            "weight": 9,
            "fallback": "c",
            "admission": {"max_queue": 7, "deadline_s": 1.5},
            "retry": {"budget": 0.5, "attempts": 3},
            "peer_pull": "off",
        },
        {"name": "b", "models": ["m"], "weight": 1},
        {"name": "c", "models": ["m"]},
    ],
    "routes": [
        {
            "match": {
                "tenant": "t",
                "header": {"X-Team": "s"},
                "prompt_tokens_min": 10,
                "known_reuse_max": 0.25,
            },
            "pool": "c",
            "offload": {"max_offload_tokens": 0, "scope": "history"},
        },
        {"match": {"model": "m"}, "pool": "b", "offload": {"max_offload_tokens": 5}},
    ],
    "tenants": [{"name": "t", "weight": 3, "priority": -2}],
}


def test_a_configuration_reaches_pools_routes_gate_and_roll_out() -> None:
    pools = [pool("a"), pool("b"), pool("c")]
    dispatch = make_dispatcher(Settings.model_validate(CONFIG), pools)
    a, _, c = pools
    first, second = dispatch.routes._routes

    assert (a.weight, a.fallback, a.max_queue, a.deadline_s) == (9, c, 7, 1.5)
    assert (a.retry, a.peer_pull, c.weight, c.fallback) == (Retry(0.5, 3), "off", None, None)
    assert (dispatch.rollout.mode, dispatch.rollout.share) == ("cost", 25)
    assert dispatch.gate.max_wait_s == 3
    assert dispatch.gate.standings["t"].weight == 3
    assert dispatch.gate.standings["t"].priority == -2
    assert (first.pool, first.tenant, first.headers) == (c, "t", (("x-team", "s"),))
    assert (first.prompt_tokens, first.known_reuse) == ((10, float("inf")), (0, 0.25))
    assert (first.is_by_class, first.max_offload_tokens, first.offload_scope) == (
        *(True, 0),
        "history",
    )
    assert (second.is_by_class, second.model, second.max_offload_tokens) == (False, "m", 5)
    assert (second.offload_scope, second.name) == (None, "routes[1]")


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "t", "u"])), max_size=5),
    st.sampled_from(["", "t", "u", "v"]),
    st.dictionaries(st.sampled_from(["x-session-id", "x-team"]), st.text(max_size=5)),
)
def test_a_served_model_always_has_a_pool_that_serves_it(
    rules: list[tuple[str, str]], tenant: str, headers: dict[str, str]
) -> None:
    pools = {"a": pool("a", "m"), "b": pool("b", "m", "n")}
    routes = Routes(
        list(pools.values()), [Route(pools[name], tenant=t or None) for name, t in rules]
    )
    for model in ("m", "n"):
        inbound = request(model, tenant=tenant)
        inbound.headers = headers
        target = routes.target(inbound)
        assert target is not None
        assert target.pool.serves(model)
    assert routes.target(request("x")) is None


def wishing(wished: object, model: str = "m", *, tenant: str = "") -> Inbound:
    inbound = request(model, tenant=tenant)
    inbound.body["warmlane"] = {"pool": wished}  # type: ignore[index]
    return inbound


def test_a_client_may_name_a_pool_that_serves_its_model() -> None:
    a, b, other = pool("a"), pool("b"), pool("other", "n")
    routes = Routes([a, b, other])

    assert [name_of(routes.target(wishing(name))) for name in ("a", "b")] == ["a", "b"]
    # What cannot be had changes nothing here; the proxy refuses it.
    for nothing in ("other", "x", "", 5, ["b"], None):
        assert name_of(routes.target(wishing(nothing))) == "a"
    assert name_of(routes.target(wishing("a", "x"))) is None


def test_no_client_gets_into_a_pool_that_a_route_keeps_for_others() -> None:
    a, gold, canary = pool("a", "m"), pool("gold", "m"), pool("canary", "m")
    a.weight, canary.weight = 1, 1
    routes = Routes([a, gold, canary], [Route(gold, tenant="gold"), Route(canary, tenant="beta")])

    assert routes.open_to_clients("m") == (a, canary)
    assert name_of(routes.target(wishing("gold", tenant="free"))) in ("a", "canary")
    assert name_of(routes.target(wishing("canary", tenant="free"))) == "canary"
    # And what a route decides no client changes.
    assert name_of(routes.target(wishing("a", tenant="gold"))) == "gold"
