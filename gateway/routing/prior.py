"""What workers are believed to be like while little has been seen of them.

A worker's first prefills say little of it: one that meets a compile, a cold file cache or a busy
box takes several times as long as the next, and of two equal workers one then looks five times
slower. Until ``START_OBSERVATIONS`` were seen a worker's own constants count for as much as was
seen, and what its pool has learned for the rest.
"""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING

from gateway.routing.cost import CostModel
from gateway.routing.fit import MIN_CONSTANT
from gateway.routing.learner import CONTEXT_RATIO, STEP_RATIO, slowest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.routing.learner import Learner


def blended(learners: Sequence[Learner]) -> list[CostModel | None]:
    """Return the constants to use for each worker of a pool.

    Prefill constants lie between the worker's own and the mean of the pool, in which each counts
    as much as was seen of it. An engine's step reads the same weights everywhere, and one that was
    only guessed is guessed high: decode constants lie between the worker's own and those of the
    quickest step that anybody in the pool was seen to make. Where nobody was, a step is guessed
    from the quickest prefill.

    Args:
        learners: Of all workers of one pool.

    Returns:
        In the same order. A worker of which nothing is known is as slow as the slowest; None for
        all while nothing is known of any.
    """
    known = [learner for learner in learners if learner.model is not None]
    if not known:
        return [None] * len(learners)
    mean = _mean(known)
    prefill = [_prefill(learner, mean) for learner in known]
    decode = _quickest_step(known)
    if decode is None:
        step_s = STEP_RATIO * min(token_s for token_s, _ in prefill)
        decode = step_s, CONTEXT_RATIO * step_s
    models = [_model(*of_one, decode) for of_one in zip(known, prefill, strict=True)]
    if len(known) == len(learners):
        return list(models)
    borrowed, rest = slowest(models), iter(models)
    return [borrowed if learner.model is None else next(rest) for learner in learners]


class Lender:
    """Remembers ``blended`` of one pool until somebody there has learned something."""

    def __init__(self) -> None:
        self._own: list[CostModel | None] = []
        self._blended: list[CostModel | None] = []

    def models(self, learners: list[Learner]) -> list[CostModel | None]:
        """Return what ``blended`` does; for each request, so a few instructions a worker."""
        if len(learners) == len(self._own):
            # Whoever learns makes a new model.
            for position, model in enumerate(self._own):
                if learners[position].model is not model:
                    break
            else:
                return self._blended
        self._own = own = [learner.model for learner in learners]
        # Nobody borrows once all have seen enough, and each of their requests teaches them more.
        are_settled = all(learner.is_settled for learner in learners)
        self._blended = own if are_settled else blended(learners)
        return self._blended


def between(prior: float, own: float, trust: float) -> float:
    """Return a constant between two: their weighted geometric mean.

    Args:
        prior: The result while ``trust`` is 0.
        own: The result once ``trust`` is 1.
        trust: From 0 to 1.
    """
    if trust >= 1.0:
        return own
    if trust <= 0.0:
        return prior
    mean = exp((1.0 - trust) * _log(prior) + trust * _log(own))
    return min(max(mean, min(prior, own)), max(prior, own))


def _mean(known: Sequence[Learner]) -> tuple[float, float]:
    """Return the pool's prefill constants: the mean of the logarithms, weighted with trust."""
    total = token = attention = 0.0
    if all(learner.trust >= 1.0 for learner in known):
        return 0.0, 0.0  # nobody needs them
    for learner in known:
        assert learner.model is not None, "asked of known workers only"
        total += learner.trust
        token += learner.trust * _log(learner.model.token_s)
        attention += learner.trust * _log(learner.model.attention_s)
    return exp(token / total), exp(attention / total)


def _quickest_step(known: Sequence[Learner]) -> tuple[float, float] | None:
    """Return the decode constants with the least step among those that were measured."""
    measured = [
        (learner.model.step_s, learner.model.context_s)
        for learner in known
        if learner.model is not None and learner.decode_trust > 0.0
    ]
    return min(measured, default=None)


def _prefill(learner: Learner, prior: tuple[float, float]) -> tuple[float, float]:
    model, trust = learner.model, learner.trust
    assert model is not None, "asked of known workers only"
    if trust >= 1.0:
        return model.token_s, model.attention_s
    return between(prior[0], model.token_s, trust), between(prior[1], model.attention_s, trust)


def _model(
    learner: Learner, prefill: tuple[float, float], decode: tuple[float, float]
) -> CostModel:
    model, trust = learner.model, learner.decode_trust
    assert model is not None, "asked of known workers only"
    if learner.is_settled:
        return model
    step_s, context_s = decode
    if trust > 0.0:
        step_s = between(step_s, model.step_s, trust)
        context_s = between(context_s, model.context_s, trust)
    return CostModel(
        *prefill,
        step_s,
        context_s,
        model.restore_cpu_tokens_per_s,
        model.restore_disk_tokens_per_s,
        model.restore_remote_tokens_per_s,
    )


def _log(constant: float) -> float:
    return log(max(constant, MIN_CONSTANT))
