"""Choosing tokens: frequencies, cuts, seeds, log probabilities."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch

from runner.sampling import Draw, Drawn, draw_tokens, new_generator
from runner.types import SamplingParams

# Probabilities 0.5, 0.25, 0.15, 0.1 at tokens 3, 1, 0, 2.
LOGITS = torch.log(torch.tensor([[0.15, 0.25, 0.1, 0.5]]))


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1} | changes)


def draw(logits: torch.Tensor = LOGITS, rng: Random | None = None, **changes: Any) -> Drawn:
    return draw_tokens(logits, [Draw(0, params(**changes), rng or Random(1))])[0]


def frequencies(count: int = 4000, **changes: Any) -> dict[int, float]:
    rng = Random(5)
    counts = Counter(draw(rng=rng, **changes).token_id for _ in range(count))
    return {token: number / count for token, number in counts.items()}


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert draw(temperature=0.0).token_id == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_logits_are_broken_by_the_lowest_token(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-3.0, -1.0, -1.0, -2.0]], dtype=dtype)
    assert draw(logits, temperature=0.0).token_id == 1


def test_draws_follow_the_probabilities() -> None:
    found = frequencies()
    for token, expected in {3: 0.5, 1: 0.25, 0: 0.15, 2: 0.1}.items():
        assert found[token] == pytest.approx(expected, abs=0.03)


def test_temperature_sharpens_the_draws() -> None:
    found = frequencies(temperature=0.5)
    assert found[3] == pytest.approx(0.25 / (0.25 + 0.0625 + 0.0225 + 0.01), abs=0.03)


def test_top_k_keeps_the_k_likeliest_tokens() -> None:
    found = frequencies(top_k=2)
    assert set(found) == {3, 1}
    assert found[3] == pytest.approx(2 / 3, abs=0.03)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {3}), (0.6, {3, 1}), (0.76, {3, 1, 0}), (1.0, {3, 1, 0, 2})]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert set(frequencies(1000, top_p=top_p)) == kept


def test_top_p_applies_after_top_k() -> None:
    # Among the two likeliest, 3 alone has two thirds.
    assert set(frequencies(1000, top_k=2, top_p=0.66)) == {3}


@pytest.mark.parametrize("cuts", [{}, {"top_k": 2}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-50, 5e-324])
def test_a_tiny_temperature_takes_the_likeliest_token(
    temperature: float, cuts: dict[str, float]
) -> None:
    assert set(frequencies(5, temperature=temperature, **cuts)) == {3}


def test_a_wide_nucleus_reaches_beyond_the_first_candidates() -> None:
    """A flat distribution over 2,000 tokens: 0.9 of it is 1,800 tokens."""
    logits = torch.zeros(1, 2000)
    rng = Random(2)
    tokens = {draw(logits, rng, top_p=0.9).token_id for _ in range(3000)}

    assert 1200 < len(tokens) <= 1801


def test_a_seed_fixes_the_tokens_and_each_sample_has_its_own() -> None:
    logits = torch.zeros(1, 1000)

    def tokens(seed: int, index: int) -> list[int]:
        settings = params(seed=seed)
        rng = new_generator(settings, index)
        return [draw_tokens(logits, [Draw(0, settings, rng)])[0].token_id for _ in range(8)]

    assert tokens(1, 0) == tokens(1, 0)
    assert len({tuple(tokens(seed, index)) for seed in (1, 2) for index in range(4)}) == 8


def test_without_a_seed_draws_differ() -> None:
    logits = torch.zeros(1, 100_000)
    drawn = {draw(logits, new_generator(params(), 0)).token_id for _ in range(5)}
    assert len(drawn) > 1


def test_what_shares_the_batch_does_not_change_a_draw() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(3))
    settings = params(seed=9, top_p=0.9)

    alone = draw_tokens(logits[1:2], [Draw(0, settings, new_generator(settings, 0))])[0]
    others = [Draw(row, params(temperature=0.7), Random(row)) for row in (0, 2)]
    mine = Draw(1, settings, new_generator(settings, 0))
    together = draw_tokens(logits, [others[0], mine, others[1]])[1]

    assert alone == together


def test_log_probabilities_are_those_of_the_model_best_first() -> None:
    drawn = draw(temperature=0.0, logprobs=3)

    assert drawn.logprob == pytest.approx(math.log(0.5))
    assert drawn.top_logprobs is not None
    assert [token for token, _ in drawn.top_logprobs] == [3, 1, 0]
    assert [math.exp(value) for _, value in drawn.top_logprobs] == pytest.approx([0.5, 0.25, 0.15])


def test_temperature_and_cuts_do_not_change_log_probabilities() -> None:
    drawn = draw(temperature=2.0, top_k=1, logprobs=0)

    assert (drawn.token_id, drawn.top_logprobs) == (3, [])
    assert drawn.logprob == pytest.approx(math.log(0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be 0 or more"),
        ({"temperature": math.nan}, "temperature must be 0 or more"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "at most 1, got 1.1"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"n": 17}, "n must be between 1 and 16"),
        ({"logprobs": -1}, "logprobs must be 0 or more"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_impossible_parameters_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        params(**changes)
