"""Whether a tier may be loaded from at all: what it has lost, and when it is probed."""

from __future__ import annotations

from dataclasses import dataclass

# Restores that took longer than computing would have: so many before the others have made up for
# the time lost, and the tier is refused.
MAX_LOSSES = 3

# How often a tier that is idle or refused is asked for one block.
PROBE_INTERVAL_S = 10.0

# Weight of the newest load in the averages.
_NEWEST_SHARE = 0.2

_NEVER_S = float("-inf")


@dataclass(slots=True)
class Trust:
    """What is known of one tier, or of one peer. Owned by the engine thread.

    Attributes:
        losses: Loads slower than computing, since the time they lost was last made up for.
        debt_s: Time they lost that has not been made up for.
        is_refused: No user's request may load from it.
        delivered: Share of wanted blocks that come (0..1), moving average.
        read_at_s: When something was last read from it.
        probed_at_s: When a probe was last due.
        typical_blocks: Size of the loads it is weighed for, moving average; 0 before the first.
        typical_start_tokens: Tokens before those loads.
    """

    losses: int = 0
    debt_s: float = 0.0
    is_refused: bool = False
    delivered: float = 1.0
    read_at_s: float = _NEVER_S
    probed_at_s: float = _NEVER_S
    typical_blocks: float = 0.0
    typical_start_tokens: float = 0.0

    def weighed(self, start_tokens: int, num_blocks: int) -> None:
        """Note what a request would load from it."""
        share = _NEWEST_SHARE if self.typical_blocks else 1.0
        self.typical_blocks += share * (num_blocks - self.typical_blocks)
        self.typical_start_tokens += share * (start_tokens - self.typical_start_tokens)

    def lost(self, lost_s: float) -> None:
        """Note a load that was slower than computing, by how much."""
        self.debt_s += lost_s
        self.losses = min(self.losses + 1, MAX_LOSSES)
        if self.losses == MAX_LOSSES:
            self.is_refused = True

    def won(self, saved_s: float) -> None:
        """Note a load that was quicker; a refused tier comes back by a probe alone."""
        self.debt_s = max(0.0, self.debt_s - saved_s)
        if not self.debt_s and not self.is_refused:
            self.losses = 0

    def readmit(self) -> None:
        """Let requests load again; the next loss refuses it once more."""
        self.is_refused = False
        self.debt_s = 0.0
        self.losses = MAX_LOSSES - 1

    def note_delivered(self, share: float) -> None:
        """Note which share of the wanted blocks came."""
        self.delivered += _NEWEST_SHARE * (share - self.delivered)

    def next_probe_s(self) -> float:
        """Return when a probe is due, unless something is read before."""
        newest_s = self.probed_at_s if self.is_refused else max(self.probed_at_s, self.read_at_s)
        return newest_s + PROBE_INTERVAL_S
