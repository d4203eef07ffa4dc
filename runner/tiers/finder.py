"""Which tier has which of a prompt's blocks: from memory, but for the remote tier's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.kvkeys import KvKey
    from runner.tiers.gain import Gain
    from runner.tiers.tier import Tier
    from runner.tiers.types import LoadQuery, TierName


class Finder:
    """Looks blocks up for loads; engine thread only.

    Args:
        tiers: Own tiers, the nearest first.
        gain: Says which of them are refused.
    """

    def __init__(self, tiers: Sequence[Tier], gain: Gain) -> None:
        self._tiers = tiers
        self._gain = gain

    def is_waiting(self, query: LoadQuery, now_s: float) -> bool:
        """Whether to look again later, since the remote tier is being asked about this prompt."""
        usable = self._usable(now_s)
        remote = next((tier.index for tier in usable if tier.index is not None), None)
        if remote is None or self._gain.is_refused("remote"):
            return False
        slotted = [tier for tier in usable if tier.books is not None]
        missing = [
            key
            for key, tokens in _wanted(query)
            if not any(tier.holds(key, tokens, now_s) for tier in slotted)
        ]
        return remote.is_waiting(query.owner, missing, now_s)

    def find(self, query: LoadQuery, now_s: float) -> list[TierName]:
        """Return the tier of each block from ``query.first_block`` on, up to the first without."""
        usable = self._usable(now_s)
        found: list[TierName] = []
        for key, tokens in _wanted(query):
            holder = next((tier for tier in usable if tier.holds(key, tokens, now_s)), None)
            if holder is None:
                break
            found.append(holder.name)
        return found

    def knows(self, key: KvKey, now_s: float) -> bool:
        """Whether any tier has a block, or soon will."""
        for tier in self._tiers:
            if tier.books is not None and tier.books.knows(key):
                return True
            if tier.index is not None and tier.index.holds(key, now_s):
                return True
        return False

    def _usable(self, now_s: float) -> list[Tier]:
        """Tiers that work, refused ones last: what another tier has too comes from there."""
        working = [tier for tier in self._tiers if not tier.reading.is_paused(now_s)]
        return sorted(working, key=lambda tier: self._gain.is_refused(tier.name))


def _wanted(query: LoadQuery) -> list[tuple[KvKey, bytes]]:
    chain, wanted = query.chain, slice(query.first_block, query.max_blocks)
    return list(zip(chain.keys[wanted], chain.tokens[wanted], strict=True))
