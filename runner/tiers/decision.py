"""What one choice between restoring and recomputing says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from runner.tiers.types import TierName

# A load is given up when it takes this many times what nine of ten take at most, but not before
# this share of what computing instead would cost: that is the price of giving up too early.
_PATIENCE_FACTOR = 3.0
_PATIENCE_SHARE = 0.25
# The same for a peer: a busy one lends between its steps only, and the asker may have to sit out
# two of them, the one under way and the one begun before its next request is read.
_PEER_PATIENCE_SHARE = 0.5

# Time a thread may wait for its turn on a busy machine.
_PATIENCE_SLACK_S = 0.02

Reason = Literal["worth", "too_little", "close_call", "refused", "nothing_found"]
"""Why: it pays; it does not; it would, by less than what changing one's mind takes; whoever has
the next block has lost too often; nobody has it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks on one tier."""

    tier: TierName
    num_blocks: int


@dataclass(frozen=True, slots=True)
class GainDecision:
    """One choice, with all that led to it.

    Attributes:
        id: Unique among the decisions of one ``Gain``.
        num_blocks: Blocks to restore, from the query's first one on; 0 to recompute all.
        runs: Where they come from, cut to ``num_blocks``; if that is 0, the best that was weighed.
        source: The peer's address if they come from it, else empty.
        start_tokens: Tokens in the pool already.
        num_tokens: Tokens of ``runs``.
        hit_blocks: Blocks that tiers or the peer hold.
        recompute_s: What computing ``runs`` would cost.
        restore_s: What loading them should take, queues included.
        restore_p90_s: In nine of ten cases at most.
        management_s: What else loading costs.
        delivered: Share of blocks expected to arrive (0..1).
        weight: What a second of compute is worth now, at least 1.
        gain_s: What was compared with ``bar_s``.
        bar_s: What the gain has to exceed.
        reason: Why.
    """

    id: int
    num_blocks: int
    runs: tuple[Run, ...]
    source: str
    start_tokens: int
    num_tokens: int
    hit_blocks: int
    recompute_s: float
    restore_s: float
    restore_p90_s: float
    management_s: float
    delivered: float
    weight: float
    gain_s: float
    bar_s: float
    reason: Reason

    @property
    def saving_s(self) -> float:
        """Seconds this request should save; 0 if it recomputes."""
        if not self.num_blocks:
            return 0.0
        return self.delivered * self.recompute_s - self.restore_s - self.management_s

    @property
    def patience_s(self) -> float:
        """Seconds to wait for the load before computing what it has not brought."""
        longest_s = _PATIENCE_FACTOR * self.restore_p90_s
        share = _PEER_PATIENCE_SHARE if self.source else _PATIENCE_SHARE
        return max(longest_s, share * self.recompute_s) + _PATIENCE_SLACK_S

    def explain(self) -> dict[str, Any]:
        """Return everything as JSON can hold it; seconds end in ``_s``."""
        return {
            "decision": "restore" if self.num_blocks else "recompute",
            "reason": self.reason,
            "num_blocks": self.num_blocks,
            "hit_blocks": self.hit_blocks,
            "source": self.source or "own",
            "runs": [{"tier": run.tier, "num_blocks": run.num_blocks} for run in self.runs],
            "start_tokens": self.start_tokens,
            "num_tokens": self.num_tokens,
            "predicted": {
                "recompute_s": self.recompute_s,
                "restore_s": self.restore_s,
                "restore_p90_s": self.restore_p90_s,
                "management_s": self.management_s,
                "delivered": self.delivered,
                "weight": self.weight,
                "gain_s": self.gain_s,
                "bar_s": self.bar_s,
                "saving_s": self.saving_s,
            },
        }
