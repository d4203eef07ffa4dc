"""Leaving out whom a bound excludes changes neither the choice nor the tied set, ever."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.choose import Decision, RouteInput, choose, compared_positions
from gateway.routing.cost import STORE, Candidate, CostModel, Source
from gateway.routing.prices import TIE, Prices

NOW_S = 1000.0
PROMPT_TOKENS = 8000
# Few values per field, so that equal candidates and exact ties are common.
MODELS = [
    CostModel(3.25e-5, 1.17e-9, 0.004, 5.2e-8, 190e3, 45e3, 9e3),
    CostModel(4.0e-5, 1.17e-9, 0.004, 5.2e-8, 190e3, 45e3, 9e3),
    CostModel(3e-3, 1e-6, 0.02, 1e-6),
]


@st.composite
def candidate(draw: st.DrawFn, k: int, models: list[CostModel | None]) -> Candidate:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    n = one_of(0, 0, 1, 12)
    return Candidate(
        f"w{k}",
        eligible=one_of(True, True, True, False),
        hit_gpu=one_of(0, 0, 512, 7680),
        hit_cpu=one_of(0, 0, 512, 4096),
        hit_disk=one_of(0, 0, 0, 4096),
        pending_tokens=one_of(0, 0, 0, 7000),
        in_flight=n,
        queued_tokens=n * one_of(0, 700, 8000),
        queued_s=n * one_of(0.0, 0.03, 0.5),
        context_tokens=n * 5000,
        progress_at_s=one_of(NOW_S - 5.0, NOW_S - 0.1, NOW_S + 0.1),
        active_tokens=n * 5000,
        new_tokens=PROMPT_TOKENS,
        restore_until_s=one_of(0.0, NOW_S + 0.4),
        max_batched_tokens=one_of(2048, 8192),
        capacity_tokens=one_of(0, 50_000, 400_000),
        held_tokens=one_of(0, 49_000, 399_000),
        lru_age_s=one_of(0.0, 300.0, draw(st.floats(0, 1000))),
        cpu_capacity_tokens=one_of(0, 400_000),
        cpu_held_tokens=one_of(0, 400_000),
        bias=one_of(1.0, 1.0, 4.0),
        overdue_s=one_of(0.0, 0.0, 0.7),
        model=one_of(*models),
        can_pull=one_of(False, True),
        pull_rates=one_of({}, {"w0": 90e3}, {"": 50e3, "w1": 8e3, STORE: 1e6}),
        in_busy_until_s=one_of(0.0, NOW_S + 0.2),
    )


@st.composite
def requests(draw: st.DrawFn) -> RouteInput:
    count = draw(st.integers(1, 9))
    models: list[CostModel | None] = [*MODELS[: draw(st.integers(1, 3))]]
    if draw(st.integers(0, 9)) == 0:
        models.append(None)
    return RouteInput(
        NOW_S,
        PROMPT_TOKENS,
        [draw(candidate(k, models)) for k in range(count)],
        mode=draw(st.sampled_from(["cost", "cost", "cost", "least_load"])),
        output_tokens=draw(st.sampled_from([0.0, 200.0, 2000.0])),
        home=draw(st.sampled_from([[], ["w1", "w3"]])),
        sources=draw(
            st.sampled_from(
                [[], [Source("w0", 7680)], [Source("w1", 7680, NOW_S + 0.3), Source(STORE, 4096)]]
            )
        ),
        draws=draw(st.lists(st.integers(0, count - 1), max_size=3)),
    )


def in_full(request: RouteInput, decision: Decision) -> list[str]:
    """The tied set among all prices, as the definition says."""
    costs = [estimate.cost for estimate in decision.candidates]
    compared = compared_positions(request)
    least = min(costs[i] for i in compared)
    return [request.candidates[i].worker for i in compared if costs[i] <= least + TIE]


@settings(max_examples=200, deadline=None)
@given(request=requests(), rotation=st.integers(0, 9))
def test_the_pruned_search_finds_what_pricing_everybody_finds(
    request: RouteInput, rotation: int
) -> None:
    decision = choose(request, rotation=rotation)
    if decision.worker is None or request.mode == "least_load":
        return
    assert decision.tied == in_full(request, decision)
    assert decision.estimate() == decision.candidates[decision.position]


@settings(max_examples=60, deadline=None)
@given(request=requests(), rotation=st.integers(0, 9))
def test_any_decision_is_taken_again_from_its_json(request: RouteInput, rotation: int) -> None:
    decision = choose(request, rotation=rotation)
    read = Decision.from_json(decision.to_json())

    assert read == decision
    assert choose(read.input, rotation=read.rotation) == decision
    assert read.candidates == decision.candidates


def test_workers_without_the_prefix_are_not_priced_while_its_holder_is_cheap() -> None:
    model = MODELS[0]
    candidates = [
        Candidate(f"w{k}", hit_gpu=7680 if k == 7 else 0, in_flight=k % 3, model=model)
        for k in range(64)
    ]
    request = RouteInput(NOW_S, PROMPT_TOKENS, candidates)
    prices = Prices(request, [c.hit_tokens for c in candidates], in_seconds=True)

    assert prices.least(range(64)) == [7]
    assert list(prices.known) == [7]
