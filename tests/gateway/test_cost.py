"""Each term of the cost, where the recorded decisions do not go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.cost import (
    Candidate,
    CostModel,
    Estimate,
    estimate_s,
    estimate_token_requests,
    evicted_tokens,
    prefill_s,
)

MODEL = CostModel(1e-3, 1e-6, 0.01, 1e-5, 1000.0, 500.0, 100.0)


def estimate(
    *, prompt_tokens: int = 1000, hit_tokens: int | None = None, now_s: float = 50.0, **options: Any
) -> Estimate:
    c = Candidate("w", **options)
    hit = c.hit_tokens if hit_tokens is None else hit_tokens
    return estimate_s(
        c, MODEL, now_s=now_s, prompt_tokens=prompt_tokens, hit_tokens=hit, output_tokens=200.0
    )


def test_a_fully_held_prompt_still_computes_one_token() -> None:
    assert estimate(hit_gpu=1000).uncached_tokens == 1
    assert estimate(prompt_tokens=0).uncached_tokens == 1


@given(hit=st.integers(0, 999), less=st.integers(1, 500))
def test_holding_more_never_costs_more_prefill(hit: int, less: int) -> None:
    u = 1000 - hit

    assert prefill_s(MODEL, max(1, u - less), 1000) <= prefill_s(MODEL, u, 1000)


def test_a_worker_of_unknown_capacity_has_no_memory_terms() -> None:
    e = estimate(active_tokens=10**6, held_tokens=10**6, lru_age_s=0.0)

    assert (e.memory_s, e.eviction_s) == (0.0, 0.0)


def test_what_does_not_fit_into_memory_costs_its_recompute() -> None:
    e = estimate(capacity_tokens=10_000, active_tokens=9000, new_tokens=1000)

    assert e.memory_s == pytest.approx(MODEL.token_s * (10_200 - 9800))


def test_eviction_hurts_less_the_older_the_victim_and_halves_in_five_minutes() -> None:
    full = {"capacity_tokens": 10_000, "held_tokens": 9700}
    fresh = estimate(**full, lru_age_s=0.0)
    old = estimate(**full, lru_age_s=300.0)

    assert fresh.eviction_s == pytest.approx(MODEL.token_s * 1200)
    assert old.eviction_s == pytest.approx(fresh.eviction_s / 2)


def test_no_more_is_evicted_than_is_needed_nor_less_than_nothing() -> None:
    c = Candidate("w", capacity_tokens=10_000, held_tokens=20_000)
    assert evicted_tokens(c, 100) == 300
    roomy = estimate(capacity_tokens=10_000, held_tokens=100)
    assert roomy.eviction_s == 0.0


def test_a_cpu_tier_catches_evicted_blocks_until_it_is_full() -> None:
    full = {"capacity_tokens": 10_000, "held_tokens": 9700, "cpu_capacity_tokens": 4000}
    caught = estimate(**full, cpu_held_tokens=0)
    assert caught.eviction_s == pytest.approx(1200 / 1000.0)

    spilled = estimate(**full, cpu_held_tokens=3800)
    assert spilled.eviction_s == pytest.approx(1.2 + 1000 * MODEL.token_s)


def test_each_lower_tier_restores_at_its_own_rate() -> None:
    assert estimate(hit_cpu=500).restore_s == pytest.approx(0.5)
    assert estimate(hit_disk=500).restore_s == pytest.approx(1.0)
    assert estimate(hit_remote=500).restore_s == pytest.approx(5.0)
    assert estimate(hit_gpu=500).restore_s == 0.0


def test_the_links_backlog_counts_only_for_who_restores() -> None:
    assert estimate(restore_until_s=60.0).restore_s == 0.0
    e = estimate(hit_cpu=500, restore_until_s=60.0)
    assert e.restore_s == pytest.approx(10.5)
    assert e.restore_link_s == pytest.approx(0.5)


def test_a_restore_behind_a_longer_queue_overlaps_with_it() -> None:
    e = estimate(hit_cpu=500, queued_s=2.0, progress_at_s=50.0)

    assert e.restore_s == pytest.approx(0.3 * 0.5)


def test_running_decodes_are_slowed_and_slow_down() -> None:
    idle, busy = estimate(), estimate(in_flight=10, context_tokens=20_000)
    step = MODEL.context_s * 20_000 + MODEL.token_s * 10

    assert busy.interleave_s - idle.interleave_s == pytest.approx(step)
    assert busy.interference_s == pytest.approx(0.05 * 10 * busy.prefill_s + 20.0 * step)
    assert idle.interference_s == 0.0


def test_a_long_queue_is_worked_off_in_several_steps() -> None:
    e = estimate(queued_tokens=16_000, max_batched_tokens=8192)

    assert e.interleave_s == pytest.approx(3 * MODEL.step_s)


def test_the_predicted_ttft_is_what_the_request_itself_waits_for() -> None:
    e = estimate(in_flight=10, context_tokens=20_000, queued_s=1.0, progress_at_s=49.5, bias=3.0)

    assert e.ttft_s == pytest.approx(e.queue_s + e.prefill_s + e.interleave_s)
    assert e.queue_s == 0.5
    assert e.cost == pytest.approx(3.0 * (e.ttft_s + e.interference_s))


def test_without_constants_work_is_counted_in_tokens_times_requests() -> None:
    c = Candidate("w", queued_tokens=500, in_flight=3, bias=2.0)
    e = estimate_token_requests(c, prompt_tokens=1000, hit_tokens=400)

    assert e.cost == (600 + 500) * 4 * 2.0
    assert e.ttft_s == 0.0
