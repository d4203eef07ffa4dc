"""Block hash -> holders (worker, tier): who holds which prefix.

Invariant: a block is *visible* on a worker only while its parent is a root or visible there too.
Removing a parent hides its descendants until it returns. So the workers that see block i of a chain
are a subset of those that see block i - 1, and ``match`` may bisect instead of walking.

Used from one thread (the event loop). Worker names are opaque; a data-parallel rank is a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prefix_index.blocks import is_root
from prefix_index.holdings import TIERS, Holdings, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prefix_index.blocks import BlockHash

__all__ = ["TIERS", "Hit", "Index", "Tier"]

# Leaves evicted in one go, so that choosing the fullest worker is paid once for all of them.
_EVICT_BATCH_BLOCKS = 64


class Hit(NamedTuple):
    """Hit tokens of one worker, split by the fastest tier that holds each block."""

    gpu: int = 0
    cpu: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        """Hit tokens of all tiers."""
        return self.gpu + self.cpu + self.disk + self.remote


class Index:
    """The blocks that a pool's workers hold, in process.

    Args:
        block_size: Tokens per block, equal for all workers of one index.
        max_blocks: Bound on (worker, block) entries. Beyond it the fullest worker loses its least
            recently stored leaf blocks, never a parent before its children.
    """

    def __init__(self, block_size: int, max_blocks: int = 5_000_000) -> None:
        if block_size <= 0:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self.max_blocks = max_blocks
        self._num_blocks = 0
        # block -> bits of the workers that see it; a block that nobody sees has no entry.
        self._masks: dict[BlockHash, int] = {}
        self._workers: dict[str, Holdings] = {}
        self._by_bit: dict[int, Holdings] = {}

    @property
    def num_blocks(self) -> int:
        """(worker, block) entries held, visible or not."""
        return self._num_blocks

    def store(
        self, worker: str, hashes: Iterable[BlockHash], parent: BlockHash, tier: Tier = "gpu"
    ) -> None:
        """Count one more copy of each block of a chain.

        Args:
            worker: Holder; made known by its first block.
            hashes: Chain in prompt order.
            parent: Block before the first one, or a ``root_hash``. If it is a block that the worker
                does not hold, the chain stays hidden until it does.
            tier: Where the copies are.
        """
        held = self._workers.get(worker) or self._join(worker)
        masks, bit = self._masks, held.bit
        for block in hashes:
            if held.add(block, parent, tier):
                self._num_blocks += 1
                if masks.get(parent, 0) & bit or is_root(parent):
                    if held.has_children(block):
                        self._reveal(held, block)
                    else:
                        masks[block] = masks.get(block, 0) | bit
            parent = block
        if self._num_blocks > self.max_blocks:
            self._evict()

    def remove(self, worker: str, hashes: Iterable[BlockHash], tier: Tier = "gpu") -> None:
        """Count one copy less of each block; where there is none, nothing happens."""
        held = self._workers.get(worker)
        if held is None:
            return
        for block in hashes:
            if held.drop_copy(block, tier):
                self._drop(held, block)

    def clear(self, worker: str) -> None:
        """Forget everything about a worker. O(its blocks); other workers' entries are not read."""
        held = self._workers.pop(worker, None)
        if held is None:
            return
        del self._by_bit[held.bit]
        for block in held.parents:
            self._unsee(held, block)
        self._num_blocks -= len(held.parents)

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, Hit]:
        """Return the leading hit of each worker that has one.

        O(different hit lengths x log(len(hashes))) look-ups, plus one per hit block for workers
        that hold blocks outside GPU memory only.

        Args:
            hashes: A prompt's chain from its first block; pass the ``usable_blocks`` only.
        """
        masks = self._masks
        hits: dict[str, Hit] = {}
        first = masks.get(hashes[0], 0) if hashes else 0
        # (low, its mask, high, its mask): whoever sees low but not high ends in between.
        spans = [(0, first, len(hashes), 0)] if first else []
        while spans:
            low, low_mask, high, high_mask = spans.pop()
            if high - low == 1:
                self._add_hits(hits, low_mask & ~high_mask, hashes, high)
                continue
            middle = (low + high) >> 1
            mask = masks.get(hashes[middle], 0)
            if mask != low_mask:
                spans.append((low, low_mask, middle, mask))
            if mask != high_mask:
                spans.append((middle, mask, high, high_mask))
        return hits

    def shorten(self, worker: str, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Believe an observation: the worker holds only the first ``num_blocks`` of this chain.

        One observation shortens a chain and never deletes it, so the first block always stays:
        a single answer may have been served without the cache for reasons of its own.
        """
        held = self._workers.get(worker)
        if held is None:
            return
        for block in reversed(hashes[max(num_blocks, 1) :]):
            if block in held.parents:
                self._drop(held, block)

    def blocks_by_tier(self, worker: str) -> dict[Tier, int]:
        """Return how many different blocks each tier of a worker has, visible or not."""
        held = self._workers.get(worker)
        return dict(held.tiers) if held else dict.fromkeys(TIERS, 0)

    def held_blocks(self, worker: str, tier: Tier = "gpu") -> int:
        """Return how many different blocks one tier of a worker has, visible or not."""
        held = self._workers.get(worker)
        return held.tiers[tier] if held else 0

    def holds(self, worker: str, block: BlockHash, tier: Tier | None = None) -> bool:
        """Say whether a worker has a copy of a block in a tier, or in any, visible or not."""
        held = self._workers.get(worker)
        if held is None:
            return False
        return held.count(block, tier) > 0 if tier else block in held.parents

    def parent(self, worker: str, block: BlockHash) -> BlockHash | None:
        """Return the parent of a block that the worker holds."""
        held = self._workers.get(worker)
        return held.parents.get(block) if held else None

    def _join(self, worker: str) -> Holdings:
        bit = 1
        while bit in self._by_bit:  # the lowest free bit keeps the masks short
            bit <<= 1
        held = self._workers[worker] = self._by_bit[bit] = Holdings(worker, bit)
        return held

    def _reveal(self, held: Holdings, block: BlockHash) -> None:
        """Make a held block and its held descendants visible."""
        pending = [block]
        while pending:
            block = pending.pop()
            mask = self._masks.get(block, 0)
            if not mask & held.bit:
                self._masks[block] = mask | held.bit
                pending.extend(held.children(block))

    def _drop(self, held: Holdings, block: BlockHash) -> None:
        """Take a held block away and hide its descendants."""
        pending = [block]
        while pending:
            hidden = pending.pop()
            if self._unsee(held, hidden) and held.has_children(hidden):
                pending.extend(held.children(hidden))
        held.drop(block)
        self._num_blocks -= 1

    def _unsee(self, held: Holdings, block: BlockHash) -> bool:
        mask = self._masks.get(block, 0)
        if not mask & held.bit:
            return False
        if mask == held.bit:
            del self._masks[block]
        else:
            self._masks[block] = mask ^ held.bit
        return True

    def _add_hits(
        self, hits: dict[str, Hit], mask: int, hashes: Sequence[BlockHash], num_blocks: int
    ) -> None:
        gpu_only = Hit(gpu=num_blocks * self.block_size)
        while mask:
            bit = mask & -mask
            mask ^= bit
            held = self._by_bit[bit]
            hits[held.worker] = (
                self._split_by_tier(held, hashes[:num_blocks]) if held.num_below else gpu_only
            )

    def _split_by_tier(self, held: Holdings, hashes: Sequence[BlockHash]) -> Hit:
        tokens: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        for block in hashes:
            tokens[held.best_tier(block)] += self.block_size
        return Hit(**tokens)

    def _evict(self) -> None:
        while self._num_blocks > self.max_blocks:
            fullest = max(self._workers.values(), key=lambda held: len(held.parents))
            surplus = self._num_blocks - self.max_blocks
            for _ in range(min(surplus, _EVICT_BATCH_BLOCKS, len(fullest.parents))):
                self._drop(fullest, next(iter(fullest.leaves)))
