"""Greedy tokens equal transformers' in float32, whatever the cache, the batch and the pool."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from runner.model import Model
from tests.runner.driver import Driver

# The reference computes everything twice over, on a machine that may have much else to do.
pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 16

# Lengths at and around block boundaries (16 tokens a block), and longer ones.
LENGTHS = (15, 16, 17, 32, 33, 48, 100, 230)


def text_like(seed: int, length: int) -> list[int]:
    """Return token ids with repetition, as text has it, so that logits are not flat."""
    rng = random.Random(seed)
    words = [rng.randrange(100, 20_000) for _ in range(max(4, length // 4))]
    return [rng.choice(words) for _ in range(length)]


PROMPTS = [text_like(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def reference(smollm2_hf: Any) -> list[list[int]]:
    """What transformers generates for each prompt, one prompt at a time."""
    return [generate(smollm2_hf, prompt) for prompt in PROMPTS]


def generate(model: Any, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=2,
        )
    return output[0, len(prompt) :].tolist()


def test_cold_then_warm_prompts_give_the_reference_tokens(
    smollm2: Model, reference: list[list[int]]
) -> None:
    driver = Driver(smollm2)
    for prompt, expected in zip(PROMPTS, reference, strict=True):
        cold, warm = (driver.submit(prompt, max_tokens=NUM_TOKENS) for _ in range(2))
        driver.run()

        assert driver.tokens(cold) == expected
        assert driver.tokens(warm) == expected
        assert driver.cached_tokens(cold) == 0
        assert driver.cached_tokens(warm) == (len(prompt) - 1) // 16 * 16


def test_a_batch_of_eight_gives_the_reference_tokens(
    smollm2: Model, reference: list[list[int]]
) -> None:
    driver = Driver(smollm2)
    ids = [driver.submit(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    driver.run()

    assert [driver.tokens(request_id) for request_id in ids] == reference


def test_small_prefill_chunks_between_decodes_give_the_reference_tokens(
    smollm2: Model, reference: list[list[int]]
) -> None:
    driver = Driver(smollm2, max_batched_tokens=32)
    ids = [driver.submit(prompt, max_tokens=NUM_TOKENS) for prompt in reversed(PROMPTS)]
    driver.run()

    assert [driver.tokens(request_id) for request_id in reversed(ids)] == reference


def test_a_partly_evicted_prompt_gives_the_reference_tokens(
    smollm2: Model, reference: list[list[int]]
) -> None:
    driver = Driver(smollm2, pool_tokens=20 * 16)
    prompt, expected = PROMPTS[-1], reference[-1]
    assert driver.complete(prompt, max_tokens=NUM_TOKENS) == expected
    driver.complete(text_like(99, 150), max_tokens=2)
    again = driver.submit(prompt, max_tokens=NUM_TOKENS)
    driver.run()

    assert driver.tokens(again) == expected
    assert 0 < driver.cached_tokens(again) < (len(prompt) - 1) // 16 * 16


def test_preempted_prompts_give_the_reference_tokens(
    smollm2: Model, reference: list[list[int]]
) -> None:
    def complete_together(pool_blocks: int) -> tuple[list[list[int]], int]:
        driver = Driver(smollm2, pool_tokens=pool_blocks * 16)
        ids = [driver.submit(prompt, max_tokens=34) for prompt in PROMPTS[2:5]]
        driver.run()
        return [driver.tokens(at) for at in ids], driver.core.stats().preemptions_total

    roomy, none = complete_together(20)
    # The prompts fit together, their completions do not.
    tight, preemptions = complete_together(10)

    assert (none, preemptions > 0) == (0, True)
    assert tight == roomy
    assert [tokens[:NUM_TOKENS] for tokens in tight] == reference[2:5]


@pytest.mark.parametrize("at", [2, 3], ids=["partial last block", "full last block"])
def test_eight_greedy_samples_of_one_prompt_all_give_the_reference_tokens(
    smollm2: Model, reference: list[list[int]], at: int
) -> None:
    driver = Driver(smollm2)
    request_id = driver.submit(PROMPTS[at], max_tokens=NUM_TOKENS, n=8)
    driver.run()

    assert [driver.tokens(request_id, index) for index in range(8)] == [reference[at]] * 8
    assert driver.core.stats().prompt_tokens_total == len(PROMPTS[at])


def test_two_salts_share_nothing_and_give_the_same_tokens(
    smollm2: Model, reference: list[list[int]]
) -> None:
    driver = Driver(smollm2)
    for salt in ("tenant-a", "tenant-b", ""):
        request_id = driver.submit(PROMPTS[4], max_tokens=4, salt=salt)
        driver.run()

        assert driver.tokens(request_id) == reference[4][:4]
        assert driver.cached_tokens(request_id) == 0
