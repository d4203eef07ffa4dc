"""The plan of a warm-up: pure, within capacity, worth and budget, homes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.routing.cost import EVICTION_FILL, CostModel
from gateway.warm.plan import Held, Host, Placement, Wanted, make_plan

BLOCK = 16
H100 = CostModel(3.25e-5, 1.17e-9, 0.004, 5.2e-8)


def doc(name: str, tokens: int = 1600, order: str = "w0 w1 w2", **more: Any) -> Wanted:
    return Wanted(name, tokens, tokens + 100, order.split(), **more)


def host(name: str = "w0", capacity: int = 10_000, **more: Any) -> Host:
    return Host(name, capacity_tokens=capacity, model=H100, **more)


def three(**more: Any) -> list[Host]:
    return [host(f"w{k}", **more) for k in range(3)]


def where(placements: list[Placement]) -> list[tuple[str, str | None, str]]:
    return [(p.id, p.worker, p.action) for p in placements]


def test_each_copy_goes_to_the_next_worker_of_the_ring() -> None:
    placed = make_plan([doc("a", order="w1 w2 w0", copies=2)], three())
    assert where(placed) == [("a", "w1", "warm"), ("a", "w2", "warm")]
    assert all(p.seconds and p.gain_s for p in placed)


def test_more_copies_than_workers_are_as_many_as_workers() -> None:
    assert len(make_plan([doc("a", copies=9)], three())) == 3


def test_what_is_held_is_not_computed_again_and_counts_as_a_copy() -> None:
    held = {"w2": Held(1600, "cpu"), "w1": Held(800, "gpu")}
    placed = make_plan([doc("a", copies=2, held=held)], three())
    assert where(placed) == [("a", "w0", "warm"), ("a", "w2", "skip_held")] or where(placed) == [
        ("a", "w2", "skip_held"),
        ("a", "w0", "warm"),
    ]
    assert next(p for p in placed if p.worker == "w2").tier == "cpu"


def test_only_what_is_missing_costs_time_and_budget() -> None:
    item = doc("a", held={"w0": Held(1504, "gpu")})
    (placed,) = make_plan([item], [host()], budget_tokens=100)
    assert placed.action == "warm"
    (whole,) = make_plan([doc("a")], [host()])
    assert placed.seconds is not None
    assert whole.seconds is not None
    assert placed.seconds < 0.1 * whole.seconds


def test_a_full_home_spills_to_the_next_and_then_to_the_emptiest() -> None:
    hosts = [host("w0", 1000), host("w1", 10_000, active_tokens=9000), host("w2"), host("w3")]
    (placed,) = make_plan([doc("a", order="w0 w1")], [*hosts[:2], host("w2", 3000), hosts[3]])
    assert (placed.worker, placed.action) == ("w3", "warm")


def test_nothing_that_is_reused_more_often_is_evicted() -> None:
    busy = host(reused=[(5.0, 9000)])
    (placed,) = make_plan([doc("a")], [busy])
    assert (placed.action, placed.worker) == ("skip_worth", None)
    assert "w0" in placed.reason
    # What is reused less often makes room.
    (placed,) = make_plan([doc("a", reuses=6.0)], [busy])
    assert placed.action == "warm"
    (placed,) = make_plan([doc("a", pin=True)], [busy])
    assert placed.action == "warm"


def test_items_of_one_plan_do_not_evict_each_other() -> None:
    placed = make_plan([doc(f"d{k}") for k in range(10)], [host()])
    assert [p.action for p in placed] == ["warm"] * 6 + ["skip_capacity"] * 4


def test_pins_priority_and_reuse_decide_who_gets_the_room() -> None:
    items = [doc("plain"), doc("hot", reuses=9.0), doc("high", priority=1), doc("pin", pin=True)]
    placed = make_plan(items, [host(capacity=3400)])
    warm = [p.id for p in placed if p.action == "warm"]
    assert warm == ["pin", "high"]


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        ({"why": "draining"}, "is draining"),
        ({"context_tokens": 1000}, "context of 1000"),
        ({"capacity": 1600}, "room for 1600"),
        ({"adapters": ["other"]}, "adapter 'sql'"),
        ({"block_size": 4096}, "blocks of 4096"),
    ],
)
def test_who_cannot_take_it_at_all_is_named(worker: Any, reason: str) -> None:
    adapter = "sql" if "adapters" in worker else ""
    (placed,) = make_plan([doc("a", adapter=adapter)], [host(**worker)])
    assert (placed.action, placed.worker) == ("no_worker", None)
    assert placed.reason.startswith("w0 ")
    assert reason in placed.reason


def test_no_workers_at_all_are_no_crash() -> None:
    (placed,) = make_plan([doc("a", order="")], [])
    assert placed.action == "no_worker"


def test_a_worker_with_larger_blocks_gets_whole_blocks_of_its_own() -> None:
    (placed,) = make_plan([doc("a", 1000)], [host(block_size=256)])
    assert placed.tokens == 768


def test_what_does_not_fit_the_device_goes_to_the_cpu_tier_if_that_pays() -> None:
    fast = structs.replace(H100, restore_cpu_tokens_per_s=500_000.0)
    tiered = replace(host(capacity=3400), cpu_free_tokens=20_000, model=fast)
    placed = make_plan([doc(f"d{k}") for k in range(5)], [tiered])
    assert [p.tier for p in placed if p.action == "warm"] == ["cpu"] * 3 + ["gpu"] * 2
    # A tier that takes longer than computing is none.
    slow = replace(tiered, model=structs.replace(H100, restore_cpu_tokens_per_s=10_000.0))
    placed = make_plan([doc(f"d{k}") for k in range(5)], [slow])
    assert {p.tier for p in placed} == {"gpu"}


items = st.builds(
    lambda number, tokens, copies, pin, priority, reuses, order: Wanted(
        f"d{number}", tokens * BLOCK, tokens * BLOCK + 50, order, copies, pin, priority, reuses
    ),
    st.integers(0, 10**9),
    st.integers(1, 200),
    st.integers(1, 4),
    st.booleans(),
    st.integers(-1, 2),
    st.floats(0, 10),
    st.permutations([f"w{k}" for k in range(4)]).map(lambda order: order[:2]),
)
hosts_of = st.lists(
    st.builds(
        lambda capacity, active, reused, why: (capacity, active, reused, why),
        st.integers(0, 8000),
        st.integers(0, 2000),
        st.lists(st.tuples(st.floats(0, 10), st.integers(0, 2000)), max_size=4),
        st.sampled_from(["", "", "", "draining"]),
    ),
    max_size=4,
)


@given(st.lists(items, max_size=12, unique_by=lambda item: item.id), hosts_of, st.integers(0, 9000))
def test_no_plan_breaks_capacity_worth_or_budget(
    wanted: list[Wanted], workers: list[Any], budget: int
) -> None:
    hosts = [
        Host(f"w{k}", why=why, capacity_tokens=c, active_tokens=a, reused=r, model=H100)
        for k, (c, a, r, why) in enumerate(workers)
    ]
    placed = make_plan(wanted, hosts, budget)
    assert placed == make_plan(wanted, hosts, budget)
    warm = [p for p in placed if p.action == "warm"]
    assert sum(p.tokens for p in warm) <= budget
    by_id = {item.id: item for item in wanted}
    for worker in hosts:
        here = [p for p in warm if p.worker == worker.id]
        if here:
            assert not worker.why
        room = EVICTION_FILL * worker.capacity_tokens - worker.active_tokens
        if worker.capacity_tokens and here:
            assert sum(p.tokens for p in here) <= room
            for p in here:
                item = by_id[p.id]
                kept = sum(tokens for reuses, tokens in worker.reused if reuses >= item.reuses)
                assert item.pin or p.tokens + kept <= room
    for item in wanted:
        copies = [p for p in placed if p.id == item.id]
        assert len(copies) == min(item.copies, max(1, len(hosts)))
        workers_used = [p.worker for p in copies if p.worker is not None]
        assert len(set(workers_used)) == len(workers_used)
        assert all(p.reason for p in copies if p.action != "warm")
