"""The estimates of one request's candidates, made when somebody asks for them.

Of many workers only those are priced whose lower bound is below the best price found so far. The
bound is exact: it sums terms that the full price has too, so what is left out cannot be the least,
nor tied with it (``tests/gateway/test_prices.py``).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from gateway.routing.cost import (
    DECODE_INTERFERENCE,
    EVICTION_FILL,
    OWN_DECODE,
    Estimate,
    estimate_s,
    estimate_token_requests,
    eviction_s,
    token_requests,
)
from gateway.routing.pull import PULL_START, least_s, with_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.routing.cost import Candidate
    from gateway.routing.decision import RouteInput

# Two costs closer than this are the same number computed in another order.
TIE: Final = 1e-12
# A bound sums in another order than the price: it must exceed the best by more than their rounding.
ROUNDING: Final = 1e-9


def all_hits(candidates: list[Candidate], *, credited: bool) -> list[int]:
    """Return the tokens counted as held by each candidate, with or without pending credit."""
    hits = [c.hit_gpu + c.hit_cpu + c.hit_disk + c.hit_remote for c in candidates]
    if credited:
        pending = [c.pending_tokens for c in candidates]
        if any(pending):
            return list(map(max, hits, pending))
    return hits


class Prices:
    """Prices of one request's candidates, all in one unit; each is computed once.

    Args:
        request: What they are computed from.
        hits: Tokens counted as held by each candidate, pending credit included.
        in_seconds: Whether all that may be chosen have cost constants.

    Attributes:
        known: What was priced so far, by position.
    """

    __slots__ = ("_request", "hits", "in_seconds", "known")

    def __init__(self, request: RouteInput, hits: list[int], *, in_seconds: bool) -> None:
        self.hits = hits
        self.in_seconds = in_seconds
        self._request = request
        self.known: dict[int, Estimate] = {}

    def __getitem__(self, position: int) -> Estimate:
        """Return the estimate of the candidate at a position."""
        known = self.known.get(position)
        if known is None:
            known = self.known[position] = self._price(position)
        return known

    def all(self) -> list[Estimate]:
        """Return the estimates of all candidates, in their order."""
        return [self[i] for i in range(len(self.hits))]

    def least(self, positions: Sequence[int]) -> list[int]:
        """Return those of ``positions`` that share the least cost, in their order."""
        if self.in_seconds:
            costs = self._contenders(positions)
        else:
            request, hits = self._request, self.hits
            candidates, prompt_tokens = request.candidates, request.prompt_tokens
            costs = {i: token_requests(candidates[i], prompt_tokens, hits[i]) for i in positions}
        limit = min(costs.values()) + TIE
        return sorted([i for i, cost in costs.items() if cost <= limit])

    def _price(self, position: int) -> Estimate:
        r = self._request
        c = r.candidates[position]
        model, hit = c.model, self.hits[position]
        if not self.in_seconds or model is None:
            return estimate_token_requests(c, r.prompt_tokens, hit)
        own = estimate_s(
            c, model, r.now_s, r.prompt_tokens, hit, r.output_tokens, r.allowance_tokens
        )
        if c.can_pull and (r.sources or own.restore_s):
            return with_sources(own, c, model, r.now_s, r.prompt_tokens, r.output_tokens, r.sources)
        return own

    def _contenders(self, positions: Sequence[int]) -> dict[int, float]:
        """Return position -> cost of all that may be the least; the longest prefix goes first."""
        request, hits = self._request, self.hits
        candidates, now_s = request.candidates, request.now_s
        sources, allowance_tokens = request.sources, request.allowance_tokens
        # A step's decodes count once beside the prefill (I) and once more in the own decode (G).
        decode_share = 1.0 + OWN_DECODE * request.output_tokens
        if len(positions) == len(hits):
            first = hits.index(max(hits))
        else:
            first = max(positions, key=hits.__getitem__)
        best = self[first].cost
        limit = best + ROUNDING * (1.0 + best)
        costs = {first: best}
        bounds = self._bounds(positions)
        for i in positions:
            floor, prefill, uncached, depth = bounds[hits[i]]
            # Most often this leaves the holders of a prefix alone.
            if floor > limit:
                continue
            c = candidates[i]
            model = c.model
            if model is None:
                continue
            if not (sources and c.can_pull):
                floor = prefill = model.token_s * uncached + model.attention_s * depth
            queued = c.queued_s
            if queued:
                progress = now_s - c.progress_at_s
                if progress > 0.0:
                    queued -= progress
                if queued > 0.0 and prefill + queued > floor:
                    floor = prefill + queued
            floor += model.step_s
            n = c.in_flight
            if n:
                step = model.context_s * c.context_tokens + model.token_s * n
                floor += DECODE_INTERFERENCE * n * prefill + decode_share * step
            if floor * c.bias + c.overdue_s > limit:
                continue
            if c.capacity_tokens:
                filled = c.held_tokens + c.queued_tokens + uncached + allowance_tokens
                if filled > EVICTION_FILL * c.capacity_tokens:
                    floor += eviction_s(model, c, uncached, allowance_tokens)
                    if floor * c.bias + c.overdue_s > limit:
                        continue
            cost = self[i].cost
            costs[i] = cost
            if cost < best:
                best = cost
                limit = best + ROUNDING * (1.0 + best)
        return costs

    def _bounds(self, positions: Sequence[int]) -> dict[int, tuple[float, float, int, float]]:
        """Bound the price of any candidate by its hit tokens alone.

        Returns:
            By hit tokens: ``least_s``, the uncached tokens, and these times their mean depth.
        """
        request, held = self._request, set(self.hits)
        candidates, prompt_tokens = request.candidates, request.prompt_tokens
        pulling: list[Candidate] = []
        if request.sources:
            pulling = [c for i in positions if (c := candidates[i]).can_pull]
        token_s = attention_s = 0.0
        if len(held) > 1 or pulling:  # else hit tokens tell nobody apart
            token_s, attention_s = _quickest(candidates, positions)
        bounds: dict[int, tuple[float, float, int, float]] = {}
        for hit in held:
            uncached = prompt_tokens - hit if prompt_tokens > hit else 1
            depth = uncached * (prompt_tokens - uncached / 2)
            least = token_s * uncached + attention_s * depth
            bounds[hit] = least, least, uncached, depth
        if not pulling:
            return bounds

        def least_prefill_s(hit: int) -> float:
            left = max(1, prompt_tokens - hit)
            return token_s * left + attention_s * left * (prompt_tokens - left / 2)

        measured = [rate for c in pulling for rate in c.pull_rates.values()]
        rate = max(PULL_START / token_s, *measured, 0.0)
        return {
            hit: (*least_s(least_prefill_s, hit, request.sources, rate), uncached, depth)
            for hit, (_, _, uncached, depth) in bounds.items()
        }


def _quickest(candidates: list[Candidate], positions: Sequence[int]) -> tuple[float, float]:
    """Return the least prefill constants of some candidates."""
    token_s = attention_s = inf
    for i in positions:
        model = candidates[i].model
        if model is None:  # none is missing: these are prices in seconds
            continue
        if model.token_s < token_s:
            token_s = model.token_s
        if model.attention_s < attention_s:
            attention_s = model.attention_s
    return token_s, attention_s
