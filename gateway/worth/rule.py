"""Whether keeping KV in a lower tier pays: pure arithmetic over measured terms, all in seconds.

Two conditions, both must hold: each restore by itself must be quicker than computing the prefix
again, and what all reuses of an hour save must be more than what storing costs them and others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# What a restore costs beside its bytes: looking it up, booking blocks, waiting for the step in
# which it is joined. An engine step; 20 ms per pull changed nothing in the simulation.
MANAGEMENT_S = 0.005
# Requests in the decayed hour from which on a verdict is one; what comes before is chance.
MIN_REQUESTS = 8.0


class Verdict(StrEnum):
    """Whether a lower tier is worth it (bounded: it is a metric label)."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"  # too few requests, or no restore was seen yet


@dataclass(frozen=True, slots=True)
class Terms:
    """What was measured about one group of requests in the last hour, older ones fading.

    Attributes:
        requests: Finished requests.
        reuse_count: Those that began with a prefix computed before.
        shared_prefix_tokens: Mean length of that prefix.
        recompute_s: Mean prefill of it, with nothing cached.
        restore_s: Mean time to bring it back from the tier.
        store_s: Time to write what was new, all together.
        eviction_s: Recompute of what that pushes out of a full tier, fading with its age.
        prefill_token_s: Prefill seconds per token (``c``).
        restore_tokens_per_s: Effective bandwidth of the tier, in tokens.
        is_measured: Whether that bandwidth was measured; else it is a low guess, which must not
            keep a tier from ever being tried.
    """

    requests: float
    reuse_count: float
    shared_prefix_tokens: float
    recompute_s: float
    restore_s: float
    store_s: float
    eviction_s: float
    prefill_token_s: float
    restore_tokens_per_s: float
    is_measured: bool = True


@dataclass(frozen=True, slots=True)
class Worth:
    """The outcome, with both sides of each comparison.

    Attributes:
        verdict: Both conditions.
        reuse_gain_s: What one restore gains; negative where it loses time.
        saved_s: What the hour's reuses save.
        cost_s: What storing cost in it.
        short_verdict: The short form's answer, for comparison; it drives nothing.
        short_gain_s: Its left side.
        short_cost_s: Its right side.
    """

    verdict: Verdict
    reuse_gain_s: float
    saved_s: float
    cost_s: float
    short_verdict: Verdict
    short_gain_s: float
    short_cost_s: float


def judge(terms: Terms) -> Worth:
    """Decide. Pure.

    The short form is ``shared_prefix_tokens * reuse_count * prefill_cost_per_token >
    restore_bytes / effective_bandwidth + eviction_penalty``. Bytes over bytes per second are tokens
    over tokens per second, so no size of a token's KV is needed. It charges one restore for all
    reuses: alone it approves a tier that loses time on each of them.
    """
    gain_s = terms.recompute_s - terms.restore_s - MANAGEMENT_S
    saved_s = terms.reuse_count * (terms.recompute_s - terms.restore_s)
    cost_s = terms.store_s + terms.eviction_s
    one_restore_s = 0.0
    if terms.restore_tokens_per_s > 0.0:
        one_restore_s = terms.shared_prefix_tokens / terms.restore_tokens_per_s
    short_gain_s = terms.shared_prefix_tokens * terms.reuse_count * terms.prefill_token_s
    short_cost_s = one_restore_s + terms.eviction_s
    return Worth(
        _verdict(terms, gain_s > 0.0 and saved_s > cost_s),
        gain_s,
        saved_s,
        cost_s,
        _verdict(terms, short_gain_s > short_cost_s),
        short_gain_s,
        short_cost_s,
    )


def _verdict(terms: Terms, holds: bool) -> Verdict:
    if terms.requests < MIN_REQUESTS or terms.prefill_token_s <= 0.0:
        return Verdict.UNKNOWN
    if terms.is_measured:
        return Verdict.YES if holds else Verdict.NO
    # Not even a tier that takes no time would pay for what is not asked for again.
    best_s = terms.reuse_count * (terms.recompute_s - MANAGEMENT_S)
    return Verdict.UNKNOWN if best_s > terms.eviction_s else Verdict.NO
