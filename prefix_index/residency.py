"""What a worker that tells nothing still holds: an LRU model of its capacity, fed by our routing.

The model writes into the same index as events do; observed hit tokens correct it there
(``Index.shorten``), and the next request that is routed to the worker fills it up again.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from prefix_index.view_blocks import EMPTY, Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash
    from prefix_index.index import Index

# States of the model's slots: held, and held with an entry in the queue of leaves.
_HELD: Final = 2
_QUEUED: Final = 3
_STAMP_BITS: Final = 32
_SLOT_BITS: Final = 32


class Residency:
    """Predicted blocks of one worker, at most ``capacity_blocks``, least recently used leave.

    Blocks leave leaf first, as in an engine. So only the last use of a chain's *end* matters: a
    block that becomes a leaf is as recent as the most recent of its own ends, and touching a known
    chain costs O(log blocks) instead of one step per block. About 50 bytes per block.
    """

    def __init__(self, index: Index, worker: str, capacity_blocks: int) -> None:
        if capacity_blocks <= 0:
            raise ValueError(f"capacity_blocks must be positive, not {capacity_blocks}")
        self._index = index
        self._worker = worker
        self._capacity_blocks = capacity_blocks
        self._forget()

    def touch(self, hashes: Sequence[BlockHash], parent: BlockHash) -> None:
        """Note that the worker computes or reuses this chain.

        Args:
            hashes: Full blocks of a prompt (and of its answer, if known) from the first one on.
            parent: Root of the chain.
        """
        if len(hashes) > self._capacity_blocks:
            hashes = hashes[: self._capacity_blocks]
        if not hashes:
            return
        self._clock += 1
        if self._clock >> _STAMP_BITS:  # after 49 days of 1,000 requests/s; a model is soon rebuilt
            self.clear()
        last = hashes[-1]
        slot = self._held_end(last)
        if slot:
            # A prompt that is asked again, the common case.
            self._blocks.stamp[slot] = self._clock
            self._queue(slot)
            return
        end = len(hashes) - 1
        held = bisect_left(hashes, 1, hi=end, key=lambda block: not self._is_reached(block))
        if held:
            parent = hashes[held - 1]
        new = list(hashes[held:])
        known = held + sum(map(self._is_modelled, new))
        if known:
            # The end of what the model has is used now, so making room cannot take it.
            self._use(hashes[known - 1])
        self._make_room(len(hashes) - known)
        self._store(new, parent)
        self._use(last)

    def clear(self) -> None:
        """Forget everything: the worker restarted."""
        self._forget()
        self._index.clear(self._worker)

    def _forget(self) -> None:
        self._clock = 0
        self._num_blocks = 0
        # Last use as a chain's end, or inherited from a child that left, is the slot's stamp.
        self._blocks = Blocks()
        # Stamp and slot in one int. Each block is queued at most once, with its stamp or an older
        # one: what comes up too early is queued again.
        self._leaves: list[int] = []
        # Slots of ends that were found held, as long as the index loses nothing.
        self._ends: dict[BlockHash, int] = {}
        self._losses = -1

    def _held_end(self, block: BlockHash) -> int:
        """Return the slot of a chain's end if the model and the index have all of it, else 0."""
        if self._index.losses != self._losses:
            self._losses = self._index.losses
            self._ends.clear()
        slot = self._ends.get(block, 0)
        if not slot and self._is_reached(block):
            slot = self._ends[block] = self._blocks.find(block)
        return slot

    def _is_modelled(self, block: BlockHash) -> bool:
        return self._blocks.state[self._blocks.find(block)] >= _HELD

    def _is_reached(self, block: BlockHash) -> bool:
        """Say whether the model and the index have a block and all before it.

        The index may have lost blocks to feedback or to its own bound, also in the middle: those
        of a prompt that this one goes on from.
        """
        return self._is_modelled(block) and self._index.sees(self._worker, block)

    def _use(self, block: BlockHash) -> None:
        slot = self._blocks.find(block)
        self._blocks.stamp[slot] = self._clock
        self._queue(slot)

    def _queue(self, slot: int) -> None:
        blocks = self._blocks
        if blocks.state[slot] == _HELD and not blocks.child[slot]:
            blocks.state[slot] = _QUEUED
            heappush(self._leaves, blocks.stamp[slot] << _SLOT_BITS | slot)

    def _store(self, new: list[BlockHash], parent: BlockHash) -> None:
        blocks, index, worker = self._blocks, self._index, self._worker
        slots, _ = blocks.chain(new, parent, self._clock)
        for slot in slots:
            if blocks.state[slot] == EMPTY:
                blocks.state[slot] = _HELD
                self._num_blocks += 1
        # One copy each, whatever the index lost meanwhile: behind the first block it lacks it may
        # still have some, which nobody sees.
        if not any(index.holds(worker, block, "gpu") for block in new):
            index.store(worker, new, parent)
            return
        for block in new:
            if not index.holds(worker, block, "gpu"):
                index.store(worker, [block], parent)
            parent = block

    def _make_room(self, num_new: int) -> None:
        """Let the least recently used ends go until the new blocks fit."""
        blocks = self._blocks
        surplus = self._num_blocks + num_new - self._capacity_blocks
        gone = []
        while surplus > 0 and self._leaves:
            entry = heappop(self._leaves)
            slot = entry & ((1 << _SLOT_BITS) - 1)
            blocks.state[slot] = _HELD
            if blocks.child[slot] or blocks.stamp[slot] != entry >> _SLOT_BITS:
                self._queue(slot)  # no leaf any more, or used since
                continue
            gone.append(blocks.key(slot))
            self._drop(slot)
            surplus -= 1
        if gone:
            self._index.remove(self._worker, gone)

    def _drop(self, slot: int) -> None:
        blocks = self._blocks
        parent, stamp = blocks.parent[slot], blocks.stamp[slot]
        blocks.release(slot)
        self._num_blocks -= 1
        # Roots and their like have states below.
        if blocks.state[parent] >= _HELD:
            blocks.stamp[parent] = max(blocks.stamp[parent], stamp)
            self._queue(parent)
