"""Learn the cost constants of one worker from what it was seen to do.

Prefill constants come from TTFTs of requests that found nothing queued, decode constants from the
mean gap between tokens. A constant starts high (too high costs nothing, a prefill constant 4 times
too low costs 10 to 17 % of TTFT), and stays within a factor of 4 of its start, so that no run of
odd measurements can turn the routing upside down.
"""

from __future__ import annotations

from statistics import median

from gateway.routing.cost import CostModel

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
# Attention against linear prefill work, per context token. Llama 8B on an H100: 3.6e-5, a 135M
# model: 2.6e-4; the allowed drift covers both.
ATTENTION_RATIO = 1e-4
# Decode seconds per context token against a step's fixed seconds. Llama 8B on an H100: 1.3e-5.
CONTEXT_RATIO = 1e-5
# A step's fixed seconds against one prefill token, until a decode was seen. H100: 123.
STEP_RATIO = 100.0
# Shorter prefills measure overheads.
MIN_PREFILL_TOKENS = 64
# Fewer gaps measure the end of the stream.
MIN_GAPS = 4
# Weight of one completion in the mean completion length, and its start.
OUTPUT_ALPHA = 0.01
OUTPUT_START_TOKENS = 200.0


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
        return s0 * _bounded(m0), s1 * _bounded(m1)


class Learner:
    """The constants of one worker, refined while it serves.

    Attributes:
        model: Current constants; None until the first usable prefill was seen.
    """

    def __init__(self, start: CostModel | None = None) -> None:
        self.model = start
        self._rates = start
        self._prefill = TwoTermFit(
            ATTENTION_RATIO, None if start is None else (start.token_s, start.attention_s)
        )
        self._decode = TwoTermFit(
            CONTEXT_RATIO, None if start is None else (start.step_s, start.context_s)
        )

    def observe_prefill(self, ttft_s: float, *, uncached_tokens: int, prompt_tokens: int) -> None:
        """Learn from one TTFT.

        Call it only for requests that found nothing queued and at most two running, that were
        neither retried nor held back in the gateway, and whose hit tokens were as predicted.

        Args:
            ttft_s: Observed TTFT.
            uncached_tokens: Prompt tokens computed, as observed.
            prompt_tokens: Prompt length.
        """
        if uncached_tokens < MIN_PREFILL_TOKENS or ttft_s <= 0.0:
            return
        step_s = self._decode.constants[0] if self._decode.constants else 0.0
        own_s = max(ttft_s - step_s, ttft_s / 2)
        depth = uncached_tokens * (prompt_tokens - uncached_tokens / 2)
        self._prefill.observe(float(uncached_tokens), depth, own_s)
        self._update()

    def observe_decode(
        self, decode_s: float, *, gaps: int, context_tokens: float, in_flight: float
    ) -> None:
        """Learn from one completion's stream.

        Args:
            decode_s: Seconds from its first to its last token, without other requests' prefills.
            gaps: Tokens after the first one.
            context_tokens: Mean context of all requests decoding meanwhile.
            in_flight: Mean number of them.
        """
        if gaps < MIN_GAPS or decode_s <= 0.0:
            return
        gap_s = decode_s / gaps
        compute_s = self.model.token_s * in_flight if self.model else 0.0
        self._decode.observe(1.0, context_tokens, max(gap_s - compute_s, gap_s / MAX_DRIFT))
        self._update()

    def _update(self) -> None:
        if self._prefill.constants is None:
            return
        token_s, attention_s = self._prefill.constants
        fallback = (STEP_RATIO * token_s, STEP_RATIO * CONTEXT_RATIO * token_s)
        step_s, context_s = self._decode.constants or fallback
        if self._rates is None:
            self.model = CostModel(token_s, attention_s, step_s, context_s)
            return
        self.model = CostModel(
            token_s,
            attention_s,
            step_s,
            context_s,
            self._rates.restore_cpu_tokens_per_s,
            self._rates.restore_disk_tokens_per_s,
            self._rates.restore_remote_tokens_per_s,
        )


class OutputLength:
    """Running mean of completion lengths.

    Attributes:
        mean_tokens: The mean (``E_out``).
    """

    def __init__(self) -> None:
        self.mean_tokens = OUTPUT_START_TOKENS

    def observe(self, completion_tokens: int) -> None:
        """Take one finished completion."""
        self.mean_tokens += OUTPUT_ALPHA * (completion_tokens - self.mean_tokens)


def slowest(models: list[CostModel]) -> CostModel | None:
    """Return constants for a worker nobody has measured: the highest of its pool's workers."""
    if not models:
        return None
    return CostModel(
        max(m.token_s for m in models),
        max(m.attention_s for m in models),
        max(m.step_s for m in models),
        max(m.context_s for m in models),
        min(m.restore_cpu_tokens_per_s for m in models),
        min(m.restore_disk_tokens_per_s for m in models),
        min(m.restore_remote_tokens_per_s for m in models),
    )


def _bounded(multiple: float) -> float:
    return min(max(multiple, 1 / MAX_DRIFT), MAX_DRIFT)
