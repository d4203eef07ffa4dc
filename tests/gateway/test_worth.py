"""Whether a lower tier pays: the rule, the sums behind it, and what they are fed with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import Settings
from gateway.fleet.fleet import Fleet
from gateway.fleet.scrape import Scrape
from gateway.fleet.watch import Watch
from gateway.routing.cost import CostModel, prefill_s
from gateway.routing.dispatch import Inbound, Outcome, Plan, Ticket, Usage
from gateway.worth.account import (
    MAX_DOCUMENTS,
    MAX_LISTED,
    MAX_TENANTS,
)
from gateway.worth.advice import separate_pools
from gateway.worth.group import WINDOW_S, Group, Rate, Use
from gateway.worth.rows import merge_reports, row_of
from gateway.worth.rule import MANAGEMENT_S, MIN_REQUESTS, Terms, Verdict, judge
from gateway.worth.seen import MAX_PROMPT_GRAINS, SeenPrefixes
from gateway.worth.tier import write_per_read
from tests.gateway.routing_parts import H100
from tests.gateway.worth_parts import FAST, Shop, asks

# A document of 8,000 tokens asked for 20 times an hour on an H100, with a CPU tier at 25 GB/s.
DOCUMENT = Terms(
    requests=21.0,
    reuse_count=20.0,
    shared_prefix_tokens=8000.0,
    recompute_s=0.30,
    restore_s=0.042,
    store_s=0.042,
    eviction_s=0.0,
    prefill_token_s=3.25e-5,
    restore_tokens_per_s=191_000.0,
)


# --- the rule ------------------------------------------------------------------------------------


def test_a_document_that_is_asked_for_again_is_worth_a_fast_tier() -> None:
    worth = judge(DOCUMENT)

    assert (worth.verdict, worth.short_verdict) == (Verdict.YES, Verdict.YES)
    assert worth.reuse_gain_s == pytest.approx(0.30 - 0.042 - MANAGEMENT_S)
    assert worth.saved_s == pytest.approx(20 * (0.30 - 0.042))


def test_the_short_form_approves_a_tier_that_loses_time_on_each_restore() -> None:
    # 20 MB/s of a model with 128 KiB a token, as in a published report: 52 s for the document.
    slow = replace(DOCUMENT, restore_s=0.40, restore_tokens_per_s=20_000.0, store_s=0.40)
    worth = judge(slow)

    assert worth.short_gain_s == pytest.approx(8000 * 20 * 3.25e-5)
    assert worth.short_cost_s == pytest.approx(0.40)
    assert worth.short_verdict is Verdict.YES
    assert worth.reuse_gain_s < 0.0
    assert worth.verdict is Verdict.NO


NOT_WORTH = {
    "a restore as slow as the prefill": {"restore_s": 0.30},
    "a gain smaller than its management": {"restore_s": 0.30 - MANAGEMENT_S / 2},
    "nobody asks again": {"reuse_count": 0.0, "recompute_s": 0.0, "restore_s": 0.0},
    "storing costs more than reuse saves": {"store_s": 6.0},
    "what it pushes out is worth more": {"eviction_s": 6.0},
}


@pytest.mark.parametrize("more", NOT_WORTH.values(), ids=NOT_WORTH)
def test_it_is_not_worth_it(more: dict[str, float]) -> None:
    assert judge(replace(DOCUMENT, **more)).verdict is Verdict.NO


@pytest.mark.parametrize(
    "more", [{"requests": MIN_REQUESTS - 1}, {"prefill_token_s": 0.0}], ids=["few", "no speed"]
)
def test_without_evidence_there_is_no_verdict(more: dict[str, float]) -> None:
    worth = judge(replace(DOCUMENT, **more))

    assert (worth.verdict, worth.short_verdict) == (Verdict.UNKNOWN, Verdict.UNKNOWN)


def test_a_guessed_bandwidth_keeps_nobody_from_trying_the_tier() -> None:
    # Workers start with a low guess, and without a first store no restore is ever measured.
    guessed = replace(DOCUMENT, restore_s=0.40, restore_tokens_per_s=20_000.0, is_measured=False)

    assert judge(replace(guessed, is_measured=True)).verdict is Verdict.NO
    assert judge(guessed).verdict is Verdict.UNKNOWN
    # But what nobody asks for again is not worth any tier.
    assert judge(replace(guessed, reuse_count=0.0)).verdict is Verdict.NO
    assert judge(replace(guessed, recompute_s=MANAGEMENT_S)).verdict is Verdict.NO


POSITIVE = st.floats(0.0, 1e6)


@given(st.builds(Terms, *[POSITIVE] * 9))
def test_the_verdict_is_both_conditions_for_any_terms(terms: Terms) -> None:
    worth = judge(terms)
    is_known = terms.requests >= MIN_REQUESTS and terms.prefill_token_s > 0
    holds = terms.recompute_s - terms.restore_s - MANAGEMENT_S > 0 and terms.reuse_count * (
        terms.recompute_s - terms.restore_s
    ) > (terms.store_s + terms.eviction_s)

    assert worth.verdict is (
        Verdict.UNKNOWN if not is_known else Verdict.YES if holds else Verdict.NO
    )


# --- sums that fade ------------------------------------------------------------------------------

USE = Use(1000, 512, 100, 0.02, 488, 488.0, 0.001, 3e-5)
RATE = Rate(170_000.0, is_measured=True)


def test_a_steady_rate_shows_as_what_comes_in_an_hour() -> None:
    group = Group(0.0)
    for minute in range(6 * 60):
        group.add(USE, 60.0 * minute)
    terms = group.terms(6 * 3600.0, RATE)

    assert terms.reuse_count == pytest.approx(60.0, rel=0.02)
    assert terms.requests == terms.reuse_count
    assert terms.shared_prefix_tokens == pytest.approx(512.0)
    assert terms.prefill_token_s == pytest.approx(3e-5)
    assert terms.restore_s == pytest.approx(512 / 170_000)


def test_what_is_hours_old_no_longer_decides() -> None:
    group = Group(0.0)
    for _ in range(100):
        group.add(USE, 0.0)
    assert group.verdict(0.0, RATE) is Verdict.YES

    assert group.verdict(4 * WINDOW_S, RATE) is Verdict.UNKNOWN


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1)), max_size=30))
def test_two_groups_together_are_the_group_of_all(steps: list[tuple[float, int]]) -> None:
    whole, parts = Group(0.0), (Group(0.0), Group(0.0))
    now_s = 0.0
    for wait_s, which in steps:
        now_s += wait_s
        whole.add(USE, now_s)
        parts[which].add(USE, now_s)
    now_s += 5.0
    parts[0].absorb(parts[1], now_s)
    whole.fade(now_s)

    # Fading of less than a second may wait, so that a request can be a second too young.
    assert parts[0].requests == pytest.approx(whole.requests, rel=1e-3)
    assert parts[0].shared_tokens == pytest.approx(whole.shared_tokens, rel=1e-3)


# --- what was computed before --------------------------------------------------------------------


def chain(*names: str, grains: int = 3) -> list[bytes]:
    """Hashes of 32 blocks a grain, where equal leading names mean equal blocks."""
    return [f"{'/'.join(names[: g + 1])}:{b}".encode() for g in range(grains) for b in range(32)]


def test_shared_is_what_was_seen_up_to_the_first_new_grain() -> None:
    seen = SeenPrefixes()

    assert seen.add(chain("a", "b", "c"), 16) == 0
    assert seen.add(chain("a", "b", "c"), 16) == 3 * 512
    assert seen.add(chain("a", "b", "x"), 16) == 2 * 512
    assert seen.add(chain("y", "b", "c"), 16) == 0
    assert seen.add(chain("a", "b", "x")[:40], 16) == 512
    assert seen.add([], 16) == 0


def test_the_memory_of_prefixes_is_bounded_and_keeps_beginnings() -> None:
    seen = SeenPrefixes(max_grains=4)
    for number in range(100):
        seen.add(chain("a", "b", f"tail {number}"), 16)
        assert len(seen) <= 4

    assert seen.add(chain("a", "b", "tail 99"), 16) == 3 * 512
    assert seen.add(chain("a", "b", "tail 1"), 16) == 2 * 512
    assert SeenPrefixes().add([b"%d" % n for n in range(32 * 1000)], 16) == 0
    long = SeenPrefixes()
    hashes = [b"%d" % n for n in range(32 * (MAX_PROMPT_GRAINS + 10))]
    long.add(hashes, 16)
    assert long.add(hashes, 16) == MAX_PROMPT_GRAINS * 512


# --- the account ---------------------------------------------------------------------------------


async def test_terms_are_priced_with_the_workers_own_constants() -> None:
    shop = Shop()
    for number in range(10):
        await shop.serve(asks("handbook", number))

    row = shop.row("documents", kind="document")

    assert row["tenant"] == "acme"
    assert row["shared_prefix_tokens"] == 4096
    assert row["reuse_count"] == pytest.approx(9.0, rel=0.01)
    assert row["recompute_s"] == pytest.approx(prefill_s(H100, 4096, 4096))
    assert row["restore_s"] == pytest.approx(4096 / H100.restore_cpu_tokens_per_s)
    assert row["reuse_gain_s"] == pytest.approx(
        row["recompute_s"] - row["restore_s"] - MANAGEMENT_S
    )
    assert row["verdict"] == shop.row("pools")["verdict"] == shop.row("tenants")["verdict"]


SLOW = CostModel(3.25e-5, 1.17e-9, 0.004, 5.2e-8, restore_cpu_tokens_per_s=10_000.0)


@pytest.mark.parametrize(
    ("model", "same", "verdict"),
    [
        (FAST, True, Verdict.YES),
        (SLOW, True, Verdict.NO),
        (FAST, False, Verdict.NO),
        (None, True, Verdict.UNKNOWN),
    ],
    ids=["reused, fast tier", "reused, slow tier", "one-shot", "no speed known"],
)
async def test_a_request_gets_the_verdict_of_its_kind(
    model: CostModel | None, same: bool, verdict: Verdict
) -> None:
    shop = Shop(model=model)
    await shop.restore_some()
    plan = None
    for number in range(12):
        plan, _ = await shop.serve(asks("handbook" if same else f"paper {number}", number))

    assert plan is not None
    assert shop.account.verdict(plan) is verdict


async def test_what_a_document_is_not_known_for_its_tenant_decides() -> None:
    shop = Shop(model=FAST)
    await shop.restore_some()
    for number in range(20):
        await shop.serve(asks("handbook", number), tenant="readers")
        await shop.serve(asks(f"paper {number}", number), tenant="one-shot")
    fresh, _ = await shop.serve(asks("new", 1), tenant="one-shot")
    other, _ = await shop.serve(asks("new", 2), tenant="readers")

    assert shop.account.verdict(fresh) is Verdict.NO
    assert shop.account.verdict(other) is Verdict.YES


async def test_a_tier_that_is_used_is_priced_by_what_it_does() -> None:
    shop = Shop(model=CostModel(3.25e-5, 1.17e-9, 0.004, 5.2e-8))
    index = shop.pool.index
    assert index is not None
    plan, _ = await shop.serve(asks("handbook", 0))
    assert plan.prompt is not None
    for worker in ("w0", "w1"):
        index.store(worker, plan.prompt.block_hashes, plan.prompt.root, tier="disk")
    for number in range(1, 10):
        await shop.serve(asks("handbook", number))

    row = shop.row("documents", kind="document")

    assert row["restore_tokens_per_s"] == pytest.approx(5000.0)  # disk, not CPU
    assert row["verdict"] == "no"


async def test_what_was_evicted_and_asked_for_again_counts_as_lost() -> None:
    shop = Shop()
    for number in range(10):
        await shop.serve(asks("evicted", number))
        await shop.serve(asks("held", number), hold_at="w0", tenant="other")

    assert shop.row("tenants", tenant="acme")["lost_tokens"] == pytest.approx(9 * 4096, rel=0.01)
    assert shop.row("tenants", tenant="other")["lost_tokens"] == 0


async def test_a_full_tier_charges_for_what_it_pushes_out() -> None:
    shop = Shop()
    for worker in shop.pool.workers.values():
        worker.capacity_tokens = 1_000_000
        worker.cpu_capacity_tokens = 1024
    await shop.serve(asks("handbook", 0))

    row = shop.row("pools")

    assert row["eviction_s"] == pytest.approx((4296 - 1024) * H100.token_s, rel=0.01)


async def test_a_capped_pool_is_charged_for_what_the_cap_lets_through() -> None:
    whole, capped = Shop(), Shop(offload_limit=lambda _plan: 1024)
    twice = Shop(offload_limit=lambda _plan: 1024, write_per_read=lambda _worker: 2.0)
    for shop in (whole, capped, twice):
        await shop.serve(asks("handbook", 0))

    assert whole.row("pools")["store_tokens"] == 4296
    assert capped.row("pools")["store_tokens"] == 1024
    assert twice.row("pools")["store_s"] == pytest.approx(2 * capped.row("pools")["store_s"])


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
async def test_attempts_that_failed_count_for_nothing(outcome: Outcome) -> None:
    shop = Shop()
    for number in range(3):
        await shop.serve(asks("handbook", number), outcome=outcome)

    assert shop.account.report()["pools"] == []


async def test_other_tenants_salts_never_share() -> None:
    shop = Shop()
    for number in range(9):
        await shop.serve(asks("handbook", number, cache_salt=f"salt {number}"))

    assert shop.row("pools")["reuse_count"] == 0


async def test_the_report_names_no_raw_key() -> None:
    shop = Shop(secret=b"s")
    await shop.serve(asks("merger with initech", 0))

    assert "initech" not in str(shop.account.report())


def plans(shop: Shop, number: int) -> Iterator[tuple[Plan, Ticket]]:
    """Plans that differ in tenant and document but share one short prompt, for volume."""
    base = Inbound("completions", {"prompt": [1, 2, 3]}, {}, "m")
    assert shop.pool.reader is not None
    prompt = shop.pool.reader.completion([1, 2, 3]).complete()
    for n in range(number):
        inbound = replace(base, headers={"x-document-id": f"d{n}"}, tenant=f"t{n}")
        plan = Plan(shop.pool, inbound, 3, prompt, prompt.block_hashes)
        yield plan, shop.routes.admit(plan, shop.routes.choose(plan))


async def test_documents_and_tenants_are_bounded_and_nothing_is_lost() -> None:
    shop = Shop()
    number = MAX_DOCUMENTS + 500
    for _, ticket in plans(shop, number):
        ticket.finish(Outcome.OK, Usage(3, 1, 0))
    report = shop.account.report()

    assert len(report["documents"]) == MAX_LISTED + 1
    assert report["documents"][-1]["document"] == "other"
    assert sum(row["requests"] for row in report["documents"]) == pytest.approx(number)
    assert len(report["tenants"]) == MAX_TENANTS + 1
    # Who came last is known by name.
    assert {f"t{number - 1}", "other"} <= {row["tenant"] for row in report["tenants"]}
    assert len(list(shop.account.tenants())) == MAX_TENANTS + 2
    assert sum(row["requests"] for row in report["tenants"]) == pytest.approx(number)


async def test_a_tenant_may_be_called_like_the_rest() -> None:
    shop = Shop()
    for _, ticket in plans(shop, MAX_TENANTS + 5):
        ticket.finish(Outcome.OK, Usage(3, 1, 0))
    await shop.serve(asks("handbook", 1), tenant="other")

    names = [tenant for _, tenant, _, _ in shop.account.tenants()]
    assert len(names) == len(set(names))
    assert {"other", "other_"} <= set(names)


# --- advice --------------------------------------------------------------------------------------


def tenant_row(name: str, **more: Any) -> dict[str, Any]:
    row = {
        "pool": "chat",
        "tenant": name,
        "requests": 200.0,
        "prompt_tokens": 1_000_000,
        "shared_tokens": 900_000,
        "lost_tokens": 300_000,
    }
    return row | more


ONE_SHOT = tenant_row("batch", shared_tokens=10_000, lost_tokens=0)


def test_one_shot_traffic_beside_evicted_reuse_is_worth_a_try_of_its_own_pool() -> None:
    (advice,) = separate_pools([tenant_row("agents"), ONE_SHOT])

    assert (advice["kind"], advice["tenant"]) == ("separate_pool", "batch")
    assert "warmlane replay" in advice["text"]


NO_ADVICE = {
    "nothing was evicted": [tenant_row("agents", lost_tokens=0), ONE_SHOT],
    "it reuses": [tenant_row("agents"), tenant_row("other")],
    "it is small": [tenant_row("agents", prompt_tokens=9_000_000), ONE_SHOT],
    "it is alone": [ONE_SHOT],
    "too few requests": [tenant_row("agents"), ONE_SHOT | {"requests": 3.0}],
    "another pool": [tenant_row("agents"), ONE_SHOT | {"pool": "batch"}],
    "nobody": [],
}


@pytest.mark.parametrize("rows", NO_ADVICE.values(), ids=NO_ADVICE)
def test_otherwise_pools_stay_together(rows: list[dict[str, Any]]) -> None:
    assert separate_pools(rows) == []


# --- several processes ---------------------------------------------------------------------------


async def test_reports_of_several_processes_are_judged_as_one() -> None:
    whole, first, second = Shop(model=FAST), Shop(model=FAST), Shop(model=FAST)
    for shop in (whole, first, second):
        await shop.restore_some()
    for number in range(12):
        for shop in (whole, first if number < 6 else second):
            await shop.serve(asks("handbook", number))
    one = whole.account.report()

    merged = merge_reports([first.account.report(), second.account.report()])

    assert merged["window_s"] == one["window_s"]
    (pool,) = merged["pools"]
    (expected,) = one["pools"]
    assert set(pool) == set(expected)
    # The second process had to see everything once itself, and had a warm-up of its own.
    (row,) = [row for row in merged["documents"] if row["tenant"] == "acme"]
    assert row["reuse_count"] == pytest.approx(10.0, rel=0.01)
    assert row["requests"] == pytest.approx(12.0, rel=0.01)
    assert row["shared_prefix_tokens"] == pytest.approx(4096, rel=0.01)
    assert row["recompute_s"] == pytest.approx(prefill_s(FAST, 4096, 4096), rel=0.01)
    assert (row["verdict"], row["is_measured"]) == ("yes", True)
    assert merge_reports([one]) == one


def test_what_one_process_measured_counts_for_all() -> None:
    row = {"pool": "chat"} | row_of(
        replace(DOCUMENT, restore_s=0.4, restore_tokens_per_s=20_000.0, is_measured=False),
        prompt_tokens=168_000,
        shared_tokens=160_000,
        lost_tokens=0,
        store_tokens=8000,
    )
    measured = {"pool": "chat"} | row_of(
        DOCUMENT, prompt_tokens=168_000, shared_tokens=160_000, lost_tokens=0, store_tokens=8000
    )
    empty = {"tenants": [], "documents": []}

    (merged,) = merge_reports([{"pools": [row]} | empty, {"pools": [measured]} | empty])["pools"]

    assert merged["restore_tokens_per_s"] == pytest.approx(191_000.0)
    assert (merged["verdict"], merged["is_measured"]) == ("yes", True)


@pytest.mark.parametrize(
    ("values", "ratio"),
    [
        ({}, 1.0),
        ({"kv_cache_offload_read_latency": 0.1}, 1.0),
        ({"kv_cache_offload_read_latency": 0.1, "kv_cache_offload_write_latency": 0.2}, 2.0),
        ({"kv_cache_offload_read_latency": 0.0, "kv_cache_offload_write_latency": 0.2}, 1.0),
        ({"kv_cache_offload_read_latency": 1e-9, "kv_cache_offload_write_latency": 9.0}, 4.0),
    ],
)
async def test_writing_is_as_dear_as_the_worker_says(
    values: dict[str, float], ratio: float
) -> None:
    config = {"name": "chat", "models": ["m"], "workers": [{"id": "w0", "url": "http://h:1"}]}
    fleet = Fleet(Settings.model_validate({"pools": [config]}))
    (worker,) = fleet.pools[0].workers.values()
    assert worker.upstream is not None

    async def nothing(_scrape: Scrape) -> None:
        return

    watch = Watch("w0", [worker], worker.upstream, on_epoch=lambda: None, on_alive=nothing)
    watch.scrape = Scrape(values=values)
    fleet.watches["w0"] = watch

    assert write_per_read(fleet)("w0") == pytest.approx(ratio)
    assert write_per_read(fleet)("gone") == 1.0
    await fleet.stop()
