"""Learn the cost constants of one worker from what it was seen to do.

Prefill constants come from TTFTs of requests that found nothing queued, decode constants from the
mean gap between tokens. A constant starts high (too high costs nothing, a prefill constant 4 times
too low costs 10 to 17 % of TTFT), and stays within a factor of 4 of its start, so that no run of
odd measurements can turn the routing upside down.
"""

from __future__ import annotations

from math import isfinite
from typing import Literal

import msgspec

from gateway.routing.cost import CostModel
from gateway.routing.fit import MAX_DRIFT, FitState, TwoTermFit, bounded

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
# No model writes more at once.
MAX_OUTPUT_TOKENS = 1e7


# Fewer restored tokens than this measure overheads.
MIN_RESTORED_TOKENS = 512
# A restore shorter than this share of the rest drowns in the rest's own scatter.
MIN_RESTORE_SHARE = 0.2
# At least this share of the TTFT is believed to have been the transfer, or a lucky prefill would
# make a link infinitely fast.
MIN_TRANSFER_SHARE = 0.05
# Weight of one transfer in a rate, by which an observation is at most MAX_RATE_SURPRISE off.
RATE_ALPHA = 0.15
MAX_RATE_SURPRISE = 4.0
# Sources remembered per worker; the one measured longest ago leaves.
MAX_SOURCES = 256
# Rates outside are no links: a token a second, and a TB/s of small KV.
MIN_RATE = 1.0
MAX_RATE = 1e9


class LearnerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a learner knows, as written by ``to_json``.

    Attributes:
        v: Version of this form.
        prefill: Fit of the prefill constants.
        decode: Fit of the decode constants.
        restore: Multiples of the starting restore rates: CPU, disk, remote.
        pulls: Measured tokens/s by source; ``""`` is the mean.
    """

    v: Literal[1] = 1
    prefill: FitState = FitState()
    decode: FitState = FitState()
    restore: tuple[float, float, float] = (1.0, 1.0, 1.0)
    pulls: dict[str, float] = {}

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: If one cannot be.
        """
        if not all(1 / MAX_DRIFT <= k <= MAX_DRIFT for k in self.restore):
            raise ValueError(f"restore rates must be within a factor of {MAX_DRIFT} of the start")
        if len(self.pulls) > MAX_SOURCES + 1:
            raise ValueError(f"there are more than {MAX_SOURCES} measured sources")
        if not all(MIN_RATE <= rate <= MAX_RATE for rate in self.pulls.values()):
            raise ValueError(f"a source's tokens/s must be from {MIN_RATE:g} to {MAX_RATE:g}")


class Learner:
    """The constants of one worker, refined while it serves.

    Attributes:
        model: Current constants; None until the first usable prefill was seen. What it is used
            as beside the pool's other workers: ``gateway/routing/prior.py``.
        trust: How much its prefill constants are worth, from 0 (nothing) to 1 (enough was seen, or
            they are configured).
        decode_trust: Likewise its decode constants, which are guessed while it is 0.
        is_settled: Whether both are 1.
        pull_rates: Measured tokens/s from each source of pulls; ``""`` is the mean over them.
            Replaced, never changed, so that it may be read later.
    """

    def __init__(self, start: CostModel | None = None) -> None:
        self.model = start
        self.pull_rates: dict[str, float] = {}
        self._restore = [1.0, 1.0, 1.0]
        self._start = start
        self._prefill = TwoTermFit(
            ATTENTION_RATIO, None if start is None else (start.token_s, start.attention_s)
        )
        self._decode = TwoTermFit(
            CONTEXT_RATIO, None if start is None else (start.step_s, start.context_s)
        )
        self._weigh()

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

    def observe_restore(
        self, ttft_s: float, *, rest_s: float, cpu: int = 0, disk: int = 0, remote: int = 0
    ) -> None:
        """Learn the restore rates from one TTFT of a request that found lower-tier blocks.

        Call it only for requests that found nothing queued, neither at the worker nor on its link,
        and whose hit tokens were as predicted.

        Args:
            ttft_s: Observed TTFT.
            rest_s: Predicted seconds of everything but the restore.
            cpu: Tokens restored from the CPU tier, and so on.
            disk: From the disk tier.
            remote: From the remote tier.
        """
        model, tokens = self.model, (cpu, disk, remote)
        if model is None or sum(tokens) < MIN_RESTORED_TOKENS:
            return
        rates = (
            model.restore_cpu_tokens_per_s,
            model.restore_disk_tokens_per_s,
            model.restore_remote_tokens_per_s,
        )
        seconds = [n / rate for n, rate in zip(tokens, rates, strict=True)]
        predicted_s = sum(seconds)
        if not self._is_transfer(ttft_s, rest_s, predicted_s):
            return
        faster = predicted_s / max(ttft_s - rest_s, MIN_TRANSFER_SHARE * ttft_s)
        for tier, tier_s in enumerate(seconds):
            step = _surprise(faster) ** (RATE_ALPHA * tier_s / predicted_s)
            self._restore[tier] = bounded(self._restore[tier] * step)
        self._update()

    def observe_pull_ttft(
        self, ttft_s: float, source: str, *, rest_s: float, tokens: int, predicted_s: float
    ) -> None:
        """Learn a source's rate from one TTFT; as ``observe_restore``.

        Args:
            ttft_s: Observed TTFT.
            source: Worker id, or ``STORE``.
            rest_s: Predicted seconds of everything but the pull, its latency included.
            tokens: Tokens pulled.
            predicted_s: Seconds the pull was expected to take.
        """
        if self._is_transfer(ttft_s, rest_s, predicted_s):
            own_s = max(ttft_s - rest_s, MIN_TRANSFER_SHARE * ttft_s)
            self.observe_pull(source, tokens=tokens, seconds=own_s)

    def observe_pull(self, source: str, *, tokens: int, seconds: float) -> None:
        """Learn a source's rate from one pull that was timed, by us or by the worker itself.

        Args:
            source: Worker id, or ``STORE``.
            tokens: Tokens that came.
            seconds: How long they took.
        """
        if tokens < MIN_RESTORED_TOKENS or not seconds > 0.0 or not isfinite(seconds):
            return
        seen = min(max(tokens / seconds, MIN_RATE), MAX_RATE)
        rates = dict(self.pull_rates)
        for name in ("", source):
            # An unmeasured source is as fast as the others until it is seen.
            known = rates.get(name) or rates.get("")
            rate = seen if known is None else known * _surprise(seen / known) ** RATE_ALPHA
            rates.pop(name, None)
            rates[name] = min(max(rate, MIN_RATE), MAX_RATE)
        while len(rates) > MAX_SOURCES + 1:
            del rates[next(name for name in rates if name)]
        self.pull_rates = rates

    def to_json(self) -> bytes:
        """Return what was learned, for ``from_json`` after a restart."""
        low, middle, high = self._restore
        return msgspec.json.encode(
            LearnerState(
                prefill=self._prefill.state(),
                decode=self._decode.state(),
                restore=(low, middle, high),
                pulls=self.pull_rates,
            )
        )

    @staticmethod
    def from_json(data: bytes, start: CostModel | None = None) -> Learner:
        """Return a learner that goes on where another one was.

        Args:
            data: What ``to_json`` wrote.
            start: Configured constants; they bound what was learned.

        Raises:
            ValueError: If ``data`` is anything else; the message says what.
        """
        state = msgspec.json.decode(data, type=LearnerState)
        learner = Learner(start)
        learner._prefill.restore(state.prefill)
        learner._decode.restore(state.decode)
        learner._restore = list(state.restore)
        learner.pull_rates = state.pulls
        learner._update()
        return learner

    def _is_transfer(self, ttft_s: float, rest_s: float, predicted_s: float) -> bool:
        return ttft_s > 0.0 and predicted_s > MIN_RESTORE_SHARE * rest_s

    def _weigh(self) -> None:
        self.trust, self.decode_trust = self._prefill.trust, self._decode.trust
        self.is_settled = self.trust + self.decode_trust >= 2.0

    def _update(self) -> None:
        self._weigh()
        if self._prefill.constants is None:
            return
        token_s, attention_s = self._prefill.constants
        fallback = (STEP_RATIO * token_s, STEP_RATIO * CONTEXT_RATIO * token_s)
        step_s, context_s = self._decode.constants or fallback
        start = self._start or CostModel(token_s, attention_s, step_s, context_s)
        cpu, disk, remote = self._restore
        self.model = CostModel(
            token_s,
            attention_s,
            step_s,
            context_s,
            start.restore_cpu_tokens_per_s * cpu,
            start.restore_disk_tokens_per_s * disk,
            start.restore_remote_tokens_per_s * remote,
        )


class OutputLength:
    """Running mean of completion lengths.

    Attributes:
        mean_tokens: The mean (``E_out``).
    """

    def __init__(self, mean_tokens: float = OUTPUT_START_TOKENS) -> None:
        self.mean_tokens = mean_tokens

    @property
    def has_learned(self) -> bool:
        """Whether the mean is more than where it starts."""
        return self.mean_tokens != OUTPUT_START_TOKENS

    def observe(self, completion_tokens: int) -> None:
        """Take one finished completion."""
        self.mean_tokens += OUTPUT_ALPHA * (completion_tokens - self.mean_tokens)

    def to_json(self) -> bytes:
        """Return the mean, for ``from_json`` after a restart."""
        return msgspec.json.encode(self.mean_tokens)

    @staticmethod
    def from_json(data: bytes) -> OutputLength:
        """Return a running mean that goes on where another one was.

        Raises:
            ValueError: If ``data`` is not a number of tokens.
        """
        mean_tokens = msgspec.json.decode(data, type=float)
        if not 0.0 <= mean_tokens <= MAX_OUTPUT_TOKENS:
            raise ValueError(f"a mean completion is 0 to {MAX_OUTPUT_TOKENS:g} tokens")
        return OutputLength(mean_tokens)


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


def _surprise(ratio: float) -> float:
    """Return how much of an observation against its prediction is believed."""
    return min(max(ratio, 1 / MAX_RATE_SURPRISE), MAX_RATE_SURPRISE)
