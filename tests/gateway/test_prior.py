"""Workers of whom little was seen are believed to be like their pool, and no longer than needed."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.cost import CostModel, prefill_s
from gateway.routing.explain import decide_again, explain_json
from gateway.routing.fit import START_MARGIN, START_OBSERVATIONS
from gateway.routing.learner import STEP_RATIO, Learner, slowest
from gateway.routing.prior import Lender, between, blended
from tests.gateway.routing_parts import H100, Clock, chat, dispatcher, make_pool

TOKENS = 1000
LONG = 5000.0
constants = st.floats(1e-12, 1e3)
trusts = st.floats(0.0, 1.0)
# One worker: a factor on the TTFT of each prefill, and on the gap of each decode, that was seen.
factors = st.lists(st.floats(1e-6, 1e6), max_size=8)
workers = st.lists(st.tuples(factors, factors), min_size=1, max_size=6)
NAMES = ("token_s", "attention_s", "step_s", "context_s")


def taught(prefills: list[float], decodes: list[float] | None = None) -> Learner:
    """A worker that took so many times as long as an H100."""
    learner = Learner()
    for factor in prefills:
        ttft_s = factor * (prefill_s(H100, TOKENS, TOKENS) + H100.step_s)
        learner.observe_prefill(ttft_s, uncached_tokens=TOKENS, prompt_tokens=TOKENS)
    for factor in decodes or ():
        gap_s = factor * (H100.step_s + H100.context_s * LONG + H100.token_s)
        learner.observe_decode(50 * gap_s, gaps=50, context_tokens=LONG, in_flight=1)
    return learner


def models(*learners: Learner) -> list[CostModel]:
    found = [model for model in blended(learners) if model is not None]
    assert len(found) == len(learners)
    return found


@given(constants, constants, trusts, trusts)
def test_a_blend_lies_between_and_nearer_to_its_own_the_more_was_seen(
    prior: float, own: float, less: float, more: float
) -> None:
    less, more = sorted((less, more))
    far, near = between(prior, own, less), between(prior, own, more)
    low, high = sorted((prior, own))
    assert low <= far <= high
    assert low <= near <= high
    assert abs(near - own) <= abs(far - own) * (1 + 1e-9)
    assert between(prior, own, 0.0) == prior
    assert between(prior, own, 1.0) == own


@given(constants, constants, constants, st.floats(0.01, 1.0))
def test_who_was_seen_slower_is_believed_to_be_slower(
    prior: float, quick: float, slow: float, trust: float
) -> None:
    quick, slow = sorted((quick, slow))
    assert between(prior, quick, trust) <= between(prior, slow, trust) * (1 + 1e-9)


@given(workers)
def test_whatever_was_seen_the_constants_are_numbers_between_the_pools(
    seen: list[tuple[list[float], list[float]]],
) -> None:
    learners = [taught(*each) for each in seen]
    found = blended(learners)
    own = [learner.model for learner in learners if learner.model is not None]
    assert all((model is None) == (not own) for model in found)
    for model in found:
        if model is None:
            continue
        for name in NAMES:
            of_pool = [getattr(each, name) for each in own]
            guessed = [STEP_RATIO * each.token_s for each in own]
            if name in ("token_s", "attention_s"):
                assert min(of_pool) * 0.999 <= getattr(model, name) <= max(of_pool) * 1.001
            elif name == "step_s":
                assert min(of_pool) * 0.999 <= model.step_s <= max(of_pool + guessed) * 1.001
            assert 0.0 < getattr(model, name) < float("inf")


@given(workers, st.integers(0, 5), st.floats(1.0, 1e6))
def test_a_slower_prefill_never_makes_its_worker_quicker(
    seen: list[tuple[list[float], list[float]]], number: int, factor: float
) -> None:
    position = number % len(seen)
    slower = [
        ([factor * f for f in prefills] if k == position else prefills, decodes)
        for k, (prefills, decodes) in enumerate(seen)
    ]
    before = blended([taught(*each) for each in seen])[position]
    after = blended([taught(*each) for each in slower])[position]
    if before is not None and after is not None:
        assert after.token_s >= before.token_s * (1 - 1e-9)


@given(st.lists(st.floats(0.9, 1.1), min_size=20, max_size=40), factors)
def test_a_worker_that_was_seen_is_its_own_whatever_its_pool_is_like(
    honest: list[float], others: list[float]
) -> None:
    learner = taught(honest, honest)
    assert learner.is_settled
    assert models(learner, *([taught(others)] if others else []))[0] == learner.model


def test_two_equal_workers_are_alike_when_one_had_a_bad_start() -> None:
    slow, quick = taught([5.0, 5.0]), taught([1.0, 1.0])
    assert slow.model is not None
    assert quick.model is not None
    assert slow.model.token_s / quick.model.token_s == pytest.approx(5.0, rel=0.2)

    first, second = models(slow, quick)

    assert 1.0 < first.token_s / second.token_s < 2.2
    # Neither was seen to decode: both are believed to make the quicker one's steps.
    assert first.step_s == second.step_s == pytest.approx(STEP_RATIO * second.token_s)


def test_one_bad_start_is_harmless_in_a_pool_that_is_known() -> None:
    known = [taught([1.0] * 10, [1.0] * 10) for _ in range(3)]
    bad, *rest = models(taught([50.0]), *known)

    assert bad.token_s < 4 * H100.token_s * START_MARGIN
    assert bad.step_s == pytest.approx(rest[0].step_s)
    assert rest == [learner.model for learner in known]


def test_the_estimate_goes_from_the_pools_to_its_own() -> None:
    known = taught([1.0] * 10, [1.0] * 10)
    ratios = []
    for count in range(1, START_OBSERVATIONS + 1):
        learner = taught([4.0] * count)
        assert learner.model is not None
        ratios.append(models(learner, known)[0].token_s / learner.model.token_s)
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.5
    assert ratios[-1] == 1.0


def test_a_measured_step_is_anybodys_until_its_own_was_seen() -> None:
    measured, other = taught([1.0], [1.0]), taught([1.0])
    assert measured.model is not None
    lent, borrowed = models(measured, other)
    assert lent.step_s == borrowed.step_s == measured.model.step_s
    twice = models(measured, taught([1.0], [3.0]))[1]
    assert measured.model.step_s < twice.step_s < 3 * measured.model.step_s


def test_who_was_never_seen_is_as_slow_as_the_slowest() -> None:
    learners = [taught([1.0]), taught([3.0]), Learner()]
    first, second, unseen = models(*learners)
    assert unseen == slowest([first, second])


def test_nothing_is_blended_again_until_somebody_learns() -> None:
    lender, rng = Lender(), Random(1)
    learners = [taught([rng.uniform(1, 5)]) for _ in range(3)]
    found = lender.models(learners)
    assert found == blended(learners)
    assert lender.models(learners) is found
    learners[1].observe_prefill(0.5, uncached_tokens=TOKENS, prompt_tokens=TOKENS)
    assert lender.models(learners) == blended(learners) != found
    # Others that look the same are others: how much was seen of them may differ.
    assert lender.models(learners[:2]) == blended(learners[:2])


async def test_explain_says_what_was_used_and_how_much_of_it_is_the_workers_own() -> None:
    pool = make_pool(3, model=None)
    routes = dispatcher(pool, Clock())
    for worker, learner in (("w0", taught([5.0, 5.0])), ("w1", taught([1.0] * 5, [1.0] * 5))):
        pool.workers[worker].learner = learner
    plan = await routes.plan(pool, chat("a story " * 50))
    explain = json.loads(json.dumps(explain_json(plan, routes.choose(plan))))

    rows = {c["worker"]: c["constants"] for c in explain["candidates"]}
    shares = {w: (r["own_prefill_share"], r["own_decode_share"]) for w, r in rows.items()}
    assert shares == {"w0": (0.4, 0.0), "w1": (1.0, 1.0), "w2": (0.0, 0.0)}
    learned = pool.workers["w1"].learner.model
    assert learned is not None
    assert rows["w0"]["step_s"] == rows["w1"]["step_s"] == learned.step_s
    assert rows["w0"]["token_s"] < 5 * rows["w1"]["token_s"]
    assert decide_again(explain) == explain["decision"]
