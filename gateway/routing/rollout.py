"""How much of the traffic goes by the routing rule: all, a share, or none of it.

What does not go by the rule goes by least load, and what the rule would have done stands beside it,
so that an operator sees what it would save before it counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import xxhash

from gateway.routing.choose import choose

if TYPE_CHECKING:
    from gateway.routing.choose import Decision, RouteInput
    from gateway.routing.plan import Plan

Mode = Literal["observe", "cost", "least_load"]
Policy = Literal["cost", "least_load"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What the rule would have chosen for a request that was served by least load.

    Attributes:
        worker: Where it would have gone.
        reason: Why.
        hit_tokens: Prompt tokens it predicts to be found there.
        ttft_s: TTFT it predicts; None while a speed is unknown.
        saved_tokens: Hit tokens it predicts there beyond those of the worker that served.
        saved_s: Predicted TTFT that it would have saved; None while a speed is unknown.
    """

    worker: str
    reason: str
    hit_tokens: int
    ttft_s: float | None
    saved_tokens: int
    saved_s: float | None


class RollOut:
    """Which requests go by the rule; one event loop only.

    Args:
        mode: ``cost``: ``share`` percent of the traffic; ``observe`` and ``least_load``: none of
            it, where ``observe`` also looks at what the rule would do. May be changed at any time.
        share: Percent, 0 to 100. The rest is looked at as in ``observe``. May be changed.
        seed: Which keys are in a share; equal in all gateways of a fleet.

    Attributes:
        num_routed: (pool name, policy) -> requests sent.
    """

    def __init__(self, mode: Mode = "cost", share: int = 100, *, seed: int = 0) -> None:
        self.mode = mode
        self.share = share
        self.num_routed: Counter[tuple[str, Policy]] = Counter()
        self._seed = seed

    @property
    def is_complete(self) -> bool:
        """Whether everything goes by the rule."""
        return self.mode == "cost" and self.share >= 100

    def policy(self, plan: Plan) -> Policy:
        """Return what routes a request: the same for all requests of an affinity key."""
        if self.mode != "cost":
            return "least_load"
        if self.share >= 100:
            return "cost"
        if self.share <= 0:
            return "least_load"
        share = 100 * fraction(f"{self._seed}|share|{plan.key.ring_key}")
        return "cost" if share < self.share else "least_load"

    def choose(self, plan: Plan, request: RouteInput, rotation: int) -> Decision:
        """Choose by what routes this request; write into the plan what the rule would do.

        Args:
            plan: The request.
            request: What a choice depends on.
            rotation: Breaks ties.
        """
        plan.rule = None
        if self.policy(plan) == "cost":
            return choose(request, rotation=rotation)
        served = choose(msgspec.structs.replace(request, mode="least_load"), rotation=rotation)
        if self.mode != "least_load" and served.worker is not None:
            plan.rule = _compared(choose(request, rotation=rotation), served)
        return served

    def count(self, plan: Plan, decision: Decision) -> None:
        """Count a request that was sent; once per request."""
        is_least_load = decision.input.mode == "least_load"
        self.num_routed[plan.pool.name, "least_load" if is_least_load else "cost"] += 1


def _compared(rule: Decision, served: Decision) -> Rule | None:
    if rule.worker is None:
        return None
    saved_s = None
    if rule.ttft_s is not None and served.ttft_s is not None:
        saved_s = served.ttft_s - rule.ttft_s
    return Rule(
        rule.worker,
        rule.reason.value,
        rule.hit_tokens,
        rule.ttft_s,
        rule.hit_tokens - served.hit_tokens,
        saved_s,
    )


def fraction(text: str) -> float:
    """Map a text to a number from 0 to below 1, evenly and for ever the same."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) / 2**64
