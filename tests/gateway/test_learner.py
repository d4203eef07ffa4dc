"""Constants are learned from honest measurements and survive dishonest ones."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.cost import CostModel, prefill_s
from gateway.routing.learner import Learner, OutputLength, slowest

TRUE = CostModel(3.25e-5, 1.17e-9, 0.004, 5.2e-8)
START = CostModel(1e-4, 3e-9, 0.01, 2e-7)


def prompts(seed: int, count: int) -> list[tuple[int, int]]:
    """(uncached, prompt tokens) over four orders of magnitude."""
    rng = Random(seed)
    lengths = [int(10 ** rng.uniform(2, 5)) for _ in range(count)]
    return [(max(64, int(length * rng.uniform(0.2, 1.0))), length) for length in lengths]


def observe(learner: Learner, uncached: int, prompt_tokens: int, factor: float = 1.0) -> None:
    ttft_s = (prefill_s(TRUE, uncached, prompt_tokens) + TRUE.step_s) * factor
    learner.observe_prefill(ttft_s, uncached_tokens=uncached, prompt_tokens=prompt_tokens)


def known(learner: Learner) -> CostModel:
    assert learner.model is not None
    return learner.model


def test_nothing_is_claimed_before_a_prefill_was_seen() -> None:
    learner = Learner()
    learner.observe_decode(1.0, gaps=100, context_tokens=100, in_flight=1)
    assert learner.model is None
    learner.observe_prefill(0.5, uncached_tokens=10, prompt_tokens=10)
    assert learner.model is None


def test_one_measurement_is_enough_to_start_and_starts_high() -> None:
    learner = Learner()
    observe(learner, 1000, 1000)

    assert TRUE.token_s < known(learner).token_s < 4 * TRUE.token_s


@pytest.mark.parametrize("start", [None, START], ids=["unknown", "configured"])
@pytest.mark.parametrize("seed", range(5))
def test_predictions_come_close_for_short_and_long_prompts(
    start: CostModel | None, seed: int
) -> None:
    learner = Learner(start)
    rng = Random(seed)
    for uncached, length in prompts(seed, 200):
        gap_s = TRUE.step_s + TRUE.context_s * length + TRUE.token_s
        learner.observe_decode(50 * gap_s, gaps=50, context_tokens=length, in_flight=1)
        observe(learner, uncached, length, rng.uniform(0.9, 1.1))
    for uncached, length in ((500, 500), (8000, 8000), (2000, 60_000), (60_000, 60_000)):
        predicted = prefill_s(known(learner), uncached, length)

        assert predicted == pytest.approx(prefill_s(TRUE, uncached, length), rel=0.35)


def test_stray_measurements_do_not_move_the_constants_far() -> None:
    learner = Learner()
    rng = Random(3)
    for turn, (uncached, length) in enumerate(prompts(3, 300)):
        # Every tenth measurement is 50 times too long: a stalled machine.
        observe(learner, uncached, length, 50.0 if turn % 10 == 0 else rng.uniform(0.9, 1.1))
    for uncached, length in ((500, 500), (20_000, 20_000)):
        ratio = prefill_s(known(learner), uncached, length) / prefill_s(TRUE, uncached, length)

        assert 0.7 < ratio < 1.7


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), start=st.sampled_from([None, START]))
def test_an_eighth_of_nonsense_moves_no_prediction_by_more_than_a_factor_of_two(
    seed: int, start: CostModel | None
) -> None:
    learner, rng = Learner(start), Random(seed)
    for turn, (uncached, length) in enumerate(prompts(seed, 300)):
        factor = rng.uniform(0.9, 1.1)
        # The first one counts as it is: a start that is far off is outvoted by the next four.
        if turn % 8 == 5:
            factor = rng.choice([0.01, 50.0])
        gap_s = TRUE.step_s + TRUE.context_s * length + TRUE.token_s
        learner.observe_decode(50 * gap_s * factor, gaps=50, context_tokens=length, in_flight=1)
        observe(learner, uncached, length, factor)
    for uncached, length in ((500, 500), (20_000, 20_000), (2000, 60_000)):
        ratio = prefill_s(known(learner), uncached, length) / prefill_s(TRUE, uncached, length)
        assert 0.5 < ratio < 2.0
    # At the very end of the lengths that were seen, a few measurements are all there is.
    for context in (2000, 50_000):
        learned = known(learner).step_s + known(learner).context_s * context
        assert 0.5 < learned / (TRUE.step_s + TRUE.context_s * context) < 2.0


def test_a_slow_first_measurement_is_outvoted() -> None:
    learner = Learner()
    observe(learner, 1000, 1000, 30.0)
    for _ in range(4):
        observe(learner, 1000, 1000)

    assert known(learner).token_s < 2 * TRUE.token_s


@pytest.mark.parametrize("factor", [1e-6, 1e6], ids=["far too fast", "far too slow"])
def test_no_run_of_odd_measurements_leaves_a_factor_of_four(factor: float) -> None:
    learner = Learner(START)
    for uncached, length in prompts(7, 500):
        observe(learner, uncached, length, factor)
        learner.observe_decode(factor, gaps=10, context_tokens=length, in_flight=1)
    for name in ("token_s", "attention_s", "step_s", "context_s"):
        assert 0.25 <= getattr(known(learner), name) / getattr(START, name) <= 4.0
    assert known(learner).restore_cpu_tokens_per_s == START.restore_cpu_tokens_per_s


def test_prompts_of_one_length_do_not_upset_the_fit() -> None:
    learner = Learner()
    for _ in range(500):
        observe(learner, 2000, 2000)
    predicted = prefill_s(known(learner), 2000, 2000)

    assert predicted == pytest.approx(prefill_s(TRUE, 2000, 2000), rel=0.25)


def test_decode_constants_are_learned_from_gaps() -> None:
    learner = Learner(START)
    rng = Random(5)
    for _ in range(300):
        running, context = rng.randint(1, 20), rng.randint(1000, 300_000)
        gap_s = TRUE.step_s + TRUE.context_s * context + known(learner).token_s * running
        learner.observe_decode(
            100 * gap_s, gaps=100, context_tokens=float(context), in_flight=running
        )
    model = known(learner)
    for context in (2000, 250_000):
        learned = model.step_s + model.context_s * context
        true = TRUE.step_s + TRUE.context_s * context

        assert learned == pytest.approx(true, rel=0.3)


def test_short_streams_and_impossible_times_are_ignored() -> None:
    learner = Learner(START)
    learner.observe_decode(9.0, gaps=2, context_tokens=10, in_flight=1)
    learner.observe_decode(0.0, gaps=50, context_tokens=10, in_flight=1)
    learner.observe_prefill(0.0, uncached_tokens=500, prompt_tokens=500)

    assert learner.model == START


def test_an_unmeasured_worker_is_believed_to_be_the_slowest_of_its_pool() -> None:
    borrowed = slowest([TRUE, START])
    assert borrowed is not None

    assert (borrowed.token_s, borrowed.step_s) == (START.token_s, START.step_s)
    assert slowest([]) is None


def test_the_mean_completion_moves_slowly() -> None:
    length = OutputLength()
    assert length.mean_tokens == 200.0
    length.observe(1200)
    assert length.mean_tokens == pytest.approx(210.0)
