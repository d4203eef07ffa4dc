"""What a worker that tells nothing still holds: an LRU model of its capacity, fed by our routing.

The model writes into the same index as events do; observed hit tokens correct it there
(``Index.shorten``), and the next request that is routed to the worker fills it up again.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash
    from prefix_index.index import Index


class Residency:
    """Predicted blocks of one worker, at most ``capacity_blocks``, least recently used leave.

    A block is never younger than its parent, so blocks leave leaf first, as in an engine.
    """

    def __init__(self, index: Index, worker: str, capacity_blocks: int) -> None:
        if capacity_blocks <= 0:
            raise ValueError(f"capacity_blocks must be positive, not {capacity_blocks}")
        self._index = index
        self._worker = worker
        self._capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def touch(self, hashes: Sequence[BlockHash], parent: BlockHash) -> None:
        """Note that the worker computes or reuses this chain.

        Args:
            hashes: Full blocks of a prompt (and of its answer, if known) from the first one on.
            parent: Root of the chain.
        """
        hashes = hashes[: self._capacity_blocks]
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        # Before the new ones are stored: an engine, too, needs the room first.
        surplus = len(self._blocks) - self._capacity_blocks
        if surplus > 0:
            oldest = list(islice(self._blocks, surplus))
            for block in oldest:
                del self._blocks[block]
            self._index.remove(self._worker, oldest)
        for block in hashes:
            # One copy each, whatever the index lost to feedback or to its own bound.
            if not self._index.holds(self._worker, block, "gpu"):
                self._index.store(self._worker, (block,), parent)
            parent = block

    def clear(self) -> None:
        """Forget everything: the worker restarted."""
        self._blocks.clear()
        self._index.clear(self._worker)
