"""What the gateway adds to a request on its way to a worker: one splice, and a few header lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from gateway.proxy.outbound import Outbound, outbound
from gateway.routing.dispatch import Outcome, Plan
from gateway.routing.pool import Pool
from tests.gateway.routing_parts import Clock, chat, dispatcher, hold, let_pull, make_pool

TEXT = "a document of some length that one worker holds " * 200


async def sent(
    pool: Pool,
    body: dict[str, Any],
    cap: int | None = None,
    model: str = "m",
    headers: bytes = b"a: b\r\n",
) -> Outbound:
    """Return what the chosen worker gets of a chat request."""
    routes = dispatcher(pool, Clock())
    inbound = chat(TEXT)
    inbound.model = model
    inbound.body.update(body)
    plan = await routes.plan(pool, inbound, in_full=True)
    ticket = routes.admit(plan, routes.choose(plan))

    def offload_put(
        _plan: Plan, _body: bytes, *, also: Mapping[str, bytes] | None = None
    ) -> dict[str, bytes]:
        members = {"max_offload_tokens": b"%d" % cap, **(also or {})}
        given = inbound.body.get("kv_transfer_params", {})
        merged = {**given, **{name: orjson.loads(value) for name, value in members.items()}}
        return {"kv_transfer_params": orjson.dumps(merged)}

    found = outbound(
        plan, ticket, headers, orjson.dumps(inbound.body), None if cap is None else offload_put
    )
    ticket.finish(Outcome.OK)
    return found


async def pulling_pool(style: str = "runner") -> Pool:
    """A pool in which w1 is idle and can pull what a busy w0 holds."""
    pool = make_pool(2, engine="runner" if style == "runner" else "vllm")
    routes = dispatcher(pool, Clock())
    plan = await routes.plan(pool, chat(TEXT), in_full=True)
    hold(pool, "w0", plan.prompt)
    pool.workers["w0"].books.charge(
        1000.0, prompt_tokens=100_000, uncached_tokens=100_000, prefill_s=50.0
    )
    let_pull(pool, style)
    for worker in pool.workers.values():
        worker.learner.pull_rates.update({"w0": 1e6, "": 1e6})
    return pool


async def test_a_request_with_nothing_to_say_goes_as_it_came() -> None:
    pool = make_pool(1)
    routes = dispatcher(pool, Clock())
    plan = await routes.plan(pool, chat("q", stream=False))
    ticket = routes.admit(plan, routes.choose(plan))
    body = b'{"model" : "m"}'

    out = outbound(plan, ticket, b"h", body)
    assert (out.headers, out.path, out.offload_tokens) == (b"h", "", None)
    assert out.body is body
    ticket.finish(Outcome.OK)


async def test_where_to_fetch_kv_travels_with_the_request_to_a_bundled_runner() -> None:
    out = await sent(await pulling_pool(), {})
    params = orjson.loads(out.body)["kv_transfer_params"]

    assert params["source"]["url"] == "http://127.0.0.1:9000"
    assert params["source"]["tokens"] > 5000
    assert out.headers == b"a: b\r\n"


async def test_where_to_fetch_kv_travels_as_a_header_by_llm_ds_convention() -> None:
    out = await sent(await pulling_pool("llm-d"), {})
    params = orjson.loads(out.body)["kv_transfer_params"]

    assert out.headers == b"a: b\r\nx-kv-cache-source-host-port: 127.0.0.1:9000\r\n"
    assert params["max_load_tokens"] > 5000
    assert "source" not in params


async def test_a_clients_own_source_and_other_members_stay() -> None:
    given = {"kv_transfer_params": {"source": {"url": "http://x", "tokens": 5}, "mine": 1.0}}
    out = await sent(await pulling_pool(), given)

    assert orjson.loads(out.body)["kv_transfer_params"] == given["kv_transfer_params"]


@pytest.mark.parametrize("given", [[], "x", 5, None], ids=repr)
async def test_what_is_no_object_is_left_for_the_worker_to_refuse(given: Any) -> None:
    out = await sent(await pulling_pool(), {"kv_transfer_params": given})
    found = orjson.loads(out.body)["kv_transfer_params"]

    assert found == given or (given is None and "source" in found)


async def test_alias_hints_source_and_cap_go_into_one_body() -> None:
    pool = await pulling_pool()
    pool.aliases = {"gpt": "m"}
    body = {"warmlane": {"session": "s"}, "kv_transfer_params": {"mine": 1}, "seed": 2**63}
    out = await sent(pool, body, cap=4096, model="gpt")
    found = orjson.loads(out.body)
    params = found["kv_transfer_params"]

    assert found["model"] == "m"
    assert "warmlane" not in found
    assert found["seed"] == 2**63
    assert (params["mine"], params["max_offload_tokens"]) == (1, 4096)
    assert params["source"]["url"] == "http://127.0.0.1:9000"
    assert out.offload_tokens == 4096


async def test_a_rank_is_a_header_line() -> None:
    pool = make_pool(1)
    pool.workers["w0"].rank = 2
    out = await sent(pool, {})

    assert out.headers == b"a: b\r\nx-data-parallel-rank: 2\r\n"
