"""Whether a block is worth storing: the odds that it comes back against what writing costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.tiers.pricing import Pricing
    from runner.tiers.reuse import ReuseHistory
    from runner.tiers.types import BlockRecord, TierName

# Above this a tier takes only what has been asked for twice: the simulation of bench/eviction.py.
NEARLY_FULL = 0.9
SECOND_TOUCH = 2

# Blocks at the start of a sequence, a system prompt's length: stored at once while there is room.
_FIRST_BLOCKS = 4

# A write queue of this length makes writing twice as dear.
_QUEUE_DOUBLES_S = 0.1

# Until so many reads have been seen, the tier's rate is a cautious guess.
_MEASURED_READS = 3

# How often a tier that is not worth it gets a block all the same: what nothing is written to can
# be neither probed nor seen to become quicker.
_TRIAL_INTERVAL_S = 10.0


@dataclass(slots=True)
class Admission:
    """Owned by the engine thread.

    Attributes:
        pricing: What things cost.
        history: How often blocks come back.
    """

    pricing: Pricing
    history: ReuseHistory
    _tried_at_s: dict[TierName, float] = field(default_factory=dict)

    def worth_storing(
        self,
        tier: TierName,
        record: BlockRecord,
        touches: int,
        fullness: float,
        queued_bytes: int,
        now_s: float,
    ) -> bool:
        """Return whether to write a block, ``p_reuse * gain > write seconds * pressure``.

        Counts the block as offered, once for all tiers.

        Args:
            tier: Where to.
            record: Which block.
            touches: Requests that had it in their prompt, the one that computed it included.
            fullness: Share of the tier's room in use (0..1).
            queued_bytes: Waiting to be written there.
            now_s: Monotonic.
        """
        self.history.offered(record.key, record.depth, touches, now_s)
        if fullness > NEARLY_FULL and touches < SECOND_TOUCH:
            return False
        likely = self.history.likelihood(record.depth, touches)
        if record.depth < _FIRST_BLOCKS and fullness <= NEARLY_FULL:
            likely = 1.0
        if likely * self._gain_s(tier, record.depth) > self._price_s(tier, queued_bytes):
            return True
        if now_s - self._tried_at_s.get(tier, float("-inf")) < _TRIAL_INTERVAL_S:
            return False
        self._tried_at_s[tier] = now_s
        return True

    def _price_s(self, tier: TierName, queued_bytes: int) -> float:
        """Return what writing one block among its neighbours costs, dearer behind a queue."""
        write_s, queue_s = self.pricing.write_per_block_s(tier, queued_bytes)
        return write_s * (1.0 + queue_s / _QUEUE_DOUBLES_S)

    def _gain_s(self, tier: TierName, depth: int) -> float:
        """Return what one block saves when it is asked for."""
        if self.pricing.transfers.count(tier, "read") < _MEASURED_READS:
            return self.pricing.recompute_per_block_s(depth)
        return self.pricing.saved_per_block_s(tier, depth)
