"""Sum up what a simulated fleet served."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.replay.simulate import Load, Served
    from gateway.replay.transfers import Links

# The first requests meet empty caches; they are left out.
WARMUP_SHARE = 0.10


class Slo(msgspec.Struct, frozen=True):
    """What a good answer is: its first token in time, and the mean gap after it.

    The defaults are those of the 8B scenarios behind the design.
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.050


class Summary(msgspec.Struct, frozen=True):
    """One run in numbers; the requests of the warm-up are not in them.

    Attributes:
        policy: Which policy.
        load: Load scale.
        jitter: Number of the jittered draw.
        num_requests: Requests counted.
        ttft_mean_s: Mean TTFT.
        ttft_p50_s: Median TTFT.
        ttft_p95_s: 95th percentile.
        ttft_p99_s: 99th percentile.
        tpot_mean_s: Mean over requests of their mean gap between tokens.
        goodput: Share of requests within the objective in both.
        hit_rate: Prompt tokens found in the worker's own tiers or pulled, of all.
        predicted_hit_rate: Those that the router had counted on; 0 for rules that see no prefixes.
        pulled_gb: Bytes moved between workers, and from the store, in GB (whole run).
        num_pulls: How often (whole run).
        num_lost: Requests whose worker failed after their first token.
    """

    policy: str
    load: float
    jitter: int
    num_requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    goodput: float
    hit_rate: float
    predicted_hit_rate: float
    pulled_gb: float = 0.0
    num_pulls: int = 0
    num_lost: int = 0


def summarize(policy: str, load: Load, served: Sequence[Served], slo: Slo, links: Links) -> Summary:
    """Sum up the requests after the warm-up."""
    counted = served[ceil(len(served) * WARMUP_SHARE) :]
    ttfts = []
    tpots = []
    num_good = num_lost = 0
    hit_tokens = predicted_tokens = prompt_tokens = 0
    for one in counted:
        job = one.job
        if job is None or one.placement is None or one.first_token_s is None:
            continue
        ttft_s = one.first_token_s - one.arrived_s
        ttfts.append(ttft_s)
        hit_tokens += job.hit_tokens
        predicted_tokens += one.placement.predicted_hit_tokens
        prompt_tokens += job.prompt_tokens
        if one.is_lost or job.finished_s is None or job.first_token_s is None:
            num_lost += 1
            continue
        tpot_s = (job.finished_s - job.first_token_s) / max(1, job.output_tokens - 1)
        tpots.append(tpot_s)
        num_good += ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s
    ttfts.sort()
    return Summary(
        policy=policy,
        load=load.scale,
        jitter=load.jitter,
        num_requests=len(ttfts),
        ttft_mean_s=_mean(ttfts),
        ttft_p50_s=_percentile(ttfts, 0.50),
        ttft_p95_s=_percentile(ttfts, 0.95),
        ttft_p99_s=_percentile(ttfts, 0.99),
        tpot_mean_s=_mean(tpots),
        goodput=num_good / len(ttfts) if ttfts else 0.0,
        hit_rate=hit_tokens / prompt_tokens if prompt_tokens else 0.0,
        predicted_hit_rate=predicted_tokens / prompt_tokens if prompt_tokens else 0.0,
        pulled_gb=links.moved_bytes / 1e9,
        num_pulls=links.num_pulls,
        num_lost=num_lost,
    )


def mean_summary(summaries: Sequence[Summary]) -> Summary:
    """Return the means of several draws of one policy at one load."""
    first = summaries[0]
    means = {
        name: _mean([getattr(summary, name) for summary in summaries])
        for name in first.__struct_fields__
        if isinstance(getattr(first, name), float)
    }
    return msgspec.structs.replace(first, **means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _percentile(ascending: Sequence[float], share: float) -> float:
    if not ascending:
        return 0.0
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
