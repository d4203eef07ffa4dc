"""A duration as a non-negative sum of features, learned while it is used.

Recursive least squares with forgetting, in information form: only sums are kept, and solving them
is put off until somebody asks. What is minimised is the error relative to the geometric mean of
what was seen and expected: short and long durations teach alike, one that was k times too slow
(the machine was busy) weighs 1/k, and the fit follows the harmonic mean.

Source: L. Ljung, System Identification (1999), 11.2; coordinate descent for non-negative least
squares: Franc, Hlavac, Navara (2005).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Of one observation, for what was believed before: enough to settle what the data leave open, too
# little to argue with them.
_BELIEF_WEIGHT = 0.002

# A term that vanished may come back: its belief is at least this share of its part at the start.
_MIN_BELIEF = 0.01

# A clock that ticked late must not become the truth: small durations weigh most.
_MAX_SPEEDUP = 8.0

# Nor may one that was far off at first, or for once, weigh like a hundred.
_MAX_SURPRISE = 64.0

# Shorter than any step or transfer; keeps the division by a duration finite.
_MIN_ELAPSED_S = 1e-6

# A day: longer is a stopped clock or a suspended machine.
_MAX_ELAPSED_S = 86_400.0

# How much a term may grow in one solution; the next begins there.
_MAX_FACTOR = 1e3

_MAX_SWEEPS = 50
_TOLERANCE = 1e-5

# Solved after each of the first observations, then only when asked and every so many.
_SETTLED = 16


class RelativeFit:
    """Learns ``seconds = sum(weight[i] * feature[i])``; one thread.

    Args:
        start: Weights to begin with. Once there are observations only their proportions count,
            to share out what the observations cannot tell apart.
        memory: After how many observations of a group one has lost two thirds of its weight.
        groups: Kinds of observations that are forgotten apart, so that many of one kind do not
            wash out the few of another.
    """

    __slots__ = (
        "_decay",
        "_products",
        "_start",
        "_sums",
        "_unsolved",
        "count",
        "weights",
    )

    def __init__(self, start: Sequence[float], *, memory: float, groups: int = 1) -> None:
        size = len(start)
        self._start = tuple(start)
        self._decay = math.exp(-1.0 / memory)
        self._products = [[[0.0] * size for _ in start] for _ in range(groups)]
        self._sums = [[0.0] * size for _ in range(groups)]
        self._unsolved = 0
        self.count = 0
        self.weights = self._start

    def observe(self, features: Sequence[float], elapsed_s: float, group: int = 0) -> None:
        """Learn from one duration; what cannot be one (negative, not finite) is ignored."""
        if not 0 <= elapsed_s <= _MAX_ELAPSED_S:
            return
        elapsed_s = max(elapsed_s, _MIN_ELAPSED_S)
        expected_s = elapsed_s
        if self.count:
            value_s = self._value(features)
            elapsed_s = max(elapsed_s, value_s / _MAX_SPEEDUP)
            expected_s = min(max(value_s, elapsed_s / _MAX_SURPRISE), elapsed_s * _MAX_SPEEDUP)
        scale_s = math.sqrt(elapsed_s * expected_s)
        ratio = elapsed_s / scale_s
        shares = [feature / scale_s for feature in features]
        sums, products = self._sums[group], self._products[group]
        for row, share in enumerate(shares):
            sums[row] = sums[row] * self._decay + share * ratio
            line = products[row]
            for column, other in enumerate(shares):
                line[column] = line[column] * self._decay + share * other
        self.count += 1
        self._unsolved += 1
        if self.count < _SETTLED or self._unsolved >= _SETTLED:
            self._solve()

    def expect_s(self, features: Sequence[float]) -> float:
        """Return the duration to expect."""
        if self._unsolved:
            self._solve()
        return self._value(features)

    def solved(self) -> tuple[float, ...]:
        """Return the weights as all observations have them."""
        if self._unsolved:
            self._solve()
        return self.weights

    def _value(self, features: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.weights, map(float, features)))

    def _solve(self) -> None:
        """Find the weights that fit best, near what was believed before."""
        self._unsolved = 0
        size = range(len(self._start))
        products = [[sum(group[i][j] for group in self._products) for j in size] for i in size]
        sums = [sum(group[i] for group in self._sums) for i in size]
        now, first = _scale(self.weights, products, sums), _scale(self._start, products, sums)
        if not now * first > 0:
            return
        belief = [max(now * self.weights[i], _MIN_BELIEF * first * self._start[i]) for i in size]
        matrix = [[belief[i] * belief[j] * products[i][j] for j in size] for i in size]
        target = [belief[i] * sums[i] + _BELIEF_WEIGHT for i in size]
        factors = _descend(matrix, target)
        self.weights = tuple(map(float.__mul__, belief, factors))


def _scale(weights: Sequence[float], products: list[list[float]], sums: list[float]) -> float:
    """Return by what the weights, kept in proportion, fit best; 0 if nothing can be said."""
    along = sum(map(float.__mul__, weights, sums))
    square = sum(
        weight * sum(map(float.__mul__, weights, row))
        for weight, row in zip(weights, products, strict=True)
    )
    return along / square if square > 0 else 0.0


def _descend(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Return what to multiply the beliefs with, one coordinate after the other."""
    factors = [1.0] * len(target)
    for _ in range(_MAX_SWEEPS):
        moved = 0.0
        for i, row in enumerate(matrix):
            rest = target[i] - sum(map(float.__mul__, row, factors)) + row[i] * factors[i]
            best = min(max(rest / (row[i] + _BELIEF_WEIGHT), 0.0), _MAX_FACTOR)
            moved = max(moved, abs(best - factors[i]))
            factors[i] = best
        if moved < _TOLERANCE:
            break
    return factors
