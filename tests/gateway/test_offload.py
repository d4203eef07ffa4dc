"""The offload cap of a request: the lowest of all that is said, in the client's own bytes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import OffloadConfig
from gateway.proxy.splice import splice
from gateway.routing.dispatch import Inbound, Plan
from gateway.routing.pool import Pool
from gateway.worth.offload import offload_put, stable_limit
from gateway.worth.rule import Verdict
from tests.gateway.routing_parts import BLOCK, chat, make_pool

HISTORY = OffloadConfig(max_offload_tokens=8192, scope="history")
POOLS = {engine: make_pool(1, engine=engine) for engine in ("vllm", "runner", "sglang", "openai")}


def plan_of(inbound: Inbound, engine: str = "vllm") -> Plan:
    pool: Pool = POOLS[engine]
    assert pool.reader is not None
    prompt = pool.reader.chat(inbound.body).complete()
    return Plan(pool, inbound, prompt.num_tokens, prompt, prompt.block_hashes)


def conversation(**body: Any) -> Inbound:
    inbound = chat("", **body)
    inbound.body["messages"] = [
        {"role": "system", "content": "Be brief. " * 30},
        {"role": "user", "content": "First question? " * 20},
        {"role": "assistant", "content": "An answer. " * 20},
        {"role": "user", "content": "Second question?"},
    ]
    return inbound


def sent(
    inbound: Inbound,
    *,
    engine: str = "vllm",
    route_cap: int | None = None,
    pool: OffloadConfig = HISTORY,
    verdict: Verdict = Verdict.UNKNOWN,
    **more: Any,
) -> dict[str, Any]:
    """Return the body as the worker gets it."""
    body = orjson.dumps(inbound.body)
    put = offload_put(plan_of(inbound, engine), route_cap, pool, verdict, body, **more)
    document = json.loads(splice(body, put=put))
    assert {k: v for k, v in document.items() if k != "kv_transfer_params"} == {
        k: v for k, v in inbound.body.items() if k != "kv_transfer_params"
    }
    return document


def cap_of(document: dict[str, Any], name: str = "max_offload_tokens") -> Any:
    return document.get("kv_transfer_params", {}).get(name)


STABLE = stable_limit(plan_of(conversation()), "history")


@pytest.mark.parametrize(
    ("route", "pool", "client"),
    list(itertools.product((None, 0, 64, 9000), (None, 32, 9000), (None, 0, 48, 20_000))),
)
def test_the_lowest_of_all_caps_is_sent(
    route: int | None, pool: int | None, client: int | None
) -> None:
    params = {} if client is None else {"kv_transfer_params": {"max_offload_tokens": client}}
    config = OffloadConfig(max_offload_tokens=pool, scope="history")

    document = sent(conversation(**params), route_cap=route, pool=config)

    if route is None and pool is None:
        assert cap_of(document) == client  # nobody asked for a cap, so nothing is changed
    else:
        caps = [cap for cap in (route, pool, client, STABLE) if cap is not None]
        assert cap_of(document) == min(caps)


def test_lmcache_gets_the_same_cap_under_its_own_name() -> None:
    document = sent(conversation())

    assert document["kv_transfer_params"] == {
        "max_offload_tokens": STABLE,
        "lmcache.max_offload_tokens": STABLE,
    }


def test_our_runner_gets_only_what_it_knows() -> None:
    assert sent(conversation(), engine="runner")["kv_transfer_params"] == {
        "max_offload_tokens": STABLE
    }


@pytest.mark.parametrize("engine", ["sglang", "openai"])
def test_engines_without_such_a_cap_get_none(engine: str) -> None:
    assert "kv_transfer_params" not in sent(conversation(), engine=engine)


@pytest.mark.parametrize("verdict", Verdict)
def test_nothing_is_offloaded_where_it_is_not_worth_it(verdict: Verdict) -> None:
    expected = 0 if verdict is Verdict.NO else STABLE

    assert cap_of(sent(conversation(), verdict=verdict)) == expected


def test_the_scope_says_which_stable_boundary_is_sent() -> None:
    knowledge = OffloadConfig(max_offload_tokens=8192, scope="knowledge")
    system = len("system\n" + "Be brief. " * 30 + "\n") + 2

    assert cap_of(sent(conversation(), pool=knowledge)) == system // BLOCK * BLOCK < STABLE


def test_a_completion_prompt_has_nothing_stable() -> None:
    inbound = Inbound("completions", {"model": "m", "prompt": "x" * 400}, {}, "m")
    pool = POOLS["vllm"]
    assert pool.reader is not None
    prompt = pool.reader.completion("x" * 400).complete()
    plan = Plan(pool, inbound, prompt.num_tokens, prompt, prompt.block_hashes)

    put = offload_put(plan, None, HISTORY, Verdict.YES, orjson.dumps(inbound.body))

    assert orjson.loads(put["kv_transfer_params"])["max_offload_tokens"] == 0


def test_while_the_tokens_are_on_their_way_the_text_tells() -> None:
    inbound = conversation()
    exact = plan_of(inbound)
    behind = Plan(exact.pool, inbound, exact.num_tokens)

    limit = stable_limit(behind, "history")

    assert limit % BLOCK == 0
    assert abs(limit - STABLE) <= 4 * BLOCK


INVALID: tuple[Any, ...] = (-1, 1.5, "64", True, [], {}, None)


@pytest.mark.parametrize("value", INVALID, ids=repr)
def test_what_the_runner_refuses_reaches_it_untouched(value: Any) -> None:
    document = sent(conversation(kv_transfer_params={"max_offload_tokens": value}), engine="runner")

    assert document["kv_transfer_params"] == {"max_offload_tokens": value}


@pytest.mark.parametrize("value", INVALID, ids=repr)
def test_what_vllm_takes_for_no_cap_does_not_lift_ours(value: Any) -> None:
    document = sent(conversation(kv_transfer_params={"max_offload_tokens": value}))

    assert cap_of(document) == STABLE


@pytest.mark.parametrize("params", ["x", 3, [], True, [{}]], ids=repr)
@pytest.mark.parametrize("engine", ["vllm", "runner"])
def test_parameters_that_are_no_object_are_the_engines_to_refuse(engine: str, params: Any) -> None:
    inbound = conversation(kv_transfer_params=params)

    assert sent(inbound, engine=engine)["kv_transfer_params"] == params


@pytest.mark.parametrize("params", [None, {}], ids=repr)
def test_empty_parameters_are_filled(params: Any) -> None:
    assert cap_of(sent(conversation(kv_transfer_params=params))) == STABLE


def test_the_clients_other_parameters_keep_their_bytes() -> None:
    raw = (
        b'{"model":"m", "kv_transfer_params" : { "do_remote_prefill": true ,'
        b' "max_offload_tokens" : 18446744073709551617, "x": 1.0, "y": "\\u00e9" } , '
        b'"messages":[{"role":"user","content":"hi"}], "seed": 12345678901234567890}'
    )
    document = json.loads(raw)
    inbound = Inbound("chat", document, {}, "m")

    put = offload_put(plan_of(inbound, "runner"), 0, HISTORY, Verdict.YES, raw)

    assert splice(raw, put=put) == raw.replace(b"18446744073709551617", b"0")


def test_a_member_that_stands_twice_is_capped_twice() -> None:
    raw = (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],'
        b'"kv_transfer_params":{"max_offload_tokens":9,"max_offload_tokens":900}}'
    )
    inbound = Inbound("chat", json.loads(raw), {}, "m")

    put = offload_put(plan_of(inbound, "runner"), 0, HISTORY, Verdict.YES, raw)

    assert put["kv_transfer_params"] == b'{"max_offload_tokens":0,"max_offload_tokens":0}'


def test_the_source_of_a_pull_travels_in_the_same_object() -> None:
    source = {"source": b'{"url":"http://h:1","tokens":512}'}
    given = conversation(kv_transfer_params={"max_load_tokens": 4, "source": {"url": "evil"}})

    document = sent(given, engine="runner", also=source)

    assert document["kv_transfer_params"] == {
        "max_load_tokens": 4,
        "source": {"url": "http://h:1", "tokens": 512},
        "max_offload_tokens": STABLE,
    }
    assert sent(conversation(), pool=OffloadConfig(), also=source)["kv_transfer_params"] == {
        "source": {"url": "http://h:1", "tokens": 512}
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(["max_offload_tokens", "lmcache.max_offload_tokens", "source", "a"])


@given(JSON | st.dictionaries(NAMES, JSON | st.integers(0, 9000), max_size=4), st.integers(0, 9000))
def test_any_parameters_end_below_the_cap_or_as_they_were(params: Any, route: int) -> None:
    inbound = conversation()
    raw = json.dumps(inbound.body | {"kv_transfer_params": params}).encode()
    inbound.body["kv_transfer_params"] = json.loads(raw)["kv_transfer_params"]
    try:
        plan = plan_of(inbound)
    except UnicodeEncodeError:
        return

    document = json.loads(
        splice(raw, put=offload_put(plan, route, HISTORY, Verdict.YES, raw)) or b"{}"
    )

    if params is not None and not isinstance(params, dict):
        assert document["kv_transfer_params"] == inbound.body["kv_transfer_params"]
    else:
        for name in ("max_offload_tokens", "lmcache.max_offload_tokens"):
            assert 0 <= cap_of(document, name) <= min(route, STABLE)
        kept = {k: v for k, v in (params or {}).items() if "max_offload" not in k}
        assert {k: v for k, v in document["kv_transfer_params"].items() if k in kept} == kept
