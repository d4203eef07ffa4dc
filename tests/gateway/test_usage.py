"""Usage per tenant, what waits in seconds of prefill, and whose cache saves least."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.routing.cost import prefill_s
from gateway.routing.dispatch import Dispatcher, Inbound, Outcome, Plan, Ticket
from gateway.routing.dispatch import Usage as Reported
from gateway.usage.cache_value import WINDOW_S
from gateway.usage.document import COLUMNS, usage_csv, usage_document, with_replicas
from gateway.usage.hints import merged_hints
from gateway.usage.metrics import UsageCollector
from gateway.usage.scale_down import MIN_WATCHED_S, merged_rows, scale_down
from gateway.usage.usage import Usage
from tests.fakes.engine import RawEngine, Script, Seen, answer, openai_engine, usage
from tests.gateway.gate_parts import SLOW, Waiters, settled
from tests.gateway.routing_parts import H100, Clock, hold, ids, make_pool
from tests.gateway.tenancy_parts import CHAT, KEYS, T1, T2, asking, bearer, serving
from tests.gateway.test_supervisor import serving as supervised
from tests.gateway.worth_parts import Fixed
from tests.support import poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]

PROMPT, OUTPUT, CACHED = 40, 10, 32


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


def respond(seen: Seen) -> Script:
    """Serve from a cache, but for a prompt that breaks the engine."""
    if seen.method == "GET":
        return answer(b"{}")
    if b"boom" in seen.body:
        return answer(b'{"error": {"message": "no"}}', status=500)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ok"},
        "finish_reason": "stop",
    }
    counts = usage(PROMPT, OUTPUT, CACHED)
    document = {"id": "x", "model": "m", "choices": [choice], "usage": counts}
    return answer(json.dumps(document).encode())


def row_of(document: dict[str, Any], tenant: str) -> dict[str, Any]:
    (row,) = [row for row in document["tenants"] if row["tenant"] == tenant]
    return row


def series(text: bytes, prefix: str) -> dict[tuple[str, ...], float]:
    """Return name and label values -> value."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


async def test_each_tenants_requests_and_tokens_are_told_in_json_csv_and_metrics() -> None:
    limited = T2 | {"requests_per_min": 2}
    async with RawEngine(respond) as engine, serving(engine, tenants=[T1, limited]) as gw:
        assert [await gw.ask("key-t1") for _ in range(3)] == [200] * 3
        assert await gw.ask("key-t1", asking("boom")) >= 500
        assert [await gw.ask("key-t2") for _ in range(3)] == [200, 200, 429]
        assert await gw.ask("nobody's") == 401
        _, document, _ = await gw.get("/admin/v1/usage")
        _, by_query, headers = await gw.get("/admin/v1/usage?format=csv")
        _, by_accept, _ = await gw.get("/admin/v1/usage", {"accept": "text/csv"})
        _, browser, _ = await gw.get("/admin/v1/usage", {"accept": "text/html, text/csv"})
        _, metrics, _ = await gw.get("/metrics")

    # A failed request is a request, and takes no tokens.
    t1, t2, other = (row_of(document, name) for name in ("t1", "t2", "other"))
    counts = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
    assert [t1[name] for name in counts] == [4, 3 * PROMPT, 3 * CACHED, 3 * OUTPUT]
    assert [t2[name] for name in counts] == [3, 2 * PROMPT, 2 * CACHED, 2 * OUTPUT]
    assert [other[name] for name in counts] == [1, 0, 0, 0]
    assert document["totals"]["requests"] == 8
    assert document["since_unix_s"] <= document["now_unix_s"]
    assert browser["tenants"] == document["tenants"]
    assert headers["content-type"].startswith("text/csv")
    for text in (by_query, by_accept):
        rows = list(csv.DictReader(io.StringIO(text.decode())))
        assert [row["tenant"] for row in rows] == [row["tenant"] for row in document["tenants"]]
        assert [int(rows[0][name]) for name in counts] == [t1[name] for name in counts]
    shown = series(metrics, "warmlane_tenant_")
    name = "warmlane_tenant_requests_total"
    assert [shown[name, tenant] for tenant in ("t1", "t2", "other")] == [4, 3, 1]
    assert shown["warmlane_tenant_tokens_total", "cached", "t1"] == 3 * CACHED


async def test_names_in_headers_make_no_rows_and_no_series() -> None:
    server = {"access": {"trusted_peers": ["127.0.0.1"]}}
    async with RawEngine(respond) as engine, serving(engine, server=server, tenants=[T1]) as gw:
        for n in range(200):
            status, _, _ = await gw.post(CHAT, asking(), {"x-tenant-id": f"stranger-{n}"})
            assert status == 200
        status, _, _ = await gw.post(CHAT, asking(), {"x-tenant-id": "t1"})
        _, document, _ = await gw.get("/admin/v1/usage")
        _, metrics, _ = await gw.get("/metrics")

    assert {row["tenant"]: row["requests"] for row in document["tenants"]} == {
        "other": 200, "t1": 1
    }  # fmt: skip
    assert len(series(metrics, "warmlane_tenant_")) == 2 * 5
    assert series(metrics, "warmlane_label_overflows_") == {
        ("warmlane_label_overflows_total", "tenant"): 200
    }


async def test_a_tenant_called_other_is_not_everybody_else() -> None:
    async with RawEngine(respond) as engine:
        named = {"name": "other", "key_env": "K1"}
        async with serving(engine, tenants=[named]) as gw:
            await gw.ask("key-t1")
            await gw.ask("nobody's")
            _, document, _ = await gw.get("/admin/v1/usage")

    assert {row["tenant"]: row["prompt_tokens"] for row in document["tenants"]} == {
        "other": PROMPT, "other_": 0
    }  # fmt: skip


async def test_usage_needs_the_admin_token() -> None:
    server = {"access": {"admin_token_env": "ADMIN"}}
    async with RawEngine(respond) as engine, serving(engine, server=server) as gw:
        status, _, _ = await gw.get("/admin/v1/usage?format=csv")
        allowed, _, _ = await gw.get("/admin/v1/usage?format=csv", bearer(KEYS["ADMIN"]))

    assert (status, allowed) == (401, 200)


async def test_usage_of_several_processes_adds_up_and_outlives_one_that_dies(
    tmp_path: Path, valkey: Valkey
) -> None:
    async with openai_engine() as engine, supervised(tmp_path, valkey, engine.url) as gw:
        for _ in range(20):
            assert (await gw.ask()).status_code == 200
        before = (await gw.get("/admin/v1/usage")).json()
        children = gw.children
        os.kill(min(children), signal.SIGKILL)
        await poll_until(lambda: len(gw.children - children) == 1)
        after = (await gw.get("/admin/v1/usage")).json()
        table = (await gw.get("/admin/v1/usage?format=csv")).text

    assert row_of(before, "other")["requests"] == 20
    assert before["totals"]["prompt_tokens"] > 0
    assert after["tenants"] == before["tenants"]
    assert after["since_unix_s"] <= before["since_unix_s"]
    assert table.splitlines()[1].startswith("other,20,")


class Floor:
    """Two workers whose requests end at once, as ``finished`` sees them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pool = make_pool(2)
        for worker in self.pool.workers.values():
            worker.learner = Fixed(H100)
        self.usage = Usage(
            [self.pool],
            lambda name: name == "acme",
            Counter(),
            clock=self.clock,
            clock_unix=lambda: 0.0,
        )
        self.routes = Dispatcher(
            [self.pool], clock=self.clock, seed=1, on_finish=self.usage.finished
        )

    async def serve(
        self, inbound: Inbound, *, cached: int | None = None, outcome: Outcome = Outcome.OK
    ) -> tuple[Plan, Ticket]:
        inbound.tenant = "acme"
        plan = await self.routes.plan(self.pool, inbound, in_full=True)
        ticket = self.routes.admit(plan, self.routes.choose(plan))
        given = ticket.predicted_hit_tokens if cached is None else cached
        ticket.finish(outcome, Reported(plan.num_tokens, 5, given))
        hold(self.pool, ticket.worker.id, plan.prompt)
        return plan, ticket

    @property
    def saved_s(self) -> float:
        return sum(value.saved_s for value in self.usage.values.read(self.clock()))

    def value_of(self, worker: str) -> float:
        values = {value.worker: value.saved_s for value in self.usage.values.read(self.clock())}
        return values[worker]


async def test_a_hit_saves_the_prefill_that_it_makes_unnecessary() -> None:
    floor = Floor()
    await floor.serve(ids([7] * 2048))
    assert floor.saved_s == 0.0
    _, ticket = await floor.serve(ids([7] * 2048))
    hit = ticket.observed_hit_tokens
    assert hit is not None
    assert hit > 1900

    expected = prefill_s(H100, 2048, 2048) - prefill_s(H100, 2048 - hit, 2048)
    assert floor.saved_s == pytest.approx(expected)
    assert floor.value_of(ticket.worker.id) == pytest.approx(expected)
    # What was reported counts, not what was predicted; more than the prompt is no more than it.
    await floor.serve(ids([7] * 2048), cached=0)
    assert floor.saved_s == pytest.approx(expected)
    await floor.serve(ids([7] * 2048), cached=10**9)
    assert floor.saved_s == pytest.approx(expected + prefill_s(H100, 2048, 2048))


async def test_bringing_a_prefix_back_from_a_lower_tier_is_taken_off() -> None:
    floor = Floor()
    plan, _ = await floor.serve(ids([7] * 2048))
    index = floor.pool.index
    assert index is not None
    assert plan.prompt is not None
    for worker in floor.pool.workers:
        index.clear(worker)
        index.store(worker, plan.prompt.block_hashes, plan.prompt.root, tier="cpu")
    _, ticket = await floor.serve(ids([7] * 2048))
    hit, restore_s = ticket.observed_hit_tokens, ticket.decision.estimate().restore_s
    assert hit
    assert restore_s > 0.0

    whole = prefill_s(H100, 2048, 2048) - prefill_s(H100, 2048 - hit, 2048)
    assert floor.saved_s == pytest.approx(max(0.0, whole - restore_s))


async def test_what_failed_or_cannot_be_priced_saved_nothing() -> None:
    floor = Floor()
    await floor.serve(ids([7] * 2048))
    await floor.serve(ids([7] * 2048), outcome=Outcome.TRUNCATED)
    assert floor.saved_s == 0.0
    for worker in floor.pool.workers.values():
        worker.learner = Fixed(None)
    await floor.serve(ids([7] * 2048))

    assert list(floor.usage.values.read(floor.clock())) == [], "absent where it is unknown"


async def test_a_value_fades_and_ends_with_the_cache_it_was_of() -> None:
    floor = Floor()
    await floor.serve(ids([7] * 2048))
    _, ticket = await floor.serve(ids([7] * 2048))
    worker, fresh_s = ticket.worker, floor.saved_s
    floor.clock.now_s += WINDOW_S
    assert floor.saved_s == pytest.approx(fresh_s / 2.718281828, rel=1e-6)

    worker.epoch = 5.0  # another process under that address, with nothing in its cache
    assert floor.value_of(worker.id) == 0.0
    floor.pool.remove(worker.id)
    assert [value.worker for value in floor.usage.values.read(floor.clock())] == [
        name for name in ("w0", "w1") if name != worker.id
    ]


async def test_queued_prefill_is_what_waits_at_workers_and_in_the_gateway() -> None:
    waiters = Waiters(1)
    usage_of = Usage([waiters.pool], lambda _: False, Counter(), clock=waiters.clock)
    registry = CollectorRegistry()
    registry.register(UsageCollector(usage_of, waiters.routes, waiters.clock))

    def queued_s() -> float | None:
        return registry.get_sample_value("warmlane_queued_prefill_seconds", {"pool": "chat"})

    assert queued_s() == 0.0
    ticket = await waiters.send(300)  # 3 s of work, of which none is done
    assert queued_s() == pytest.approx(3.0, rel=0.05)
    task = await waiters.wait(500)
    assert queued_s() == pytest.approx(8.0, rel=0.05)
    ticket.finish(Outcome.OK)
    await settled(waiters.timers, 0.1)
    assert queued_s() == pytest.approx(5.0, rel=0.05)
    (await task).finish(Outcome.OK)  # type: ignore[union-attr]
    assert queued_s() == 0.0
    # A pool whose speed nobody knows has no seconds to tell.
    for worker in waiters.pool.workers.values():
        worker.learner.model = None
    assert queued_s() is None
    worker.learner.model = SLOW
    assert queued_s() == 0.0


def value(worker: str, saved_s: float, **fields: Any) -> dict[str, Any]:
    row = {"pool": "chat", "worker": worker, "saved_s": saved_s, "requests": 40.0}
    return row | {"watched_s": 10 * WINDOW_S} | fields


def test_the_worker_whose_cache_saves_least_is_named_with_the_reason() -> None:
    rows = [value("w0", 90.0), value("w1", 4.0), value("w2", 60.0)]
    (advice,) = scale_down([*rows, value("only", 1.0, pool="single")])

    assert (advice["pool"], advice["worker"], advice["saved_s"]) == ("chat", "w1", 4.0)
    for said in ("'w1'", "4.00 s of prefill", "3% of the pool's 154.0", "60.00 to 90.00 s each"):
        assert said in advice["text"], advice["text"]
    assert "warmlane workers drain w1" in advice["text"]


def test_a_young_cache_is_judged_by_its_rate_and_a_new_one_not_at_all() -> None:
    hour, young = 3600.0, MIN_WATCHED_S
    # 25 s in a quarter of an hour are more than 90 s in a whole one.
    rows = [value("w0", 90.0 * (1 - 2.718281828**-1), watched_s=hour)]
    (advice,) = scale_down([*rows, value("w1", 25.0, watched_s=young)])
    assert advice["worker"] == "w0"
    assert scale_down([*rows, value("w1", 0.0, watched_s=young - 1)]) == []


def test_differences_within_few_requests_are_no_advice() -> None:
    assert scale_down([value("w0", 9.0, requests=20.0), value("w1", 1.0, requests=20.0)]) == []


def test_values_of_several_processes_add_up_before_they_are_judged() -> None:
    first = [value("w0", 9.0), value("w1", 10.0)]
    second = [value("w0", 5.0, watched_s=60.0), value("w1", 1.0)]
    rows = merged_rows([first, second])

    assert [(row["saved_s"], row["watched_s"]) for row in rows] == [
        (14.0, 10 * WINDOW_S), (11.0, 10 * WINDOW_S)
    ]  # fmt: skip
    assert [advice["worker"] for advice in scale_down(rows)] == ["w1"]


async def test_requests_that_name_documents_and_chunks_are_counted() -> None:
    floor = Floor()
    chunked = {"documents": [{"id": "a", "chunks": ["some text"]}]}
    for hint in ({}, {"documents": [{"id": "a"}]}, chunked, {"session": "s"}, {"documents": "?"}):
        await floor.serve(ids([7] * 64, warmlane=hint))
    by_header = ids([7] * 64)
    by_header.headers = {"x-document-id": "a"}
    await floor.serve(by_header)
    await floor.serve(ids([7] * 64, warmlane=chunked), outcome=Outcome.TRUNCATED)

    (row,) = floor.usage.worth()["hints"]
    assert row == {"pool": "chat", "requests": 6, "with_documents": 3, "with_chunks": 1}
    assert merged_hints([[row], [row], []]) == [
        {"pool": "chat", "requests": 12, "with_documents": 6, "with_chunks": 2}
    ]


async def test_worth_tells_the_value_of_each_workers_cache() -> None:
    async with RawEngine(respond) as engine, serving(engine) as gw:
        for worker in gw.gateway.fleet.pools[0].workers.values():
            worker.learner = Fixed(H100)
        await gw.ask("")
        _, document, _ = await gw.get("/admin/v1/worth")

    (row,) = document["workers"]
    assert (row["pool"], row["worker"]) == ("chat", "w0")
    assert row["requests"] == pytest.approx(1.0, abs=0.01)
    assert row["saved_s"] > 0.0
    assert document["scale_down"] == []


def test_the_page_names_every_field_and_metric() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "usage.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)

    assert rows == ["tenant", *COLUMNS]
    head = (
        usage_csv(with_replicas(usage_document([], 0.0, 1.0), 1, 0, is_shared=False))
        .decode()
        .strip()
    )
    assert head in page
    waiters = Waiters(1)
    usage_of = Usage([waiters.pool], lambda _: False, Counter(), clock=waiters.clock)
    shown = {metric.name for metric in UsageCollector(usage_of, waiters.routes).collect()}
    named = {name.removesuffix("_total") for name in re.findall(r"`(warmlane_\w+)", page)}
    # The value of caches stands on the page of what they are worth.
    assert named == shown - {"warmlane_worker_cache_value_seconds"}
