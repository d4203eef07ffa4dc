"""What was learned survives a restart, and nothing else is taken for it."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.cost import CostModel, prefill_s
from gateway.routing.learner import Learner, OutputLength

TRUE = CostModel(3.25e-5, 1.17e-9, 0.004, 5.2e-8, 190e3, 45e3, 9e3)
START = CostModel(1e-4, 3e-9, 0.01, 2e-7, 100e3, 20e3, 5e3)


def taught(start: CostModel | None, seed: int = 1, turns: int = 40) -> Learner:
    learner, rng = Learner(start), Random(seed)
    for _ in range(turns):
        length = rng.randint(100, 50_000)
        learner.observe_prefill(
            prefill_s(TRUE, length, length), uncached_tokens=length, prompt_tokens=length
        )
        learner.observe_decode(rng.uniform(0.2, 2), gaps=50, context_tokens=length, in_flight=2)
        learner.observe_restore(0.5, rest_s=0.1, cpu=60_000, disk=rng.randint(0, 9000))
        learner.observe_pull(f"w{rng.randint(0, 3)}", tokens=9000, seconds=rng.uniform(0.05, 0.5))
    return learner


@pytest.mark.parametrize("start", [None, START], ids=["unknown", "configured"])
@pytest.mark.parametrize("turns", [0, 1, 3, 40])
def test_a_restarted_learner_goes_on_exactly_where_it_was(
    start: CostModel | None, turns: int
) -> None:
    before = taught(start, turns=turns)
    after = Learner.from_json(before.to_json(), start)
    assert (after.model, after.pull_rates) == (before.model, before.pull_rates)
    for learner in (before, after):
        learner.observe_prefill(0.7, uncached_tokens=9000, prompt_tokens=9000)
        learner.observe_restore(0.5, rest_s=0.1, cpu=30_000)
        learner.observe_pull("w1", tokens=9000, seconds=0.2)

    assert (after.model, after.pull_rates) == (before.model, before.pull_rates)


def test_a_new_configured_start_bounds_what_was_learned_before() -> None:
    slower = msgspec.structs.replace(TRUE, token_s=TRUE.token_s * 100)
    learner = Learner.from_json(taught(None).to_json(), slower)
    assert learner.model is not None

    assert learner.model.token_s == pytest.approx(slower.token_s / 4)


def test_the_mean_completion_survives_and_odd_means_do_not() -> None:
    length = OutputLength()
    length.observe(1200)
    assert OutputLength.from_json(length.to_json()).mean_tokens == length.mean_tokens
    for odd in (b"-1", b"1e300", b"null", b'"9"', b"[1]", b"NaN", b""):
        with pytest.raises(ValueError, match=r".+"):
            OutputLength.from_json(odd)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a JSON value."""
    found = [path]
    if isinstance(value, dict):
        for name, inner in value.items():
            found += paths(inner, (*path, name))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            found += paths(inner, (*path, i))
    return found


STATE = json.loads(taught(START).to_json())
HOSTILE = [None, True, "x", -1.0, 0.0, 1e308, -1e308, [], {}, [1e300] * 9, {"a": 1}]


@settings(max_examples=200, deadline=None)
@given(place=st.sampled_from(paths(STATE)), value=st.sampled_from(HOSTILE))
def test_whatever_stands_in_the_state_it_is_refused_or_harmless(
    place: tuple[Any, ...], value: Any
) -> None:
    state = json.loads(json.dumps(STATE))
    if place:
        at = state
        for step in place[:-1]:
            at = at[step]
        at[place[-1]] = value
    else:
        state = value
    try:
        learner = Learner.from_json(json.dumps(state).encode(), START)
    except ValueError:
        return
    for _ in range(3):
        learner.observe_prefill(0.5, uncached_tokens=9000, prompt_tokens=9000)
        learner.observe_decode(0.5, gaps=50, context_tokens=9000, in_flight=2)
        learner.observe_pull("w1", tokens=9000, seconds=0.2)
    assert learner.model is not None
    for name in CostModel.__struct_fields__:
        assert 0.249 <= getattr(learner.model, name) / getattr(START, name) <= 4.001
    assert all(1.0 <= rate <= 1e9 for rate in learner.pull_rates.values())


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"[]", b'{"v":2}', b'{"v":1,"more":1}', b"\x80\x04K\x01.", b"\xff" * 9],
    ids=["empty", "cut off", "null", "list", "other version", "unknown field", "pickle", "bytes"],
)
def test_anything_but_a_state_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Learner.from_json(data)


# Restore rates


def restore_ttft_s(rest_s: float, cpu: int, disk: int) -> float:
    return rest_s + cpu / TRUE.restore_cpu_tokens_per_s + disk / TRUE.restore_disk_tokens_per_s


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_restore_rates_come_close_although_every_eighth_measurement_is_nonsense(seed: int) -> None:
    learner, rng = Learner(START), Random(seed)
    for turn in range(300):
        cpu, disk = rng.choice([(rng.randint(5000, 80_000), 0), (0, rng.randint(5000, 80_000))])
        rest_s = rng.uniform(0.01, 0.2)
        ttft_s = restore_ttft_s(rest_s, cpu, disk) * rng.uniform(0.95, 1.05)
        if turn % 8 == 0:
            ttft_s *= rng.choice([0.01, 50.0])
        learner.observe_restore(ttft_s, rest_s=rest_s, cpu=cpu, disk=disk)
    assert learner.model is not None

    for name in ("restore_cpu_tokens_per_s", "restore_disk_tokens_per_s"):
        assert 0.5 < getattr(learner.model, name) / getattr(TRUE, name) < 2.0
    assert learner.model.restore_remote_tokens_per_s == START.restore_remote_tokens_per_s


@pytest.mark.parametrize("ttft_s", [1e-9, 1e9], ids=["too fast", "too slow"])
def test_no_run_of_odd_restores_leaves_a_factor_of_four(ttft_s: float) -> None:
    learner = Learner(START)
    for _ in range(500):
        learner.observe_restore(ttft_s, rest_s=0.0, cpu=9000, disk=9000, remote=9000)
    assert learner.model is not None

    for tier in ("cpu", "disk", "remote"):
        name = f"restore_{tier}_tokens_per_s"
        ratio = getattr(learner.model, name) / getattr(START, name)
        assert ratio == pytest.approx(4.0 if ttft_s < 1 else 0.25)


def test_a_restore_that_drowns_in_the_prefill_teaches_nothing() -> None:
    learner = Learner(START)
    learner.observe_restore(9.0, rest_s=8.0, cpu=9000)
    learner.observe_restore(0.2, rest_s=0.1, cpu=511)

    assert learner.model == START


# Pull rates


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_pull_rates_of_each_pair_come_close_in_spite_of_outliers(seed: int) -> None:
    learner, rng = Learner(START), Random(seed)
    true = {"near": 90_000.0, "far": 7000.0}
    for turn in range(200):
        source = rng.choice(list(true))
        seconds = 20_000 / true[source] * rng.uniform(0.9, 1.1)
        if turn % 8 == 0:
            seconds *= rng.choice([1e-3, 1e3])
        learner.observe_pull(source, tokens=20_000, seconds=seconds)

    for source, rate in true.items():
        assert 0.4 < learner.pull_rates[source] / rate < 2.5


def test_an_unmeasured_source_is_believed_to_be_as_fast_as_the_others() -> None:
    learner = Learner(START)
    learner.observe_pull("w1", tokens=10_000, seconds=1.0)
    assert learner.pull_rates == {"": 10_000.0, "w1": 10_000.0}
    learner.observe_pull("w2", tokens=10_000, seconds=0.5)

    assert 10_000.0 < learner.pull_rates["w2"] < 20_000.0
    assert learner.pull_rates["w1"] == 10_000.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_of_a_pull_are_ignored(seconds: float) -> None:
    learner = Learner(START)
    learner.observe_pull("w1", tokens=10_000, seconds=seconds)
    learner.observe_pull("w1", tokens=3, seconds=1.0)

    assert learner.pull_rates == {}


def test_rates_already_read_do_not_change_and_sources_stay_few() -> None:
    learner = Learner(START)
    learner.observe_pull("w1", tokens=10_000, seconds=1.0)
    read = learner.pull_rates
    for k in range(1000):
        learner.observe_pull(f"x{k}", tokens=10_000, seconds=1.0)

    assert read == {"": 10_000.0, "w1": 10_000.0}
    assert len(learner.pull_rates) <= 257
    assert "" in learner.pull_rates
