"""Choose the worker for a prompt: a pure function that explains itself.

``choose()`` reads plain numbers (``RouteInput``) and returns the choice together with every
candidate's numbers, so that proxy, ``explain``, tests and bench take the very same decision, and a
decision written as JSON can be taken again. Nothing here reads a clock, a socket or a random
number: ties are broken by the ``rotation`` that the caller counts up.
"""

from __future__ import annotations

from typing import Final

from gateway.routing.cost import (
    Candidate,
    CostModel,
    Estimate,
    Source,
    prefill_s,
)
from gateway.routing.decision import Decision, Reason, RouteInput
from gateway.routing.prices import Prices, all_hits

__all__ = [
    "Candidate",
    "CostModel",
    "Decision",
    "Estimate",
    "Reason",
    "RouteInput",
    "Source",
    "choose",
]

# A home wins against a candidate that is cheaper by no more than this. Wider ties cost TTFT.
NEAR_RATIO: Final = 0.10
NEAR_S: Final = 0.020
# A sibling accepts this share of the prefill it saves the fleet as a dearer worker, so that a
# burst of one cold document is prefilled once or twice instead of everywhere.
SIBLING_SHARE: Final = 0.5
# How many requests a worker of unknown speed takes because of a sibling.
MAX_UNCALIBRATED_SIBLINGS: Final = 10
# Bounded load: no worker takes more than this multiple of the mean requests in flight by its hash.
LOAD_FACTOR: Final = 1.25


# Reasons of most choices: to find one on its class takes 0.2 us each time.
_LONGEST_PREFIX: Final = Reason.LONGEST_PREFIX
_LEAST_COST: Final = Reason.LEAST_COST
_UNCALIBRATED: Final = Reason.UNCALIBRATED


def choose(request: RouteInput, *, rotation: int = 0) -> Decision:
    """Pick a worker for the prompt. Pure; O(candidates).

    Args:
        request: Prompt and candidates.
        rotation: Breaks exact ties: the caller counts it up from request to request.
    """
    candidates = request.candidates
    eligible = [i for i, c in enumerate(candidates) if c.eligible]
    hits = all_hits(candidates, credited=False)
    longest = _longest(hits, eligible)
    cold = 2 * longest < request.prompt_tokens
    if cold:
        hits = all_hits(candidates, credited=True)
    if not eligible:
        return Decision(
            None, Reason.NO_CANDIDATE, "", 0, None, "seconds", [], request, rotation, cold
        )
    # One unknown speed among the eligible puts all of them into the unit that needs none.
    calibrated = None not in [candidates[i].model for i in eligible]
    prices = Prices(request, hits, in_seconds=calibrated)
    if request.mode == "least_load":
        tied = _least_loaded(candidates, eligible)
        chosen, reason = tied[rotation % len(tied)], Reason.LEAST_LOAD
    else:
        if request.draws:
            eligible = compared_positions(request)
        tied = prices.least(eligible)
        if len(eligible) == 1:
            chosen, reason = eligible[0], Reason.ONLY_CANDIDATE
        elif request.mode != "cost":
            chosen, reason = _by_ring(request, eligible)
        else:
            chosen, reason = _by_cost(request, eligible, prices, tied[rotation % len(tied)], cold)
    estimate = prices[chosen]
    return Decision(
        estimate.worker,
        reason,
        estimate.source,
        estimate.hit_tokens,
        estimate.ttft_s if calibrated else None,
        "seconds" if calibrated else "token_requests",
        [candidates[i].worker for i in tied],
        request,
        rotation,
        cold,
        chosen,
        estimate,
        candidates[chosen].mode,
    )


def _longest(hits: list[int], positions: list[int]) -> int:
    """Return the longest hit at some positions, 0 without any."""
    longest = 0
    for i in positions:
        if hits[i] > longest:
            longest = hits[i]
    return longest


def compared_positions(request: RouteInput) -> list[int]:
    """Return the positions of the candidates that a choice compares: the eligible, or a sample.

    Gateways that all see the same old load must not all run to the same idle worker. Compared are
    then those who hold more than half of the best match and a quarter of the prompt, the home, and
    the random draws.
    """
    candidates = request.candidates
    eligible = [i for i, c in enumerate(candidates) if c.eligible]
    if not request.draws or request.mode != "cost" or len(eligible) < 2:
        return eligible
    hits = all_hits(candidates, credited=False)
    best = _longest(hits, eligible)
    draws, home = set(request.draws), set(request.home)
    compared = [
        i
        for i in eligible
        if i in draws
        or (2 * hits[i] > best and 4 * hits[i] > request.prompt_tokens)
        or candidates[i].worker in home
    ]
    return compared or eligible


def _least_loaded(candidates: list[Candidate], eligible: list[int]) -> list[int]:
    """Return the eligible candidates with the fewest requests, then queued tokens, in flight."""
    loads = [(candidates[i].in_flight, candidates[i].queued_tokens) for i in eligible]
    least = min(loads)
    return [i for i, load in zip(eligible, loads, strict=True) if load == least]


def _by_cost(
    request: RouteInput, eligible: list[int], prices: Prices, least: int, cold: bool
) -> tuple[int, Reason]:
    """Take the least cost, unless a sibling's worker or the home is as good for the fleet."""
    if cold:
        sibling = _sibling(request, eligible, prices, prices[least].cost)
        if sibling is not None:
            return sibling, Reason.SIBLING
    longest = _longest(prices.hits, eligible)
    if 4 * longest < request.prompt_tokens:
        home = _home(request, eligible, prices, prices[least].cost)
        if home is not None:
            return home, Reason.HOME
    if not prices.in_seconds:
        return least, _UNCALIBRATED
    if longest and prices.hits[least] == longest:
        return least, _LONGEST_PREFIX
    return least, _LEAST_COST


def _home(request: RouteInput, eligible: list[int], prices: Prices, least: float) -> int | None:
    """Return the first home worker whose cost is nearly the least."""
    if not request.home:
        return None
    near = NEAR_RATIO * least
    limit = least + (min(near, NEAR_S) if prices.in_seconds else near)
    at = {request.candidates[i].worker: i for i in eligible}
    for worker in request.home:
        i = at.get(worker)
        if i is not None and prices[i].cost <= limit:
            return i
    return None


def _sibling(request: RouteInput, eligible: list[int], prices: Prices, least: float) -> int | None:
    """Return the worker that computes at least half of this prompt, unless it has become too dear.

    What is dearer there is weighed against the prefill that a second copy costs the fleet.
    """
    candidates = request.candidates
    leaders = [i for i in eligible if 2 * candidates[i].pending_tokens >= request.prompt_tokens]
    if not leaders:
        return None
    best = min(leaders, key=lambda i: prices[i].cost)
    c, estimate = candidates[best], prices[best]
    if prices.in_seconds and c.model is not None:
        whole_s = prefill_s(c.model, request.prompt_tokens, request.prompt_tokens)
        affordable = least + SIBLING_SHARE * (whole_s - estimate.prefill_s)
        return best if estimate.cost <= affordable else None
    work = {i: prices[i].uncached_tokens + candidates[i].queued_tokens for i in eligible}
    saved = SIBLING_SHARE * (request.prompt_tokens - estimate.uncached_tokens)
    room = c.in_flight < MAX_UNCALIBRATED_SIBLINGS
    return best if room and work[best] <= min(work.values()) + saved else None


def _load(c: Candidate) -> float:
    return (c.in_flight + 1) * c.bias - 1


def _by_ring(request: RouteInput, eligible: list[int]) -> tuple[int, Reason]:
    """Walk the ring to the first worker whose load is within the bound.

    Source: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018), with the
    test ``n <= factor * (total + 1) / workers``; testing ``n + 1`` spills too early. A worker that
    fails counts as if it had more in flight.
    """
    at = {request.candidates[i].worker: i for i in eligible}
    order = [at[worker] for worker in request.ring if worker in at] or eligible
    loads = {i: _load(request.candidates[i]) for i in eligible}
    limit = LOAD_FACTOR * (sum(loads.values()) + 1) / len(eligible)
    chosen = next((i for i in order if loads[i] <= limit), order[0])
    strict = request.mode == "strict"
    if chosen == order[0]:
        return chosen, Reason.STRICT_HOME if strict else Reason.NO_TOKENS_HOME
    return chosen, Reason.STRICT_SPILL if strict else Reason.NO_TOKENS_SPILL
