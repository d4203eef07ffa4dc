"""Scheduling on a real (tiny) model: fairness, budgets, sharing, preemption, limits, aborts."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from prefix_index.events import AllBlocksCleared, BlockRemoved, BlockStored
from runner.model import Model
from runner.scheduler import Scheduler
from tests.runner.driver import Driver


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(2, 97) for _ in range(length)]


def scheduler_of(driver: Driver) -> Scheduler:
    return driver.core._scheduler


def test_running_samples_get_a_token_in_every_step_of_a_long_prefill(tiny: Model) -> None:
    driver = Driver(tiny, max_batched_tokens=32)
    talker = driver.submit(prompt_of(10), max_tokens=20)
    driver.step()
    reader = driver.submit(prompt_of(150, 1), max_tokens=1)
    steps = 0
    while not driver.tokens(reader):
        before = len(driver.tokens(talker))
        driver.step()
        steps += 1
        assert len(driver.tokens(talker)) == before + 1

    # 31 tokens beside the decode row, cut to one block a step; the last 22 fit one step.
    assert steps == 9


def test_prefill_chunks_end_at_block_boundaries_within_the_budget(tiny: Model) -> None:
    driver = Driver(tiny, max_batched_tokens=40)
    driver.submit(prompt_of(100))
    sizes = []
    while driver.core.has_work and not driver.outputs:
        plan = scheduler_of(driver).schedule(0.0)
        sizes += [work.num_tokens for work in plan.work]
        driver.core._compute(plan)

    assert sizes == [32, 32, 36]


def test_requests_are_admitted_in_order_even_if_a_later_one_would_fit(tiny: Model) -> None:
    driver = Driver(tiny, pool_tokens=12 * 16)
    first = driver.submit(prompt_of(100), max_tokens=10)
    driver.step()
    large, small = driver.submit(prompt_of(120, 1)), driver.submit(prompt_of(5, 2))
    while not driver.last(first).finish_reason:
        driver.step()
        assert not driver.tokens(large)
        assert not driver.tokens(small)
    driver.run()

    ended = [output.request_id for output in driver.outputs if output.finish_reason]
    assert set(ended) == {first, large, small}


def test_a_burst_with_one_prefix_computes_it_once(tiny: Model) -> None:
    driver = Driver(tiny)
    prefix = prompt_of(64)
    ids = [driver.submit([*prefix, *prompt_of(5, seed)]) for seed in range(6)]
    driver.run()

    assert [driver.cached_tokens(request_id) for request_id in ids] == [0, 64, 64, 64, 64, 64]
    assert driver.core.stats().hit_tokens_total == 5 * 64


def test_waiting_for_a_prefix_ends_when_its_owner_is_aborted(tiny: Model) -> None:
    driver = Driver(tiny, max_batched_tokens=16)
    prefix = prompt_of(64)
    owner, follower = driver.submit([*prefix, 5]), driver.submit([*prefix, 6])
    driver.step()
    driver.core.abort(owner)
    driver.run()

    assert len(driver.tokens(follower)) == 8
    assert driver.cached_tokens(follower) == 16


def test_the_youngest_is_preempted_and_everybody_finishes(tiny: Model) -> None:
    driver = Driver(tiny, pool_tokens=9 * 16)
    prompts = [prompt_of(30, seed) for seed in range(3)]
    ids = [driver.submit(prompt, max_tokens=60) for prompt in prompts]
    first_done = None
    while driver.core.has_work:
        driver.step()
        ended = [output.request_id for output in driver.outputs if output.finish_reason]
        first_done = first_done or next(iter(ended), None)

    assert driver.core.stats().preemptions_total > 0
    assert first_done == ids[0]
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert driver.tokens(request_id) == Driver(tiny).complete(prompt, max_tokens=60)


def test_a_request_is_not_admitted_into_room_that_running_samples_need_next(tiny: Model) -> None:
    """Otherwise the very next block boundary would preempt it again."""
    driver = Driver(tiny, pool_tokens=8 * 16)
    first = driver.submit(prompt_of(62), max_tokens=20)
    driver.step()
    # Four blocks are left, but the running sample is about to need the fifth of its own.
    second = driver.submit(prompt_of(60, 1), max_tokens=2)
    driver.run()

    assert driver.core.stats().preemptions_total == 0
    ended = [output.request_id for output in driver.outputs if output.finish_reason]
    assert ended == [first, second]


def test_a_lone_request_may_fill_the_pool_to_its_last_block(tiny: Model) -> None:
    driver = Driver(tiny, pool_tokens=6 * 16)
    driver.complete(prompt_of(60, 1))
    request_id = driver.submit(prompt_of(20), max_tokens=500)
    driver.run()

    assert len(driver.tokens(request_id)) == 6 * 16 - 20
    assert driver.last(request_id).finish_reason == "length"


@pytest.mark.parametrize(
    ("sizes", "prompt", "params", "message"),
    [
        ({}, [], {}, "the prompt has no tokens"),
        ({"pool_tokens": 1600}, prompt_of(512), {}, r"512 tokens; .* may have 512 \(maximum con"),
        ({"max_model_len": 100}, prompt_of(100), {}, "100 tokens; .* may have 100"),
        ({"pool_tokens": 64}, prompt_of(64), {}, "64 tokens; the KV pool holds 64"),
        ({"max_seqs": 3}, [5], {"n": 4}, "n is 4; at most 3 samples"),
        ({}, [5, 97], {}, "between 0 and 96"),
        ({}, [5, -1], {}, "between 0 and 96"),
    ],
    ids=["empty", "context", "max_model_len", "pool", "n", "token id", "negative token id"],
)
def test_a_request_that_can_never_run_is_refused_with_the_limit(
    tiny: Model, sizes: dict[str, Any], prompt: list[int], params: dict[str, Any], message: str
) -> None:
    driver = Driver(tiny, **sizes)
    request_id = driver.submit(prompt, **params)

    assert not driver.core.has_work
    for index in range(params.get("n", 1)):
        assert driver.last(request_id, index).finish_reason == "error"
        assert re.search(message, driver.last(request_id, index).error or "")


def test_a_completion_ends_at_the_context(tiny: Model) -> None:
    driver = Driver(tiny, max_model_len=64)
    request_id = driver.submit(prompt_of(60), max_tokens=500)
    driver.run()

    assert len(driver.tokens(request_id)) == 4
    assert driver.last(request_id).finish_reason == "length"


@pytest.mark.parametrize("steps", range(12))
def test_an_abort_in_any_phase_frees_everything_at_once(tiny: Model, steps: int) -> None:
    """Waiting, first chunk, later chunks, before and after the samples part, decode."""
    driver = Driver(tiny, max_batched_tokens=16)
    other = driver.submit(prompt_of(20, 9), max_tokens=30)
    doomed = driver.submit(prompt_of(60), max_tokens=30, n=3)
    for _ in range(steps):
        driver.step()
    driver.core.abort(doomed)
    driver.check()

    assert [driver.last(doomed, index).finish_reason for index in range(3)] == ["abort"] * 3
    stats = driver.core.stats()
    assert stats.num_running + stats.num_waiting == 1
    assert stats.active_blocks == sum(len(at.blocks) for at in scheduler_of(driver).running)
    count = len(driver.outputs)
    driver.run()
    assert all(output.request_id == other for output in driver.outputs[count:])
    assert len(driver.tokens(other)) == 30


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_aborting_one_sample_leaves_the_others(tiny: Model, steps: int) -> None:
    driver = Driver(tiny, max_batched_tokens=16)
    request_id = driver.submit(prompt_of(40), max_tokens=12, n=3)
    for _ in range(steps):
        driver.step()
    driver.core.abort(request_id, 0)
    driver.run()

    assert driver.last(request_id, 0).finish_reason == "abort"
    expected = Driver(tiny).complete(prompt_of(40), max_tokens=12)
    assert driver.tokens(request_id, 1) == driver.tokens(request_id, 2) == expected


def test_seeded_samples_do_not_depend_on_what_else_runs(tiny: Model) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 4, "max_tokens": 12}

    def samples(driver: Driver) -> list[list[int]]:
        request_id = driver.submit(prompt_of(37), **settings)
        driver.run()
        return [driver.tokens(request_id, index) for index in range(4)]

    alone = samples(Driver(tiny))
    busy = Driver(tiny, pool_tokens=14 * 16)
    for seed in range(4):
        busy.submit(prompt_of(20, seed), max_tokens=20)

    assert samples(busy) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


def test_stop_tokens_end_a_sample_and_are_its_last_output(tiny: Model) -> None:
    plain = Driver(tiny).complete(prompt_of(20), max_tokens=12)
    stop = next(token for token in plain if plain.index(token) == 3 or token != plain[0])
    driver = Driver(tiny)
    request_id = driver.submit(prompt_of(20), max_tokens=12, stop_token_ids=(stop,))
    driver.run()

    assert driver.tokens(request_id) == plain[: plain.index(stop) + 1]
    assert driver.last(request_id).finish_reason == "stop"


def test_blocks_filled_while_decoding_are_hits_of_the_next_turn(tiny: Model) -> None:
    driver = Driver(tiny)
    prompt = prompt_of(30)
    answer = driver.complete(prompt, max_tokens=20)
    turn = driver.submit([*prompt, *answer, *prompt_of(4, 1)])
    driver.run()

    # The answer's last token was never computed: 49 tokens, 3 full blocks.
    assert driver.cached_tokens(turn) == 48


def test_events_of_a_step_name_removals_before_the_blocks_that_needed_the_room(
    tiny: Model,
) -> None:
    driver = Driver(tiny, pool_tokens=6 * 16)
    driver.complete(prompt_of(80))
    driver.events.clear()
    driver.complete(prompt_of(70, 1))

    kinds = [type(event) for event in driver.events]
    assert set(kinds) == {BlockRemoved, BlockStored}
    assert kinds == sorted(kinds, key=[BlockRemoved, BlockStored].index)


def test_a_reset_forgets_hits_and_is_refused_while_requests_run(tiny: Model) -> None:
    driver = Driver(tiny)
    prompt = prompt_of(40)
    driver.submit(prompt)
    driver.step()
    assert not driver.core.reset_prefix_cache()
    driver.run()
    assert driver.core.reset_prefix_cache()

    assert driver.events[-1] == AllBlocksCleared()
    again = driver.submit(prompt)
    driver.run()
    assert driver.cached_tokens(again) == 0


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_gives_every_request_the_tokens_it_gets_alone(
    tiny: Model, seed: int
) -> None:
    """Shared prefixes, samples, aborts and a pool that is too small, checked after every step."""
    rng = random.Random(seed)
    driver = Driver(tiny, pool_tokens=16 * 16, max_batched_tokens=48, max_seqs=6)
    expected: dict[str, tuple[list[int], int]] = {}
    aborted = set()
    for _ in range(80):
        if rng.random() < 0.3:
            prompt = prompt_of(rng.choice([16, 40, 64]), rng.randrange(2)) + prompt_of(
                rng.randrange(30), rng.randrange(3)
            )
            length = rng.randrange(1, 30)
            request_id = driver.submit(prompt, max_tokens=length, n=rng.choice([1, 1, 3]))
            expected[request_id] = (prompt, length)
        if expected and rng.random() < 0.05:
            victim = rng.choice(list(expected))
            driver.core.abort(victim)
            aborted.add(victim)
            driver.check()
        driver.step() if driver.core.has_work else None
    driver.run()

    stats = driver.core.stats()
    assert (stats.active_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert stats.preemptions_total > 0
    alone = Driver(tiny)
    for request_id, (prompt, length) in expected.items():
        if request_id not in aborted:
            assert driver.tokens(request_id) == alone.complete(prompt, max_tokens=length)
            assert driver.last(request_id).finish_reason == "length"
