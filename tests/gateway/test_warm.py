"""Warm-up over a whole gateway: what was warmed is hit, and nothing is said to be that is not."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.routing.cost import CostModel
from tests.fakes.engine import End, Script, Seen, answer, head
from tests.fakes.gateway import RawClient, wire
from tests.gateway.routing_parts import BLOCK
from tests.gateway.warm_parts import (
    MARKER,
    Caching,
    asking,
    end,
    item,
    of,
    text_of,
    warming_over,
)
from tests.gateway.worth_parts import Fixed
from tests.support import poll_until


async def test_what_was_warmed_is_hit_by_the_first_user(tmp_path: Path) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine) as (gateway, _):
        events = await gateway.warm([item("handbook")])
        (placement,) = events[0]["placements"]
        (verified,) = of(events, "verified")
        assert end(events)["warm"] == 1
        assert verified["warm"]
        assert verified["proven"]
        assert verified["cached_tokens"] == verified["wanted_tokens"] == placement["tokens"]
        before = engine.computed_tokens
        answered = await gateway.ask(text_of("handbook"), "And who decides?", "handbook")
        cached = answered["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == placement["tokens"]
        assert engine.computed_tokens - before == answered["usage"]["prompt_tokens"] - cached
        # What stands in front of the question is shared but for a part of a block.
        shared = len(f"<|im_start|>system\n{text_of('handbook')}") // BLOCK * BLOCK - 2 * BLOCK
        assert placement["tokens"] >= shared


async def test_a_second_run_sends_no_prefill(tmp_path: Path) -> None:
    engines = [Caching(), Caching()]
    items = [item(f"d{k}") for k in range(6)]
    async with warming_over(tmp_path, *engines) as (gateway, _):
        first = end(await gateway.warm(items))
        assert first["warm"] == 6
        assert first["computed_tokens"] > 0
        events = await gateway.warm(items)
        assert end(events)["warm"] == 6
        assert end(events)["computed_tokens"] == 0
        assert {p["action"] for p in events[0]["placements"]} == {"skip_held"}
        assert not of(events, "start")


async def test_a_run_goes_on_where_one_was_cut_off(tmp_path: Path) -> None:
    engine = Caching(prefill_token_s=4e-4)
    items = [item(f"d{k}") for k in range(6)]
    async with warming_over(tmp_path, engine) as (gateway, _):
        body = {"model": "m", "items": items, "run_id": "first", "concurrency": 1}
        async with gateway.session.post(gateway.url + "/admin/v1/warm", json=body) as response:
            async for line in response.content:
                if json.loads(line)["event"] == "verified":
                    break
            response.close()

        async def is_stopped() -> bool:
            (run,) = (await gateway.get("/admin/v1/warm"))["runs"]
            return bool(run["state"] == "stopped")

        await poll_until(is_stopped, what="the run stops when its client has left")
        (run,) = (await gateway.get("/admin/v1/warm"))["runs"]
        assert run["run_id"] == "first"
        done = [row for row in run["documents"] if row["state"] == "warm"]
        assert 0 < len(done) < 6
        before = engine.computed_tokens
        events = await gateway.warm(items)
        assert end(events)["warm"] == 6
        assert end(events)["computed_tokens"] < engine.computed_tokens
        assert engine.computed_tokens - before <= end(events)["computed_tokens"] + 2 * 6 + 6


async def test_copies_go_to_the_home_of_the_key_that_requests_have(tmp_path: Path) -> None:
    engines = [Caching() for _ in range(4)]
    async with warming_over(tmp_path, *engines, affinity={"set_size": 2}) as (gateway, _):
        asked = asking(text_of("a"), "Why?")
        _, told = await gateway.post("/admin/v1/explain", asked, headers={"x-document-id": "a"})
        events = await gateway.warm([item("a", copies=2)])
        workers = [p["worker"] for p in events[0]["placements"]]
        assert workers == told["affinity"]["home"]
        assert sum(bool(engine.held) for engine in engines) == 2
        # Without a document's id in the requests their prefix decides.
        _, told = await gateway.post("/admin/v1/explain", asking(text_of("b"), MARKER))
        events = await gateway.warm([item("b", headers={})])
        assert [p["worker"] for p in events[0]["placements"]] == told["affinity"]["home"][:1]


async def test_a_dry_run_sends_nothing(tmp_path: Path) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine) as (gateway, _):
        events = await gateway.warm([item("a")], dry_run=True, verify=False)
        assert [event["event"] for event in events] == ["plan", "end"]
        assert not engine.prompts
        # With verify it says what is not there, and computes nothing.
        events = await gateway.warm([item("a")], dry_run=True)
        (verified,) = of(events, "verified")
        assert not verified["warm"]
        assert verified["reason"] == "not held"
        assert not engine.prompts
        await gateway.warm([item("a")])
        (verified,) = of(await gateway.warm([item("a")], dry_run=True), "verified")
        assert verified["warm"]


async def test_token_ids_and_stable_tokens_are_warmed_as_given(tmp_path: Path) -> None:
    engine = Caching()
    ids = list(range(100, 100 + 4 * BLOCK))
    body = asking(text_of("stable"), "and the question")
    items = [
        {"id": "ids", "kind": "prefix", "token_ids": ids},
        {"id": "whole", "kind": "prefix", "body": {"prompt": "x" * 100}},
        {"id": "stable", "body": body},
    ]
    async with warming_over(tmp_path, engine) as (gateway, _):
        events = await gateway.warm(items)
        assert end(events)["warm"] == 3, events
        tokens = {p["id"]: p["tokens"] for p in events[0]["placements"]}
        assert tokens["ids"] == 4 * BLOCK
        assert tokens["whole"] == 100 // BLOCK * BLOCK
        _, told = await gateway.post("/admin/v1/explain", body)
        assert tokens["stable"] == told["stable_tokens"] // BLOCK * BLOCK
        # k shareable tokens need k + 1 sent.
        assert [*ids, ids[-1]] in engine.prompts


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        ("vllm", "/v1/completions"),
        ("runner", "/v1/completions"),
        ("sglang", "/generate"),
        ("openai", "/v1/chat/completions"),
    ],
)
async def test_each_engine_is_asked_in_its_own_way(tmp_path: Path, engine: str, path: str) -> None:
    fake = Caching()
    async with warming_over(tmp_path, fake, engine=engine) as (gateway, raws):
        events = await gateway.warm([item("a")])
        assert end(events)["warm"] == 1, events
        posted = [seen for seen in raws[0].seen if seen.method == "POST"]
        asked = [seen for seen in posted if seen.target == path]
        assert len(asked) == 2  # once to compute, once to prove
        body = asked[0].json()
        assert MARKER not in json.dumps(body)
        params = body.get("sampling_params", body)
        assert params.get("max_new_tokens", params.get("max_tokens")) == 1


async def test_the_same_model_name_salt_and_rank_go_along(tmp_path: Path) -> None:
    fake = Caching()
    async with warming_over(tmp_path, fake, aliases={"gpt": "m"}) as (gateway, _):
        events = await gateway.warm([item("a", body={**asking(text_of("a"), MARKER),
                                                     "model": "gpt"})])  # fmt: skip
        assert end(events)["warm"] == 1
        assert {body["model"] for body in fake.bodies} == {"m"}


DEEP: dict[str, Any] = {"messages": [], "tools": []}
for _ in range(300):
    DEEP = {"messages": [], "tools": [DEEP]}
BAD_ITEMS: dict[str, tuple[Any, str]] = {
    "no object": (7, "expected an object"),
    "no id": ({"body": asking("x", "y")}, "expected an id"),
    "unknown field": ({"id": "bad", "bodi": {}}, "unknown field"),
    "no body": ({"id": "bad"}, "expected a body"),
    "neither messages nor prompt": ({"id": "bad", "body": {"model": "m"}}, "messages"),
    "kind": ({"id": "bad", "kind": "book", "body": asking("x", "y")}, "document or prefix"),
    "copies": ({"id": "bad", "copies": 0, "body": asking("x", "y")}, "copies"),
    "pin": ({"id": "bad", "pin": 1, "body": asking("x", "y")}, "pin"),
    "priority": ({"id": "bad", "priority": "high", "body": asking("x", "y")}, "priority"),
    "token ids": ({"id": "bad", "kind": "prefix", "token_ids": [1, -1]}, "token ids"),
    "unknown model": (
        {"id": "bad", "body": {**asking("x", "y"), "model": "other"}},
        "no pool serves the model 'other'; expected m",
    ),
    "marker is not there": (
        {"id": "bad", "body": asking("x" * 100, "y"), "marker": MARKER},
        "is not in the body",
    ),
    "marker first": (
        {"id": "bad", "body": {"prompt": f"{MARKER} " + "x" * 99}, "marker": MARKER},
        "no shareable block",
    ),
    "nothing shareable": (
        {
            "id": "bad",
            "body": {"messages": [{"role": "user", "content": MARKER}]},
            "marker": MARKER,
        },
        "no shareable block",
    ),
    "nested too deep": ({"id": "bad", "body": DEEP, "marker": MARKER}, "cannot be read"),
    "template refuses": (
        {"id": "bad", "body": {**asking("x", MARKER), "chat_template": "{{ x }}"},
         "marker": MARKER},
        "cannot be read",
    ),
    "odd messages": ({"id": "bad", "body": {"messages": [[[]]]}}, "cannot be read"),
    "no Unicode": ({"id": "bad", "body": asking("x" * 99, "y"), "marker": 5}, "marker"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ITEMS)
async def test_a_bad_item_is_named_and_the_others_are_warmed(tmp_path: Path, case: str) -> None:
    bad, expected = BAD_ITEMS[case]
    async with warming_over(tmp_path, Caching()) as (gateway, _):
        events = await gateway.warm([item("good"), bad, item("fine")])
        assert end(events)["warm"] == 2, events
        assert end(events)["failed"] == 1
        (refused,) = events[0]["refused"]
        assert expected in refused["reason"]
        (failed,) = of(events, "failed")
        assert failed["worker"] is None
        assert failed["reason"] == refused["reason"]


async def test_an_id_that_stands_twice_is_refused_the_second_time(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching()) as (gateway, _):
        events = await gateway.warm([item("a"), item("a", text_of("b"))])
        assert end(events)["warm"] == 1
        assert "twice" in events[0]["refused"][0]["reason"]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (Caching(context_tokens=400), "context of 400 tokens"),
        (Caching(capacity_tokens=400), "room for 400 tokens"),
    ],
)
async def test_what_fits_no_worker_is_named(tmp_path: Path, engine: Caching, expected: str) -> None:
    async with warming_over(tmp_path, engine) as (gateway, _):
        events = await gateway.warm([item("large"), item("small", text_of("small", 100))])
        large = next(p for p in events[0]["placements"] if p["id"] == "large")
        assert (large["action"], large["worker"]) == ("no_worker", None)
        assert expected in large["reason"]
        assert end(events)["warm"] == 1
        assert end(events)["failed"] == 1


def _garbage(_: Seen) -> Script:
    return answer(b"not json")


FAULTS: dict[str, Any] = {
    "refuses": lambda _: answer(b'{"error": {"message": "no such model"}}', 404),
    "fails": lambda _: answer(b"{}", 500),
    "busy": lambda _: answer(b"{}", 503),
    "resets": lambda _: [End.RST],
    "closes": lambda _: [End.FIN],
    "breaks off": lambda _: [head(200, "content-length: 100"), b"{", End.FIN],
    "garbage": _garbage,
    "no object": lambda _: answer(b"[1]"),
    "empty": lambda _: answer(b"{}"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_worker_is_named_and_the_rest_continues(tmp_path: Path, fault: str) -> None:
    bad, good = Caching(before=FAULTS[fault]), Caching()
    async with warming_over(tmp_path, bad, good) as (gateway, _):
        events = await gateway.warm([item(f"d{k}") for k in range(8)])
        last = end(events)
        assert 0 < last["warm"] < 8
        assert last["warm"] + last["failed"] == 8
        for failed in of(events, "failed"):
            assert failed["worker"] == "w0"
            assert "w0" in failed["reason"]
        warm = {v["id"] for v in of(events, "verified") if v["warm"]}
        assert len(warm) == last["warm"]
        assert not {p["id"] for p in events[0]["placements"] if p["worker"] == "w0"} & warm
        metrics = await _metrics(gateway)
        assert f'warmlane_warm_failed_total{{worker="w0"}} {last["failed"]}.0' in metrics


async def _metrics(gateway: Any) -> str:
    async with gateway.session.get(gateway.url + "/metrics") as response:
        return str(await response.text())


async def test_a_worker_that_dies_in_mid_run_is_named(tmp_path: Path) -> None:
    dying, living = Caching(), Caching()
    async with warming_over(tmp_path, dying, living) as (gateway, raws):
        deaths = 0

        def die(_: Seen) -> Script | None:
            nonlocal deaths
            if len(dying.prompts) < 3:
                return None
            deaths += 1
            raws[0]._server.close()  # type: ignore[union-attr]
            return [End.RST]

        dying.before = die
        events = await gateway.warm([item(f"d{k}") for k in range(10)], concurrency=1)
        last = end(events)
        assert deaths
        assert last["failed"] > 0
        assert last["warm"] > 0
        assert last["warm"] + last["failed"] + last["partial"] == 10


async def test_a_worker_that_drains_in_mid_run_gets_nothing_more(tmp_path: Path) -> None:
    draining, other = Caching(), Caching()
    async with warming_over(tmp_path, draining, other) as (gateway, _):
        pool = gateway.gateway.fleet.pools[0]

        def drain(_: Seen) -> None:
            if len(draining.prompts) == 2:
                pool.drain("w0")

        draining.before = drain  # type: ignore[assignment]
        events = await gateway.warm([item(f"d{k}") for k in range(10)], concurrency=1)
        failed = of(events, "failed")
        assert failed
        assert all(event["worker"] == "w0" and "draining" in event["reason"] for event in failed)
        assert len(draining.prompts) <= 3
        # A worker that drains already is not planned for.
        events = await gateway.warm([item("late")])
        assert [p["worker"] for p in events[0]["placements"]] == ["w1"]


async def test_what_an_engine_does_not_prove_is_not_called_warm(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching(reports_cached=False)) as (gateway, _):
        events = await gateway.warm([item("a")])
        (verified,) = of(events, "verified")
        assert (verified["warm"], verified["proven"]) == (False, False)
        assert "unproven" in verified["reason"]
        assert end(events)["warm"] == 0


async def test_a_cache_that_forgets_is_not_called_warm(tmp_path: Path) -> None:
    engine = Caching()

    def forget(_: Seen) -> None:
        engine.held.clear()

    engine.before = forget  # type: ignore[assignment]
    async with warming_over(tmp_path, engine) as (gateway, _):
        events = await gateway.warm([item("a")])
        (verified,) = of(events, "verified")
        assert not verified["warm"]
        assert "hit 0 of" in verified["reason"]
        assert end(events)["failed"] == 1


async def test_what_is_believed_to_be_held_and_is_not_is_computed_by_its_probe(
    tmp_path: Path,
) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine) as (gateway, _):
        await gateway.warm([item("a")])
        engine.held.clear()
        events = await gateway.warm([item("a")])
        assert events[0]["placements"][0]["action"] == "skip_held"
        assert end(events)["warm"] == 1
        assert end(events)["computed_tokens"] == events[0]["placements"][0]["tokens"]


@pytest.mark.parametrize(
    ("body", "status", "expected"),
    [
        ([], 400, "object"),
        ({}, 400, "'items' is required"),
        ({"items": {}}, 400, "'items'"),
        ({"items": [], "itms": 1}, 400, "Unknown field 'itms'"),
        ({"items": [], "concurrency": 0}, 400, "concurrency"),
        ({"items": [], "max_share": 0}, 400, "max_share"),
        ({"items": [], "max_share": True}, 400, "max_share"),
        ({"items": [], "budget_tokens": -1}, 400, "budget_tokens"),
        ({"items": [], "verify": "no"}, 400, "verify"),
        ({"items": [], "run_id": 5}, 400, "run_id"),
        ({"items": [], "model": "other"}, 404, "does not exist"),
        ({"from_live": {"limit": 0}}, 400, "limit"),
        ({"from_live": {}, "items": []}, 400, "from_live"),
        ({"from_live": {"limit": 5}}, 400, "keep_warm"),
        ({"items": [{}] * 10_001}, 413, "at most 10000"),
    ],
)
async def test_what_is_no_order_is_an_error_before_the_stream(
    tmp_path: Path, body: Any, status: int, expected: str
) -> None:
    async with warming_over(tmp_path, Caching()) as (gateway, _):
        found, document = await gateway.post("/admin/v1/warm", body)
        assert found == status
        assert expected in document["error"]["message"]


async def test_a_body_above_the_limit_is_a_413(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching()) as (gateway, _):
        body = io.BytesIO(b'{"items": [], "run_id": "' + b"x" * (33 << 20) + b'"}')
        url = gateway.url + "/admin/v1/warm"
        try:
            async with gateway.session.post(url, data=body) as response:
                assert response.status == 413
                assert "limit" in (await response.json())["error"]["message"]
        except aiohttp.ClientError:
            pass  # refused before all of it was sent


async def test_a_second_run_is_refused_while_one_is_under_way(tmp_path: Path) -> None:
    gate = asyncio.Event()
    engine = Caching(before=lambda _: None if gate.is_set() else [gate, *answer(b"{}", 500)])
    async with warming_over(tmp_path, engine) as (gateway, raws):
        first = asyncio.ensure_future(gateway.warm([item("a")], run_id="one"))
        await poll_until(
            lambda: any("completions" in s.target for s in raws[0].seen), what="it sends"
        )
        status, found = await gateway.post("/admin/v1/warm", {"items": [item("b")], "model": "m"})
        assert status == 409
        assert found["error"]["code"] == "warm_running"
        assert "'one'" in found["error"]["message"]
        events = await gateway.warm([item("b")], dry_run=True, verify=False)
        assert end(events)["dry_run"]
        (run,) = (await gateway.get("/admin/v1/warm"))["runs"]
        assert (run["run_id"], run["state"]) == ("one", "running")
        gate.set()
        assert end(await first)["failed"] == 1
        assert end(await gateway.warm([item("b")]))["warm"] == 1


async def test_a_budget_is_kept_and_what_is_beyond_it_is_named(tmp_path: Path) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine) as (gateway, _):
        items = [item("first", priority=1), item("second")]
        tokens = (await gateway.warm(items, dry_run=True))[0]["placements"][0]["tokens"]
        events = await gateway.warm(items, budget_tokens=tokens + 10)
        actions = {p["id"]: p["action"] for p in events[0]["placements"]}
        assert actions == {"first": "warm", "second": "skip_budget"}
        assert end(events)["computed_tokens"] <= tokens + 10
        assert end(events)["warm"] == 1


async def test_no_worker_at_all_is_told(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching()) as (gateway, _):
        gateway.gateway.fleet.pools[0].drain("w0")
        events = await gateway.warm([item("a")])
        (placement,) = events[0]["placements"]
        assert placement["action"] == "no_worker"
        assert "draining" in placement["reason"]
        assert end(events)["failed"] == 1


async def test_routing_sees_the_load_of_a_warm_up(tmp_path: Path) -> None:
    gate = asyncio.Event()
    slow = Caching(before=lambda _: None if gate.is_set() else [gate, *answer(b"{}", 500)])
    async with warming_over(tmp_path, slow, Caching()) as (gateway, raws):
        names = [f"d{k}" for k in range(12)]
        run = asyncio.ensure_future(gateway.warm([item(name) for name in names]))
        await poll_until(
            lambda: any("completions" in s.target for s in raws[0].seen), what="it sends"
        )
        rows = {row["id"]: row for row in (await gateway.get("/admin/v1/workers"))["workers"]}
        assert rows["w0"]["queued_tokens"] > 0
        gate.set()
        await run


async def test_a_warm_up_yields_to_a_waiting_user(tmp_path: Path) -> None:
    gate = asyncio.Event()
    engine = Caching()

    def hold_users(seen: Seen) -> Script | None:
        if "chat" in seen.target and not gate.is_set():
            return [gate, *answer(b'{"choices": [], "usage": {}}')]
        return None

    engine.before = hold_users
    async with warming_over(tmp_path, engine) as (gateway, raws):
        user = asyncio.ensure_future(gateway.ask("short", "q"))
        await poll_until(lambda: any("chat" in s.target for s in raws[0].seen), what="a user")
        run = asyncio.ensure_future(gateway.warm([item("a")]))

        async def is_running() -> bool:
            runs = (await gateway.get("/admin/v1/warm"))["runs"]
            return bool(runs and runs[0]["documents"])

        await poll_until(is_running, what="the run is planned")
        assert not engine.prompts
        gate.set()
        await user
        assert end(await run)["warm"] == 1


async def test_users_hits_on_what_was_warmed_are_counted(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching()) as (gateway, _):
        events = await gateway.warm([item("a")])
        tokens = events[0]["placements"][0]["tokens"]
        for question in ("Who?", "How?"):
            await gateway.ask(text_of("a"), question, "a")
        metrics = await _metrics(gateway)
        assert f'warmlane_warm_hit_tokens_total{{worker="w0"}} {2 * tokens}.0' in metrics
        assert f'warmlane_warm_computed_tokens_total{{worker="w0"}} {tokens}.0' in metrics
        assert 'warmlane_warm_documents{worker="w0"} 1.0' in metrics


async def test_warming_is_not_counted_as_traffic(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching()) as (gateway, _):
        await gateway.warm([item("a")])
        await gateway.warm([item("a")])
        assert not (await gateway.get("/admin/v1/worth"))["documents"]
        assert (await gateway.get("/admin/v1/misses"))["totals"]["requests"] == 0


async def test_what_was_pushed_out_by_what_came_after_it_is_not_called_warm(
    tmp_path: Path,
) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine) as (gateway, _):
        pool = gateway.gateway.fleet.pools[0]
        index, reader = pool.index, pool.reader
        assert index is not None
        assert reader is not None
        pool.set_mode(pool.workers["w0"], "exact")
        # An engine that tells what it holds, and that has room for two documents.
        held: dict[bytes, list[bytes]] = {}

        def announce(seen: Seen) -> None:
            prompt = reader.completion(seen.json()["prompt"]).complete()
            hashes = prompt.block_hashes
            if hashes[4] not in held:
                held[hashes[4]] = hashes
                index.store("w0", hashes, prompt.root)
            if len(held) > 2:
                gone = held.pop(next(iter(held)))
                index.remove("w0", gone[1:])
                engine.held -= set(gone)

        engine.before = announce  # type: ignore[assignment]
        events = await gateway.warm([item(f"d{k}") for k in range(4)], concurrency=1)
        assert sum(v["warm"] for v in of(events, "verified")) == 4
        evicted = [v for v in of(events, "verified") if "evicted" in v["reason"]]
        assert [v["id"] for v in evicted] == ["d0", "d1"]
        assert (end(events)["warm"], end(events)["failed"]) == (2, 2)


async def test_a_later_run_does_not_push_out_what_an_earlier_one_put_there(
    tmp_path: Path,
) -> None:
    # Room for one document.
    async with warming_over(tmp_path, Caching(capacity_tokens=1600)) as (gateway, _):
        assert end(await gateway.warm([item("first")]))["warm"] == 1
        events = await gateway.warm([item("second")])
        assert events[0]["placements"][0]["action"] == "skip_worth"
        assert end(events)["failed"] == 1
        assert end(await gateway.warm([item("pinned", pin=True)]))["warm"] == 1


async def test_a_client_that_leaves_at_once_leaves_no_run_behind(tmp_path: Path) -> None:
    async with warming_over(tmp_path, Caching()) as (gateway, _):
        body = json.dumps({"model": "m", "items": [item(f"d{k}") for k in range(20)]}).encode()
        client = await RawClient.connect(int(gateway.url.rpartition(":")[2]))
        await client.send(wire(body, path="/admin/v1/warm"))
        await client.close()

        async def is_over() -> bool:
            runs = (await gateway.get("/admin/v1/warm"))["runs"]
            return all(run["state"] not in ("running", "stopping") for run in runs)

        await poll_until(is_over, deadline_s=30.0, what="no run is under way")
        assert end(await gateway.warm([item("next")]))["warm"] == 1


async def test_while_a_worker_is_tried_again_its_other_items_wait_for_it(tmp_path: Path) -> None:
    engine = Caching()
    async with warming_over(tmp_path, engine) as (gateway, _):
        worker = gateway.gateway.fleet.pools[0].workers["w0"]
        now_s = asyncio.get_running_loop().time()
        for _ in range(10):
            worker.health.failed(now_s)
        assert not worker.health.may_route(now_s)
        events = await gateway.warm([item(f"d{k}") for k in range(4)], concurrency=4)
        assert end(events)["warm"] == 4, events


async def test_a_worker_that_keeps_failing_is_given_up(tmp_path: Path) -> None:
    engine = Caching(before=lambda _: answer(b"{}", 500))
    async with warming_over(tmp_path, engine) as (gateway, raws):
        events = await gateway.warm([item(f"d{k}") for k in range(30)], concurrency=1)
        assert end(events)["failed"] == 30
        sent = [seen for seen in raws[0].seen if "completions" in seen.target]
        assert len(sent) < 10


async def test_beside_users_one_short_piece_goes_at_a_time_and_the_worker_is_left_to_them(
    tmp_path: Path,
) -> None:
    begun_s: list[float] = []
    engine = Caching(prefill_token_s=1e-4)

    def note(seen: Seen) -> None:
        if "completions" in seen.target:
            begun_s.append(asyncio.get_running_loop().time())

    async with warming_over(tmp_path, engine) as (gateway, _):
        await gateway.ask("a short question", "from a user who reads the answer now")
        first = len(engine.computed)
        engine.before = note  # type: ignore[assignment]
        events = await gateway.warm([item(f"d{k}") for k in range(3)], concurrency=3, max_share=0.2)
    assert end(events)["warm"] == 3
    pieces = [
        (at_s, tokens * engine.prefill_token_s)
        for at_s, tokens in zip(begun_s, engine.computed[first:], strict=True)
        if tokens > BLOCK  # the others are probes
    ]
    assert len(pieces) > 3  # no document went in one
    for (at_s, took_s), (next_s, _) in itertools.pairwise(pieces):
        assert next_s >= at_s + took_s / 0.2


async def test_beside_users_of_a_quick_engine_a_piece_is_a_step(tmp_path: Path) -> None:
    engine = Caching()
    step = CostModel(token_s=2e-5, attention_s=1e-12, step_s=0.006, context_s=1e-9)
    async with warming_over(tmp_path, engine) as (gateway, _):
        gateway.gateway.fleet.pools[0].workers["w0"].learner = Fixed(step)
        await gateway.ask("a short question", "from a user who reads the answer now")
        first = len(engine.computed)
        events = await gateway.warm([item("d", text_of("d", 4000))])
    assert end(events)["warm"] == 1
    pieces = engine.computed[first:]
    # As many tokens as a step takes, in whole blocks, and the one more that is sent.
    assert max(pieces) <= step.step_s / step.token_s + 1
    assert sum(pieces) >= 4000


async def test_without_users_documents_are_computed_together(tmp_path: Path) -> None:
    gate, num_sent = asyncio.Event(), 0

    def meet(seen: Seen) -> Script | None:
        nonlocal num_sent
        if "completions" not in seen.target:
            return None
        num_sent += 1
        if num_sent == 2:
            gate.set()
        return [gate, *answer(b"{}", 500)]

    async with warming_over(tmp_path, Caching(before=meet)) as (gateway, _):
        # They would wait for each other for ever if one came after the other.
        events = await gateway.warm([item("a"), item("b")], concurrency=2)
        assert end(events)["failed"] == 2


async def test_a_document_is_proven_while_the_next_one_is_computed(tmp_path: Path) -> None:
    engine, gate = Caching(), asyncio.Event()
    heads: list[list[int]] = []

    def hold_second(seen: Seen) -> Script | None:
        if "completions" not in seen.target:
            return None
        heads.append(seen.json()["prompt"][: 4 * BLOCK])
        return None if heads[-1] == heads[0] else [gate, *answer(b"{}", 500)]

    engine.before = hold_second
    async with warming_over(tmp_path, engine) as (gateway, _):
        items = [item("first", priority=1), item("second")]
        body = {"model": "m", "items": items, "concurrency": 1}
        async with gateway.session.post(gateway.url + "/admin/v1/warm", json=body) as response:
            async for line in response.content:
                event = json.loads(line)
                if event["event"] == "verified":
                    assert (event["id"], event["warm"]) == ("first", True)
                    gate.set()
            assert (event["warm"], event["failed"]) == (1, 1)
