"""How much of the prompts came from where, and why the rest did not."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from runner.types import HitSource, MissReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.kvkeys import KvKey
    from runner.pool.blocks import BlockPool
    from runner.sequence import Sequence
    from runner.tiers.interface import Tiers

# Nearest first, as the type names them.
_SOURCES: tuple[HitSource, ...] = get_args(HitSource)


class ReuseFigures:
    """Totals over all prompts, each counted when it was first admitted. Engine thread only.

    Attributes:
        query_tokens_total: Prompt tokens looked up; the sum of all below.
        hit_tokens: Tokens that were not computed, by where their KV was.
        miss_tokens: The others, by reason.
    """

    def __init__(self, pool: BlockPool, tiers: Tiers | None) -> None:
        self.query_tokens_total = 0
        self.hit_tokens: dict[HitSource, int] = dict.fromkeys(_SOURCES, 0)
        self.miss_tokens: dict[MissReason, int] = dict.fromkeys(get_args(MissReason), 0)
        self._pool = pool
        self._tiers = tiers

    @property
    def hit_tokens_total(self) -> int:
        """Tokens that were not computed."""
        return sum(self.hit_tokens.values())

    def admit(
        self, sequence: Sequence, hits: Mapping[HitSource, int], *, num_failed: int = 0
    ) -> None:
        """Count a sequence that has just got its blocks, unless it has been counted before.

        Args:
            sequence: Its computed tokens are its hits; learns where they came from.
            hits: Blocks by where they were.
            num_failed: Blocks after them whose load failed.
        """
        if sequence.cached_tokens is not None:
            return
        block_size, prompt_tokens = self._pool.block_size, len(sequence.request.prompt_ids)
        sequence.cached_tokens = sequence.num_computed
        used = [source for source in _SOURCES if hits.get(source)]
        sequence.hit_source = used[-1] if used else None
        for source in used:
            self.hit_tokens[source] += hits[source] * block_size
        # The last token is always computed: its block, and a partial one, could be no hits.
        most = (prompt_tokens - 1) // block_size
        self.miss_tokens["below_block"] += prompt_tokens - most * block_size
        missing = sequence.chain.keys[sequence.num_computed // block_size : most]
        self.miss_tokens["failed"] += num_failed * block_size
        for key in missing[num_failed:]:
            self.miss_tokens[self._why_missing(sequence, key)] += block_size
        self.query_tokens_total += prompt_tokens

    def _why_missing(self, sequence: Sequence, key: KvKey) -> MissReason:
        if self._tiers is not None:
            reason = self._tiers.why_missing(sequence.owner, key)
            if reason != "cold":
                return reason
        return "evicted" if self._pool.was_evicted(key) else "cold"
