"""Fit two positive constants to noisy observations: robust, forgetful, bounded."""

from __future__ import annotations

from math import isfinite
from statistics import median

import msgspec

# Observations whose median gives the start: one compile or cold file cache must not decide it.
START_OBSERVATIONS = 5
# Start this much above the median.
START_MARGIN = 1.25
# A constant never leaves [start / MAX_DRIFT, start * MAX_DRIFT].
MAX_DRIFT = 4.0
# An observation counts as at most this multiple (at least this fraction) of the prediction.
MAX_SURPRISE = 2.0
# Memory of the fit: about 20 observations.
DECAY = 0.95
# How many observations the start is worth, so that equal prompts cannot make the fit degenerate.
PRIOR_WEIGHT = 0.5
# No constant of an engine is outside: a picosecond to a day per token, pair of tokens or step.
MIN_CONSTANT = 1e-18
MAX_CONSTANT = 1e5
# More than the decayed sums of squares, in multiples of the start, can reach: (MAX_DRIFT)^2 a time.
MAX_SUM = 1000.0


class FitState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a fit knows; refuses numbers that no fit can have.

    Attributes:
        start: Constants it started from.
        constants: Constants now.
        scales: First observations.
        sums: Decayed sums of the least squares.
    """

    start: tuple[float, float] | None = None
    constants: tuple[float, float] | None = None
    scales: tuple[float, ...] = ()
    sums: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: If one is not finite, or not positive where it must be.
        """
        pairs = [pair for pair in (self.start, self.constants) if pair is not None]
        if len(pairs) == 1:
            raise ValueError("a fit has both a start and constants, or neither")
        positive = (*(k for pair in pairs for k in pair), *self.scales)
        if not all(MIN_CONSTANT <= k <= MAX_CONSTANT for k in positive):
            raise ValueError("a fit's constants must be positive numbers of seconds")
        if len(self.scales) > START_OBSERVATIONS:
            raise ValueError(f"a fit has at most {START_OBSERVATIONS} first observations")
        if not all(isfinite(x) and x >= 0.0 for x in self.sums):
            raise ValueError("a fit's sums must be finite and not negative")
        s0, s1 = self.start or (0.0, 0.0)
        x00, x01, x11, y0, y1 = self.sums
        largest = max(x00 * s0 * s0, x11 * s1 * s1, y0 * s0, y1 * s1)
        if largest > MAX_SUM or x01 * x01 > x00 * x11 * (1.0 + 1e-9):
            raise ValueError("a fit's sums must be those of observations")


class TwoTermFit:
    """Fit ``y = k0 * x0 + k1 * x1`` with positive, bounded constants; robust and forgetful.

    Minimises relative errors, so that long prompts do not drown short ones.

    Args:
        ratio: ``k1 / k0`` before anything is known.
        start: Constants to start from; None = from the first observations.
    """

    def __init__(self, ratio: float, start: tuple[float, float] | None = None) -> None:
        self.constants = start
        self._start = start
        self._ratio = ratio
        self._scales: list[float] = []
        self._x00 = self._x01 = self._x11 = self._y0 = self._y1 = 0.0

    @property
    def trust(self) -> float:
        """How much its constants are worth, from 0 to 1: of the first observations, those made."""
        if self._start is None:
            return 0.0
        return len(self._scales) / START_OBSERVATIONS if self._scales else 1.0

    def state(self) -> FitState:
        """Return what ``restore`` takes."""
        sums = (self._x00, self._x01, self._x11, self._y0, self._y1)
        return FitState(self._start, self.constants, tuple(self._scales), sums)

    def restore(self, state: FitState) -> None:
        """Go on from an earlier state; a configured start stays what bounds the constants."""
        if self._start is None:
            self._start = state.start
        if self._start is None or state.constants is None:
            return
        self._scales = list(state.scales)
        k0, k1 = state.constants
        s0, s1 = self._start
        self.constants = s0 * bounded(k0 / s0), s1 * bounded(k1 / s1)
        if self._start == state.start:  # the sums mean nothing against another start
            self._x00, self._x01, self._x11, self._y0, self._y1 = state.sums

    def observe(self, x0: float, x1: float, y: float) -> None:
        """Take one observation; all three must be positive (``x1`` may be 0)."""
        if self._start is None or 0 < len(self._scales) < START_OBSERVATIONS:
            self._scales.append(y / (x0 + self._ratio * x1))
            k0 = median(self._scales) * START_MARGIN
            self._start = self.constants = (k0, k0 * self._ratio)
            return
        self._refine(self._start, self.constants or self._start, x0, x1, y)

    def _refine(
        self,
        start: tuple[float, float],
        constants: tuple[float, float],
        x0: float,
        x1: float,
        y: float,
    ) -> None:
        k0, k1 = constants
        predicted = k0 * x0 + k1 * x1
        y = min(max(y, predicted / MAX_SURPRISE), predicted * MAX_SURPRISE) / predicted
        x0, x1 = x0 / predicted, x1 / predicted
        self._x00 = DECAY * self._x00 + x0 * x0
        self._x01 = DECAY * self._x01 + x0 * x1
        self._x11 = DECAY * self._x11 + x1 * x1
        self._y0 = DECAY * self._y0 + x0 * y
        self._y1 = DECAY * self._y1 + x1 * y
        self.constants = self._solve(*start)

    def _solve(self, s0: float, s1: float) -> tuple[float, float]:
        """Least squares in multiples of the start, pulled towards 1 by the prior."""
        a = self._x00 * s0 * s0 + PRIOR_WEIGHT
        b = self._x01 * s0 * s1
        d = self._x11 * s1 * s1 + PRIOR_WEIGHT
        p = self._y0 * s0 + PRIOR_WEIGHT
        q = self._y1 * s1 + PRIOR_WEIGHT
        determinant = a * d - b * b
        m0, m1 = (p * d - q * b) / determinant, (a * q - b * p) / determinant
        return s0 * bounded(m0), s1 * bounded(m1)


def bounded(multiple: float) -> float:
    """Return a multiple of a start, kept within what learning may do to it."""
    return min(max(multiple, 1 / MAX_DRIFT), MAX_DRIFT)
