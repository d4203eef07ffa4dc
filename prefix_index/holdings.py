"""The blocks of one worker: parents, children, copies per tier, and which are leaves.

Pure bookkeeping of ``index.Index``; nobody else uses it. It knows nothing of visibility, which is
a bit in the index's masks. Kept small per block: a block with one copy in GPU memory costs two dict
entries (parent, and itself as its parent's child) that share the same bytes objects.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Literal

from prefix_index.blocks import is_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prefix_index.blocks import BlockHash

Tier = Literal["gpu", "cpu", "disk", "remote"]
TIERS: Final[tuple[Tier, ...]] = ("gpu", "cpu", "disk", "remote")

# Copies of a block are packed into one int, 16 bits a tier in the order of TIERS.
_TIER_BITS: Final = 16
# A count that would pass this stays here: re-announced hits must not run into the next tier.
_MAX_COPIES: Final = (1 << _TIER_BITS) - 1
_ONE_GPU_COPY: Final = 1
SHIFT: Final[dict[Tier, int]] = {tier: i * _TIER_BITS for i, tier in enumerate(TIERS)}


class Holdings:
    """What one worker holds. All methods are O(1) unless they say otherwise."""

    __slots__ = ("_children", "_copies", "bit", "leaves", "num_below", "parents", "tiers", "worker")

    def __init__(self, worker: str, bit: int) -> None:
        self.worker = worker
        self.bit = bit
        # block -> parent; being a key here is what "held" means.
        self.parents: dict[BlockHash, BlockHash] = {}
        # Held blocks without held children, least recently stored first.
        self.leaves: OrderedDict[BlockHash, None] = OrderedDict()
        # Blocks with at least one copy in each tier.
        self.tiers: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        # Blocks without a copy in GPU memory; 0 makes splitting a hit by tier free.
        self.num_below = 0
        # parent -> its only held child, or all of them; the parent itself need not be held.
        self._children: dict[BlockHash, BlockHash | set[BlockHash]] = {}
        # Packed copies, only where they are not exactly one in GPU memory.
        self._copies: dict[BlockHash, int] = {}

    def children(self, block: BlockHash) -> Iterator[BlockHash]:
        """Iterate over the held children of a block."""
        child = self._children.get(block)
        if child is None:
            return iter(())
        return iter((child,)) if isinstance(child, bytes) else iter(child)

    def has_children(self, block: BlockHash) -> bool:
        """Say whether the worker holds children of a block."""
        return block in self._children

    def copies(self, block: BlockHash) -> int:
        """Return the packed copies of a block, 0 if it is not held."""
        if block not in self.parents:
            return 0
        return self._copies.get(block, _ONE_GPU_COPY)

    def best_tier(self, block: BlockHash) -> Tier:
        """Return the fastest tier that has a copy of this held block."""
        copies = self._copies.get(block, _ONE_GPU_COPY)
        return next(tier for tier in TIERS if copies >> SHIFT[tier] & _MAX_COPIES)

    def count(self, block: BlockHash, tier: Tier) -> int:
        """Return how many copies of a block the tier has."""
        return self.copies(block) >> SHIFT[tier] & _MAX_COPIES

    def add(self, block: BlockHash, parent: BlockHash, tier: Tier) -> bool:
        """Count one more copy and say whether the block is new on this worker."""
        if block in self.parents:
            before = self._copies.get(block, _ONE_GPU_COPY)
            if before >> SHIFT[tier] & _MAX_COPIES < _MAX_COPIES:
                self._set_copies(block, before, before + (1 << SHIFT[tier]))
            if block in self.leaves:
                self.leaves.move_to_end(block)
            return False
        self.parents[block] = parent
        if tier == "gpu":  # the common case, and nothing to store
            self.tiers["gpu"] += 1
        else:
            self._set_copies(block, 0, 1 << SHIFT[tier])
        if not is_root(parent):
            self._link(block, parent)
        if block not in self._children:
            self.leaves[block] = None
        return True

    def drop_copy(self, block: BlockHash, tier: Tier) -> bool:
        """Count one copy less, if there is one, and say whether that was the last of all tiers."""
        if block not in self.parents:
            return False
        before = self._copies.get(block, _ONE_GPU_COPY)
        if not before >> SHIFT[tier] & _MAX_COPIES:
            return False
        after = before - (1 << SHIFT[tier])
        if after:
            self._set_copies(block, before, after)
            return False
        return True

    def drop(self, block: BlockHash) -> None:
        """Forget a held block with all its copies; its children stay, without their parent."""
        parent = self.parents.pop(block)
        if block in self._copies:
            self._set_copies(block, self._copies[block], 0)
        else:
            self.tiers["gpu"] -= 1
        self.leaves.pop(block, None)
        if not is_root(parent):
            self._unlink(block, parent)

    def _set_copies(self, block: BlockHash, before: int, after: int) -> None:
        for tier in TIERS:
            had = before >> SHIFT[tier] & _MAX_COPIES
            has = after >> SHIFT[tier] & _MAX_COPIES
            self.tiers[tier] += (has > 0) - (had > 0)
        self.num_below += _is_below(after) - _is_below(before)
        if after in (0, _ONE_GPU_COPY):
            self._copies.pop(block, None)
        else:
            self._copies[block] = after

    def _link(self, block: BlockHash, parent: BlockHash) -> None:
        child = self._children.get(parent)
        if child is None:
            self._children[parent] = block
            self.leaves.pop(parent, None)
        elif isinstance(child, bytes):
            self._children[parent] = {child, block}
        else:
            child.add(block)

    def _unlink(self, block: BlockHash, parent: BlockHash) -> None:
        child = self._children[parent]
        if not isinstance(child, bytes):
            child.discard(block)
            if child:
                return
        del self._children[parent]
        if parent in self.parents:
            # It is older than the leaf that left, hence the next in line.
            self.leaves[parent] = None
            self.leaves.move_to_end(parent, last=False)


def _is_below(copies: int) -> bool:
    return copies != 0 and not copies & _MAX_COPIES
