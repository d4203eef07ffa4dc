"""Choose the worker for a prompt: a pure function that explains itself.

``choose()`` reads plain numbers (``RouteInput``) and returns the choice together with every
candidate's numbers, so that proxy, ``explain``, tests and bench take the very same decision, and a
decision written as JSON can be taken again. Nothing here reads a clock, a socket or a random
number: ties are broken by the ``rotation`` that the caller counts up.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from gateway.routing.cost import (
    Candidate,
    CostModel,
    Estimate,
    estimate_s,
    estimate_token_requests,
    prefill_s,
)

__all__ = [
    "Candidate",
    "CostModel",
    "Decision",
    "Estimate",
    "Reason",
    "RouteInput",
    "choose",
]

# Two costs closer than this are the same number computed in another order.
TIE = 1e-12
# A home wins against a candidate that is cheaper by no more than this. Wider ties cost TTFT.
NEAR_RATIO = 0.10
NEAR_S = 0.020
# A sibling accepts this share of the prefill it saves the fleet as a dearer worker, so that a
# burst of one cold document is prefilled once or twice instead of everywhere.
SIBLING_SHARE = 0.5
# How many requests a worker of unknown speed takes because of a sibling.
MAX_UNCALIBRATED_SIBLINGS = 10
# Bounded load: no worker takes more than this multiple of the mean requests in flight by its hash.
LOAD_FACTOR = 1.25


class Reason(StrEnum):
    """Why the worker was chosen (bounded: it is a metric label)."""

    NO_CANDIDATE = "no_candidate"
    ONLY_CANDIDATE = "only_candidate"
    LONGEST_PREFIX = "longest_prefix"  # least cost, and nobody holds more of the prompt
    LEAST_COST = "least_cost"  # least cost although another holds more, or nobody anything
    HOME = "home"  # nearly the least cost, and the home of a prompt nobody holds
    SIBLING = "sibling"  # a request with the same cold prefix is being computed there
    UNCALIBRATED = "uncalibrated"  # a candidate's speed is unknown: (u + Qtok) * (n + 1)
    STRICT_HOME = "strict_home"  # affinity: strict, first of the ring
    STRICT_SPILL = "strict_spill"  # affinity: strict, those before it were above the load bound
    NO_TOKENS_HOME = "no_tokens_home"  # prompt or index unreadable, first of the ring
    NO_TOKENS_SPILL = "no_tokens_spill"  # likewise, those before it were above the load bound


class RouteInput(msgspec.Struct):
    """Everything a choice depends on.

    Attributes:
        now_s: Decision time, on the clock of the candidates' times.
        prompt_tokens: Prompt length (``L``), exact or estimated.
        candidates: All workers of the pool, eligible or not.
        mode: ``cost``; ``strict`` and ``text`` go by the ring with bounded load.
        output_tokens: Mean completion length (``E_out``).
        home: The key's home workers in ring order; may be left empty when the prompt is held.
        ring: All workers in ring order from the key on; read by ``strict`` and ``text`` only.
    """

    now_s: float
    prompt_tokens: int
    candidates: list[Candidate]
    mode: Literal["cost", "strict", "text"] = "cost"
    output_tokens: float = 200.0
    home: list[str] = []
    ring: list[str] = []


class Decision(msgspec.Struct):
    """The outcome: a worker, why, and what everybody would have cost.

    Attributes:
        worker: Chosen worker id; None when nobody is eligible.
        reason: Why this one.
        source: Where its hit tokens come from (the candidate's ``source``).
        hit_tokens: Predicted hit tokens on it.
        ttft_s: Predicted TTFT on it; None when nothing is calibrated.
        unit: Unit of all costs: ``seconds``, or ``token_requests`` while a speed is unknown.
        tied: Workers that shared the least cost, in the candidates' order.
        candidates: One estimate per candidate of the input, in its order.
        input: What was read.
        rotation: Tie breaker that was used.
        cold: Whether pending siblings counted: no eligible worker holds half of the prompt.
        position: Index of the chosen worker among the candidates; -1 when nobody was chosen.
    """

    worker: str | None
    reason: Reason
    source: str
    hit_tokens: int
    ttft_s: float | None
    unit: Literal["seconds", "token_requests"]
    tied: list[str]
    candidates: list[Estimate]
    input: RouteInput
    rotation: int
    cold: bool = True
    position: int = -1

    def to_json(self) -> bytes:
        """Encode the decision with its whole input."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> Decision:
        """Decode what ``to_json`` wrote; ``choose(it.input, rotation=it.rotation)`` equals it."""
        return msgspec.json.decode(data, type=Decision)

    def estimate(self) -> Estimate:
        """Return the chosen worker's estimate.

        Raises:
            LookupError: If no worker was chosen.
        """
        if self.position < 0:
            raise LookupError("no worker was chosen")
        return self.candidates[self.position]


def choose(request: RouteInput, *, rotation: int = 0) -> Decision:
    """Pick a worker for the prompt. Pure; O(candidates).

    Args:
        request: Prompt and candidates.
        rotation: Breaks exact ties: the caller counts it up from request to request.
    """
    candidates = request.candidates
    eligible = []
    calibrated = True
    longest = 0
    for i, c in enumerate(candidates):
        if c.eligible:
            eligible.append(i)
            if c.hit_tokens > longest:
                longest = c.hit_tokens
            # One unknown speed among the eligible puts all of them into the unit that needs none.
            calibrated = calibrated and c.model is not None
    cold = 2 * longest < request.prompt_tokens
    estimates = _estimates(request, credited=cold, in_seconds=calibrated)
    if not eligible:
        return Decision(
            None,
            Reason.NO_CANDIDATE,
            "",
            0,
            None,
            "seconds",
            [],
            estimates,
            request,
            rotation,
            cold,
        )
    tied = _least(estimates, eligible)
    if len(eligible) == 1:
        chosen, reason = eligible[0], Reason.ONLY_CANDIDATE
    elif request.mode != "cost":
        chosen, reason = _by_ring(request, eligible)
    else:
        chosen, reason = _by_cost(
            request, eligible, estimates, tied[rotation % len(tied)], cold, calibrated
        )
    estimate = estimates[chosen]
    return Decision(
        estimate.worker,
        reason,
        candidates[chosen].source,
        estimate.hit_tokens,
        estimate.ttft_s if calibrated else None,
        "seconds" if calibrated else "token_requests",
        [estimates[i].worker for i in tied],
        estimates,
        request,
        rotation,
        cold,
        chosen,
    )


def _estimates(request: RouteInput, *, credited: bool, in_seconds: bool) -> list[Estimate]:
    """Price all candidates in one unit."""
    estimates = []
    now_s, prompt_tokens = request.now_s, request.prompt_tokens
    for c in request.candidates:
        hit = c.hit_tokens
        if credited and c.pending_tokens > hit:
            hit = c.pending_tokens
        if in_seconds and c.model is not None:
            estimate = estimate_s(c, c.model, now_s, prompt_tokens, hit, request.output_tokens)
        else:
            estimate = estimate_token_requests(c, prompt_tokens, hit)
        estimates.append(estimate)
    return estimates


def _least(estimates: list[Estimate], eligible: list[int]) -> list[int]:
    """Return the eligible candidates that share the least cost."""
    best = float("inf")
    tied: list[int] = []
    for i in eligible:
        cost = estimates[i].cost
        if cost < best - TIE:
            best, tied = cost, [i]
        elif cost <= best + TIE:
            tied.append(i)
    return tied


def _by_cost(
    request: RouteInput,
    eligible: list[int],
    estimates: list[Estimate],
    least: int,
    cold: bool,
    calibrated: bool,
) -> tuple[int, Reason]:
    """Take the least cost, unless a sibling's worker or the home is as good for the fleet."""
    if cold:
        sibling = _sibling(request, eligible, estimates, estimates[least].cost, calibrated)
        if sibling is not None:
            return sibling, Reason.SIBLING
    longest = max([estimates[i].hit_tokens for i in eligible])
    if 4 * longest < request.prompt_tokens:
        home = _home(request, eligible, estimates, estimates[least].cost, calibrated)
        if home is not None:
            return home, Reason.HOME
    if not calibrated:
        return least, Reason.UNCALIBRATED
    if longest and estimates[least].hit_tokens == longest:
        return least, Reason.LONGEST_PREFIX
    return least, Reason.LEAST_COST


def _home(
    request: RouteInput,
    eligible: list[int],
    estimates: list[Estimate],
    least: float,
    calibrated: bool,
) -> int | None:
    """Return the first home worker whose cost is nearly the least."""
    near = NEAR_RATIO * least
    limit = least + (min(near, NEAR_S) if calibrated else near)
    for worker in request.home:
        for i in eligible:
            if estimates[i].worker == worker and estimates[i].cost <= limit:
                return i
    return None


def _sibling(
    request: RouteInput,
    eligible: list[int],
    estimates: list[Estimate],
    least: float,
    calibrated: bool,
) -> int | None:
    """Return the worker that computes at least half of this prompt, unless it has become too dear.

    What is dearer there is weighed against the prefill that a second copy costs the fleet.
    """
    candidates = request.candidates
    leaders = [i for i in eligible if 2 * candidates[i].pending_tokens >= request.prompt_tokens]
    if not leaders:
        return None
    best = min(leaders, key=lambda i: estimates[i].cost)
    c, estimate = candidates[best], estimates[best]
    if calibrated and c.model is not None:
        whole_s = prefill_s(c.model, request.prompt_tokens, request.prompt_tokens)
        affordable = least + SIBLING_SHARE * (whole_s - estimate.prefill_s)
        return best if estimate.cost <= affordable else None
    work = {i: estimates[i].uncached_tokens + candidates[i].queued_tokens for i in eligible}
    saved = SIBLING_SHARE * (request.prompt_tokens - estimate.uncached_tokens)
    room = c.in_flight < MAX_UNCALIBRATED_SIBLINGS
    return best if room and work[best] <= min(work.values()) + saved else None


def _by_ring(request: RouteInput, eligible: list[int]) -> tuple[int, Reason]:
    """Walk the ring to the first worker whose load is within the bound.

    Source: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018), with the
    test ``n <= factor * (total + 1) / workers``; testing ``n + 1`` spills too early.
    """
    at = {request.candidates[i].worker: i for i in eligible}
    order = [at[worker] for worker in request.ring if worker in at] or eligible
    total = sum(request.candidates[i].in_flight for i in eligible)
    limit = LOAD_FACTOR * (total + 1) / len(eligible)
    chosen = next((i for i in order if request.candidates[i].in_flight <= limit), order[0])
    strict = request.mode == "strict"
    if chosen == order[0]:
        return chosen, Reason.STRICT_HOME if strict else Reason.NO_TOKENS_HOME
    return chosen, Reason.STRICT_SPILL if strict else Reason.NO_TOKENS_SPILL
