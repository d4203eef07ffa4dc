"""Events whose parent block is not known yet, waiting for it by its engine hash.

After a gap or a late start, blocks arrive before what they continue. They are no roots and must not
be guessed; they wait, bounded, and what happens to them meanwhile waits with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prefix_index.events import BlockRemoved, BlockStored, EngineHash, Event


class _Orphan:
    __slots__ = ("event", "later")

    def __init__(self, event: BlockStored) -> None:
        self.event = event
        self.later: list[Event] = []


class Orphans:
    """Waiting events, the oldest given up when they have more than ``max_blocks`` blocks."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._len = 0
        self._by_parent: dict[EngineHash, list[_Orphan]] = {}
        self._by_block: dict[EngineHash, _Orphan] = {}

    def __len__(self) -> int:
        return self._len

    def clear(self) -> None:
        """Give up all of them."""
        self._by_parent.clear()
        self._by_block.clear()
        self._num_blocks = self._len = 0

    def add(self, event: BlockStored) -> int:
        """Let an event wait for its parent and return how many others were given up for it."""
        parent = event.parent_block_hash
        assert parent is not None  # the caller looked it up in vain
        orphan = _Orphan(event)
        self._by_parent.setdefault(parent, []).append(orphan)
        self._by_block.update(dict.fromkeys(event.block_hashes, orphan))
        self._num_blocks += len(event.block_hashes)
        self._len += 1
        before = self._len
        while self._num_blocks > self._max_blocks and self._by_parent:
            self._pop(next(iter(self._by_parent)))
        return before - self._len

    def take(self, blocks: Iterable[EngineHash]) -> list[Event]:
        """Return, in order, the events that wait for these blocks and what happened to them."""
        if not self._by_parent:
            return []
        events: list[Event] = []
        for block in blocks:
            for orphan in self._pop(block):
                events.append(orphan.event)
                events.extend(orphan.later)
        return events

    def defer(self, block: EngineHash, event: BlockStored | BlockRemoved) -> bool:
        """Apply an event to a waiting block later; False if the block does not wait."""
        orphan = self._by_block.get(block)
        if orphan is None:
            return False
        orphan.later.append(msgspec.structs.replace(event, block_hashes=[block]))
        return True

    def _pop(self, parent: EngineHash) -> list[_Orphan]:
        orphans = self._by_parent.pop(parent, [])
        for orphan in orphans:
            self._len -= 1
            self._num_blocks -= len(orphan.event.block_hashes)
            for block in orphan.event.block_hashes:
                if self._by_block.get(block) is orphan:
                    del self._by_block[block]
        return orphans
