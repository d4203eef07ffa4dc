from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.tiers.fit import RelativeFit
from runner.tiers.step_model import START_TOKEN_S, StepModel
from runner.tiers.transfer_model import TransferModel

BLOCK_BYTES = 368_640


def real_step_s(tokens: int, start: int, rows: int, *, per_step: float = 0.025) -> float:
    """SmolLM2-135M in bfloat16 on one core, about."""
    attended = tokens * (start + tokens) + rows * 800
    return per_step + 1.2e-3 * (tokens + rows) + 0.85e-6 * attended + 1e-3 * rows


def real_prefill_s(start: int, tokens: int, *, per_step: float = 0.025) -> float:
    """What the steps of a prefill take beyond those of the tail they share."""
    total = per_step * (tokens // 512)
    for at in range(0, tokens, 512):
        part = min(512, tokens - at)
        total += 1.2e-3 * part + 0.85e-6 * part * (start + at + part)
    return total


def taught(rng: random.Random, num_steps: int, *, busy: float = 0.0) -> StepModel:
    """A model that has seen mixed traffic; ``busy`` of the steps took ten times as long."""
    steps = StepModel()
    for _ in range(num_steps):
        rows = rng.randrange(1, 8)
        tokens, start = 0, 0
        if rng.random() < 0.1:
            tokens, start = rng.choice([16, 100, 300, 512]), rng.choice([0, 512, 2048, 4096])
        elapsed_s = real_step_s(tokens, start, rows) * rng.lognormvariate(0, 0.1)
        if rng.random() < busy:
            elapsed_s *= 10
        steps.observe(tokens + rows, tokens * (start + tokens) + rows * 800, rows, elapsed_s)
    return steps


@pytest.mark.parametrize("busy", [0.0, 0.15])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("start", "tokens"), [(0, 64), (0, 256), (0, 1024), (2048, 1024), (4096, 512)]
)
def test_the_price_of_recomputing_is_learned_from_mixed_steps_on_a_busy_machine(
    seed: int, busy: float, start: int, tokens: int
) -> None:
    steps = taught(random.Random(seed), 1500, busy=busy)

    real_s = real_prefill_s(start, tokens)

    assert real_s / 1.5 < steps.recompute_s(start, tokens, 512) < real_s * 1.5


def test_thousands_of_decode_steps_do_not_wash_out_what_prefill_costs() -> None:
    steps = taught(random.Random(1), 600)
    before_s = steps.recompute_s(0, 1024, 512)

    for _ in range(5000):
        steps.observe(4, 3200, 4, real_step_s(0, 0, 4))

    assert steps.recompute_s(0, 1024, 512) == pytest.approx(before_s, rel=0.2)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_machine_that_becomes_quicker_or_slower_is_followed(factor: float) -> None:
    steps = taught(random.Random(2), 600)

    for _ in range(400):
        steps.observe(512, 512 * 512, 0, factor * real_step_s(512, 0, 0))

    real_s = factor * real_prefill_s(0, 1024)
    assert real_s / 1.5 < steps.recompute_s(0, 1024, 512) < real_s * 1.5


@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_one_step_is_enough_to_price_what_is_like_it_within_a_factor_of_four(tokens: int) -> None:
    steps = StepModel()

    steps.observe(tokens, tokens * tokens, 0, real_step_s(tokens, 0, 0))

    real_s = real_prefill_s(0, 1024)
    assert real_s / 4 < steps.recompute_s(0, 1024, 512) < real_s * 1.25


def test_before_the_first_step_recomputing_is_underrated() -> None:
    assert 0 < StepModel().recompute_s(0, 1000, 512) < 1000 * START_TOKEN_S * 1.5


def test_computing_nothing_costs_nothing() -> None:
    assert StepModel().recompute_s(100, 0, 512) == 0


def test_deeper_tokens_cost_more_and_whole_chunks_cost_a_step_each() -> None:
    steps = taught(random.Random(3), 1500)

    shallow_s, deep_s = steps.recompute_s(0, 512, 512), steps.recompute_s(4096, 512, 512)
    one_chunk_s, no_chunk_s = steps.recompute_s(0, 512, 512), steps.recompute_s(0, 511, 512)

    assert deep_s > 2 * shallow_s
    assert one_chunk_s - no_chunk_s > 0.02


odd_times = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-12, 1e9]),
    st.floats(1e-6, 100.0),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4096), st.integers(0, 10**8), st.integers(0, 64), odd_times),
        max_size=60,
    )
)
def test_whatever_steps_report_prices_stay_finite_and_are_never_negative(
    seen: list[tuple[int, int, int, float]],
) -> None:
    steps = StepModel()
    for tokens, attended, rows, elapsed_s in seen:
        steps.observe(tokens, attended, rows, elapsed_s)

    prices_s = [steps.recompute_s(start, 100, 512) for start in (0, 1000, 100_000)]

    assert all(math.isfinite(price_s) and price_s >= 0 for price_s in prices_s)
    assert prices_s == sorted(prices_s)


def test_a_clock_that_ticks_late_does_not_make_steps_free() -> None:
    steps = taught(random.Random(4), 600)
    before_s = steps.recompute_s(0, 1024, 512)

    steps.observe(512, 512 * 512, 0, 0.0)

    assert steps.recompute_s(0, 1024, 512) > before_s / 3


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(1e6, 100e9),
    latency_s=st.floats(1e-5, 0.05),
    spread=st.floats(0.0, 0.3),
    sizes=st.lists(st.sampled_from([1, 2, 4, 16, 64, 256]), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_after_fifty_transfers_estimates_are_within_a_factor_of_two(
    rate: float, latency_s: float, spread: float, sizes: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    transfers = TransferModel()
    for _ in range(50):
        num_bytes = rng.choice(sizes) * BLOCK_BYTES
        real_s = (latency_s + num_bytes / rate) * rng.lognormvariate(0, spread)
        transfers.observe("disk", "read", num_bytes, real_s)

    for size in sizes:
        num_bytes = size * BLOCK_BYTES
        real_s = latency_s + num_bytes / rate
        assert real_s / 2 < transfers.expect_s("disk", "read", num_bytes) < real_s * 2


@settings(max_examples=60, deadline=None)
@given(
    rate=st.floats(1e6, 100e9),
    latency_s=st.floats(1e-5, 0.05),
    seed=st.integers(0, 10_000),
)
def test_sizes_never_moved_are_estimated_from_others_within_a_factor_of_two(
    rate: float, latency_s: float, seed: int
) -> None:
    rng = random.Random(seed)
    transfers = TransferModel()
    for _ in range(50):
        num_bytes = rng.choice([1, 4, 32, 64]) * BLOCK_BYTES
        real_s = (latency_s + num_bytes / rate) * rng.lognormvariate(0, 0.05)
        transfers.observe("disk", "read", num_bytes, real_s)

    for size in (2, 16, 256):
        num_bytes = size * BLOCK_BYTES
        real_s = latency_s + num_bytes / rate
        assert real_s / 2 < transfers.expect_s("disk", "read", num_bytes) < real_s * 2


def test_what_waits_before_a_transfer_is_part_of_it() -> None:
    transfers = TransferModel()
    for _ in range(20):
        transfers.observe("disk", "read", 10_000_000, 0.01)

    alone_s = transfers.expect_s("disk", "read", 10_000_000)
    queued_s = transfers.expect_s("disk", "read", 10_000_000, 90_000_000)

    assert alone_s == pytest.approx(0.01, rel=0.1)
    assert queued_s == pytest.approx(0.1, rel=0.1)


def test_a_tier_that_turns_slow_is_believed_soon_and_comes_back_soon() -> None:
    transfers = TransferModel()
    num_bytes = 16 * BLOCK_BYTES

    def after(count: int, rate: float) -> float:
        for _ in range(count):
            transfers.observe("disk", "read", num_bytes, num_bytes / rate)
        return num_bytes / transfers.expect_s("disk", "read", num_bytes)

    assert after(50, 1e9) == pytest.approx(1e9, rel=0.05)
    assert after(1, 1e6) < 100e6
    assert after(4, 1e6) < 4e6
    assert after(8, 1e9) > 0.3e9


def test_one_hiccup_among_many_moves_an_estimate_less_than_threefold() -> None:
    transfers = TransferModel()
    for _ in range(50):
        transfers.observe("disk", "read", BLOCK_BYTES, 0.001)

    transfers.observe("disk", "read", BLOCK_BYTES, 0.01)

    assert transfers.expect_s("disk", "read", BLOCK_BYTES) < 0.003


def test_a_size_that_a_store_is_bad_at_is_known_for_it() -> None:
    # A shared Redis: 1.2 GB/s in pieces of a megabyte, 0.4 in pieces of four.
    transfers = TransferModel()
    for _ in range(50):
        transfers.observe("remote", "read", 1 << 20, (1 << 20) / 1.2e9)
        transfers.observe("remote", "read", 1 << 22, (1 << 22) / 0.4e9)

    small = (1 << 20) / transfers.expect_s("remote", "read", 1 << 20)
    large = (1 << 22) / transfers.expect_s("remote", "read", 1 << 22)

    assert small == pytest.approx(1.2e9, rel=0.4)
    assert large == pytest.approx(0.4e9, rel=0.4)


def test_the_ninetieth_percentile_is_above_nine_of_ten() -> None:
    rng = random.Random(5)
    transfers = TransferModel()
    times_s = [0.001 * rng.lognormvariate(0, 0.5) for _ in range(200)]
    for time_s in times_s:
        transfers.observe("disk", "read", BLOCK_BYTES, time_s)

    p90_s = transfers.expect_s("disk", "read", BLOCK_BYTES) * transfers.tail("disk", "read")

    assert 0.8 < sum(time_s < p90_s for time_s in times_s) / len(times_s) < 0.99


def test_tiers_directions_and_peers_are_measured_apart() -> None:
    transfers = TransferModel()
    for _ in range(20):
        transfers.observe("disk", "read", BLOCK_BYTES, 1.0)
        transfers.observe("peer", "read", BLOCK_BYTES, 1.0, "http://slow:1")

    assert transfers.expect_s("disk", "write", BLOCK_BYTES) < 0.1
    assert transfers.expect_s("cpu", "read", BLOCK_BYTES) < 0.1
    assert transfers.expect_s("peer", "read", BLOCK_BYTES, source="http://quick:1") < 0.1
    assert transfers.expect_s("peer", "read", BLOCK_BYTES, source="http://slow:1") > 0.5
    assert transfers.count("peer", "read", "http://slow:1") == 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 2**40), odd_times), max_size=40))
def test_whatever_transfers_report_estimates_stay_finite(
    seen: list[tuple[int, float]],
) -> None:
    transfers = TransferModel()
    for num_bytes, elapsed_s in seen:
        transfers.observe("remote", "read", num_bytes, elapsed_s)

    for num_bytes in (1, BLOCK_BYTES, 2**40):
        expected_s = transfers.expect_s("remote", "read", num_bytes, 10 * BLOCK_BYTES)
        assert math.isfinite(expected_s)
        assert expected_s > 0


def test_many_peers_do_not_grow_the_model_without_bound() -> None:
    transfers = TransferModel()
    for number in range(1000):
        transfers.observe("peer", "read", BLOCK_BYTES, 1.0, f"http://peer:{number}")

    assert sum(transfers.count("peer", "read", f"http://peer:{n}") for n in range(1000)) == 256


@settings(max_examples=80, deadline=None)
@given(
    weights=st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3),
    seed=st.integers(0, 10_000),
)
def test_a_fit_finds_the_weights_that_made_the_durations(weights: list[float], seed: int) -> None:
    rng = random.Random(seed)
    fit = RelativeFit((1.0, 1.0, 1.0, 1.0), memory=64)

    def draw() -> tuple[float, ...]:
        return (1.0, *(rng.uniform(0.0, 10.0) for _ in weights))

    def real_s(features: tuple[float, ...]) -> float:
        return sum(map(float.__mul__, (0.1, *weights), features))

    for _ in range(300):
        features = draw()
        fit.observe(features, real_s(features))

    assert all(weight >= 0 for weight in fit.solved())
    for _ in range(20):
        features = draw()
        assert fit.expect_s(features) == pytest.approx(real_s(features), rel=0.25)
