"""What a worker that tells nothing still holds: an LRU model of its capacity, fed by our routing.

The model writes into the same index as events do; observed hit tokens correct it there
(``Index.shorten``), and the next request that is routed to the worker fills it up again.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash
    from prefix_index.index import Index

# The queue of leaves is rebuilt when it holds this many entries per held block: stale ones are left
# in it by every touch.
_MAX_STALE_RATIO = 4


class Residency:
    """Predicted blocks of one worker, at most ``capacity_blocks``, least recently used leave.

    Blocks leave leaf first, as in an engine. So only the last use of a chain's *end* matters: a
    block that becomes a leaf is as recent as the most recent of its own ends, and touching a known
    chain costs O(log blocks) instead of one step per block.
    """

    def __init__(self, index: Index, worker: str, capacity_blocks: int) -> None:
        if capacity_blocks <= 0:
            raise ValueError(f"capacity_blocks must be positive, not {capacity_blocks}")
        self._index = index
        self._worker = worker
        self._capacity_blocks = capacity_blocks
        self._clock = 0
        # Held block -> (last use as a chain's end or inherited from a child that left, depth).
        self._used: dict[BlockHash, tuple[int, int]] = {}
        self._parents: dict[BlockHash, BlockHash] = {}
        self._num_children: dict[BlockHash, int] = {}
        # (last use, -depth, block) of everything that is or was a leaf; stale entries are skipped.
        self._leaves: list[tuple[int, int, BlockHash]] = []

    def touch(self, hashes: Sequence[BlockHash], parent: BlockHash) -> None:
        """Note that the worker computes or reuses this chain.

        Args:
            hashes: Full blocks of a prompt (and of its answer, if known) from the first one on.
            parent: Root of the chain.
        """
        hashes = hashes[: self._capacity_blocks]
        if not hashes:
            return
        self._clock += 1
        # The index may have lost an end to feedback or to its own bound, never a middle.
        if not self._is_held(hashes[-1]):  # else it is a prompt asked again, the common case
            end = len(hashes) - 1
            held = bisect_left(hashes, 1, hi=end, key=lambda block: not self._is_held(block))
            if held:
                parent = hashes[held - 1]
                # Its end is used now, so making room below cannot take this chain.
                self._use(parent, held)
            new = hashes[held:]
            self._make_room(sum(block not in self._used for block in new))
            self._store(new, parent, held)
        self._use(hashes[-1], len(hashes))

    def clear(self) -> None:
        """Forget everything: the worker restarted."""
        for table in (self._used, self._parents, self._num_children, self._leaves):
            table.clear()
        self._index.clear(self._worker)

    def _is_held(self, block: BlockHash) -> bool:
        return block in self._used and self._index.holds(self._worker, block, "gpu")

    def _use(self, block: BlockHash, depth: int) -> None:
        self._used[block] = self._clock, depth
        if not self._num_children.get(block):
            heappush(self._leaves, (self._clock, -depth, block))
        if len(self._leaves) > _MAX_STALE_RATIO * len(self._used):
            self._leaves = [entry for entry in set(self._leaves) if self._is_leaf(entry)]
            heapify(self._leaves)

    def _is_leaf(self, entry: tuple[int, int, BlockHash]) -> bool:
        used_at, depth, block = entry
        return self._used.get(block) == (used_at, -depth) and not self._num_children.get(block)

    def _store(self, new: Sequence[BlockHash], parent: BlockHash, depth: int) -> None:
        above = parent
        for block in new:
            depth += 1
            if block not in self._used:
                self._used[block] = self._clock, depth
                self._parents[block] = above
                self._num_children[above] = self._num_children.get(above, 0) + 1
            above = block
        # One copy each, whatever the index lost meanwhile: behind the first block it lacks there
        # are only blocks it lacks, or others' ends that it hid.
        if not any(self._index.holds(self._worker, block, "gpu") for block in new):
            self._index.store(self._worker, new, parent)
            return
        for block in new:
            if not self._index.holds(self._worker, block, "gpu"):
                self._index.store(self._worker, (block,), parent)
            parent = block

    def _make_room(self, num_new: int) -> None:
        """Let the least recently used ends go until the new blocks fit."""
        surplus = len(self._used) + num_new - self._capacity_blocks
        gone = []
        while surplus > 0 and self._leaves:
            entry = heappop(self._leaves)
            if not self._is_leaf(entry):
                continue
            gone.append(entry[2])
            self._forget_leaf(entry)
            surplus -= 1
        self._index.remove(self._worker, gone)

    def _forget_leaf(self, entry: tuple[int, int, BlockHash]) -> None:
        used_at, depth, block = entry
        del self._used[block]
        self._num_children.pop(block, None)
        parent = self._parents.pop(block)
        left = self._num_children[parent] = self._num_children[parent] - 1
        if left:
            return
        del self._num_children[parent]
        if parent in self._used:  # else it is the root
            own, _ = self._used[parent]
            self._used[parent] = max(own, used_at), -depth - 1
            heappush(self._leaves, (max(own, used_at), depth + 1, parent))
