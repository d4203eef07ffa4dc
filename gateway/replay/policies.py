"""Peers' routing rules as pure functions over plain numbers, one value per worker.

They take tokens and counts, return what they compare or the tied best workers, and keep nothing.
Formulas and defaults are those of the golden decisions, which a test recomputes line by line.
"""

from __future__ import annotations

from math import ceil, inf, sqrt
from typing import TYPE_CHECKING, NamedTuple

from gateway.routing.cost import MEMORY_FILL, RESTORE_OVERLAP, prefill_s

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gateway.routing.cost import CostModel

# Two values closer than this are the same number computed in another order.
TIE = 1e-12
# Tokens of Dynamo's blocks.
DYNAMO_PAGE_TOKENS = 16
# Points of each worker on KubeAI's ring.
RING_REPLICATION = 100
_MASK_64 = (1 << 64) - 1


def least(values: Iterable[float]) -> list[int]:
    """Return the positions of the least value, ties included."""
    best, tied = inf, []
    for i, value in enumerate(values):
        if value < best - TIE:
            best, tied = value, [i]
        elif value <= best + TIE:
            tied.append(i)
    return tied


def greatest(values: Iterable[float]) -> list[int]:
    """Return the positions of the greatest value, ties included."""
    return least([-value for value in values])


def hash32(value: int) -> int:
    """Mix a whole number into 32 bits (the finalizer of MurmurHash3)."""
    value &= _MASK_64
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & _MASK_64
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & _MASK_64
    value ^= value >> 33
    return value & 0xFFFFFFFF


class HashRing:
    """Workers at pseudo-random points of a ring.

    Source: KubeAI ``internal/loadbalancer/balance_chwbl.go``, 100 points a worker.
    """

    def __init__(self, workers: Iterable[int]) -> None:
        self._points = sorted(
            (hash32(worker * 1_000_003 + j * 7_919 + 17), worker)
            for worker in workers
            for j in range(RING_REPLICATION)
        )

    def order(self, key: int) -> tuple[int, list[int]]:
        """Return a key's hash and all workers in the order in which the key meets them."""
        point = hash32(key * 31 + 7)
        low, high = 0, len(self._points)
        while low < high:
            middle = (low + high) // 2
            if self._points[middle][0] < point:
                low = middle + 1
            else:
                high = middle
        seen = dict.fromkeys(w for _, w in (*self._points[low:], *self._points[:low]))
        return point, list(seen)


def bounded_load(
    ring: Sequence[int], in_flight: Sequence[int], *, load_factor: float = 1.25, plus_one: int = 0
) -> int:
    """Return the first worker of the ring within the load bound.

    Args:
        ring: Workers in the key's order.
        in_flight: Requests in flight on each worker.
        load_factor: Multiple of the mean load that is allowed.
        plus_one: 1 counts the new request as KubeAI does, which spills too early.

    Source: KubeAI ``balance_chwbl.go``; consistent hashing with bounded loads (2018).
    """
    total = sum(in_flight[w] for w in ring)
    limit = (total + 1) / len(ring) * load_factor
    for worker in ring:
        if not total or in_flight[worker] + plus_one <= limit:
            return worker
    return ring[0]


class SglangThresholds(NamedTuple):
    """SGLang's ``cache_aware`` settings, its defaults."""

    cache: float = 0.3
    balance_abs: float = 64.0
    balance_rel: float = 1.5


def sglang(
    hits: Sequence[int],
    in_flight: Sequence[int],
    prompt_tokens: int,
    thresholds: SglangThresholds = SglangThresholds(),  # noqa: B008  # immutable
) -> tuple[int, list[int]]:
    """Return (branch, tied workers): 1 imbalance, 2 longest match whatever its load, 3 low match.

    Source: SGLang ``sgl-model-gateway/src/policies/cache_aware.rs``.
    """
    most, fewest = max(in_flight), min(in_flight)
    if most - fewest > thresholds.balance_abs and most > fewest * thresholds.balance_rel:
        return 1, least(in_flight)
    longest = max(hits)
    if longest > 0 and longest / prompt_tokens > thresholds.cache:
        return 2, [i for i, hit in enumerate(hits) if hit == longest]
    return 3, least(in_flight)


class DynamoWeights(NamedTuple):
    """Dynamo's KV router settings, its defaults."""

    overlap_credit: float = 1.0
    prefill_load_scale: float = 1.0
    decode_scale: float = 1.0
    host: float = 0.75
    disk: float = 0.25


def dynamo(
    prompt_tokens: int,
    gpu_hit: int,
    cpu_hit: int,
    disk_hit: int,
    queued_tokens: int,
    active_tokens: int,
    new_tokens: int,
    weights: DynamoWeights = DynamoWeights(),  # noqa: B008  # immutable
) -> tuple[float, float, float]:
    """Return (prefill blocks, decode blocks, cost) of one worker; the least cost wins.

    Source: ai-dynamo ``lib/kv-router/src/scheduling/selector/default.rs``, temperature 0.
    """
    credit = weights.overlap_credit * gpu_hit + weights.host * cpu_hit + weights.disk * disk_hit
    page = DYNAMO_PAGE_TOKENS
    prefill = max(0.0, (queued_tokens + prompt_tokens) / page - credit / page)
    decode = (active_tokens + new_tokens) / page
    return prefill, decode, weights.prefill_load_scale * prefill + weights.decode_scale * decode


class LlmdWeights(NamedTuple):
    """Weights of llm-d's precise prefix configuration, its defaults."""

    prefix: float = 2.0
    queue: float = 1.0
    kv: float = 1.0


# llm-d scores shorter prompts as if they had this many tokens.
LLMD_LEAST_TOKENS = 512


def llmd(
    hits: Sequence[int],
    waiting: Sequence[int],
    kv_usage: Sequence[float],
    prompt_tokens: int,
    weights: LlmdWeights = LlmdWeights(),  # noqa: B008  # immutable
) -> list[tuple[float, float, float]]:
    """Return (prefix score, queue score, total) of each worker; the greatest total wins.

    Source: llm-d ``deploy/config/epp-precise-prefix-cache-config.yaml``.
    """
    most, fewest = max(waiting), min(waiting)
    whole = max(prompt_tokens, LLMD_LEAST_TOKENS)
    scores = []
    for hit, queue, kv in zip(hits, waiting, kv_usage, strict=True):
        prefix = min(1.0, hit / whole)
        room = 1.0 if most == fewest else (most - queue) / (most - fewest)
        total = weights.prefix * prefix + weights.queue * room + weights.kv * (1 - kv)
        scores.append((prefix, room, total))
    return scores


def aibrix(
    hits: Sequence[int],
    in_flight: Sequence[int],
    *,
    imbalance_abs: int = 8,
    sd_factor: float = 1.0,
) -> tuple[int, list[int]]:
    """Return (branch, tied workers): 1, 2 a match among those not too loaded, 3, 4 no match.

    Source: AIBrix ``pkg/plugins/gateway/algorithms/prefix_cache.go``.
    """
    mean = sum(in_flight) / len(in_flight)
    sd = sqrt(sum((n - mean) ** 2 for n in in_flight) / len(in_flight))
    fewest = min(in_flight)
    is_imbalanced = max(in_flight) - fewest > imbalance_abs
    usable = [
        i
        for i, n in enumerate(in_flight)
        if hits[i] > 0 and n <= mean + sd_factor * sd and (n == fewest or not is_imbalanced)
    ]
    if not usable:
        return (3 if is_imbalanced else 4), least(in_flight)
    longest = max(hits[i] for i in usable)
    usable = [i for i in usable if hits[i] == longest]
    lightest = min(in_flight[i] for i in usable)
    return (1 if is_imbalanced else 2), [i for i in usable if in_flight[i] == lightest]


# Keeps LMetric's ties for the worker with fewer requests.
LMETRIC_TIE = 1e-6


def lmetric(
    prompt_tokens: int, hit: int, in_flight: int, queued_tokens: int = 0, *, queue_weight: int = 0
) -> float:
    """Return uncached tokens x (requests + 1) of one worker; the least wins.

    Args:
        prompt_tokens: Prompt length.
        hit: Matched tokens there.
        in_flight: Requests in flight there.
        queued_tokens: Uncached tokens queued there.
        queue_weight: 1 counts them too, which the product's uncalibrated rule does.

    Source: SGLang ``sgl-model-gateway/src/policies/lmetric.rs``.
    """
    uncached = max(0, prompt_tokens - hit) + queue_weight * queued_tokens
    return uncached * (in_flight + 1) + LMETRIC_TIE * in_flight


def mooncake(
    prompt_tokens: int, hit: int, cpu_hit: int, disk_hit: int, queued_s: float, cost: CostModel
) -> float:
    """Return the estimated TTFT on one worker, without transfers; the least wins.

    Source: Mooncake (FAST'25), algorithm 1, from the paper.
    """
    return (
        queued_s
        + prefill_s(cost, prompt_tokens - hit, prompt_tokens)
        + cpu_hit / cost.restore_cpu_tokens_per_s
        + disk_hit / cost.restore_disk_tokens_per_s
    )


class PlainLoad(NamedTuple):
    """What was routed to one worker and is not finished, for ``plain``."""

    in_flight: int
    queued_tokens: int
    queued_s: float
    context_tokens: int


class PlainTerms(NamedTuple):
    """Seconds of the plain minimum estimated TTFT; the letters are the design's."""

    queue_s: float
    prefill_s: float
    interleave_s: float
    restore_s: float
    memory_s: float


def plain(
    prompt_tokens: int,
    hit: int,
    restore_s: float,
    load: PlainLoad,
    cost: CostModel,
    max_batched_tokens: int,
    capacity_tokens: float,
) -> PlainTerms:
    """Return the terms of one worker; the least sum wins. No drain, no externalities.

    Args:
        prompt_tokens: Prompt length.
        hit: Matched tokens there, predicted ones included.
        restore_s: Seconds of its restore and of the link's backlog; 0 if nothing is restored.
        load: What is routed there.
        cost: The worker's constants.
        max_batched_tokens: Token budget of a step.
        capacity_tokens: KV tokens there.

    Source: the simulation behind the design, policy ``ours``.
    """
    uncached = max(1, prompt_tokens - hit)
    steps = ceil((load.queued_tokens + uncached) / max_batched_tokens)
    decode_s = cost.context_s * load.context_tokens + cost.token_s * load.in_flight
    missing = max(0.0, load.context_tokens + prompt_tokens - MEMORY_FILL * capacity_tokens)
    return PlainTerms(
        load.queued_s,
        prefill_s(cost, uncached, prompt_tokens),
        steps * (cost.step_s + decode_s),
        restore_s * (RESTORE_OVERLAP if restore_s < load.queued_s else 1.0),
        cost.token_s * missing,
    )
