"""Events whose parent block is not known yet, waiting for it by its engine hash.

After a gap or a late start, blocks arrive before what they continue. They are no roots and must not
be guessed; they wait, bounded, and what happens to them meanwhile waits with them. They wait
encoded: a tenth of the memory, and exactly known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from prefix_index.event_types import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prefix_index.event_types import EngineHash, Event

# What the look-up tables take for each block, and an orphan itself, measured.
_BYTES_PER_BLOCK: Final = 160

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(BlockStored | BlockRemoved).decode


class _Orphan:
    __slots__ = ("blocks", "events", "num_bytes")

    def __init__(self, event: BlockStored) -> None:
        self.blocks = event.block_hashes
        # The event, and what happened to its blocks since.
        self.events = [_encode(event)]
        self.num_bytes = len(self.events[0]) + _BYTES_PER_BLOCK * (1 + len(self.blocks))


class Orphans:
    """Waiting events, the oldest given up when all of them take more than ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._len = 0
        self._by_parent: dict[EngineHash, list[_Orphan]] = {}
        self._by_block: dict[EngineHash, _Orphan] = {}

    def __len__(self) -> int:
        return self._len

    @property
    def num_bytes(self) -> int:
        """Memory they take."""
        return self._num_bytes

    def clear(self) -> None:
        """Give up all of them."""
        self._by_parent.clear()
        self._by_block.clear()
        self._num_bytes = self._len = 0

    def add(self, event: BlockStored) -> int:
        """Let an event wait for its parent and return how many were given up for it."""
        parent = event.parent_block_hash
        assert parent is not None  # the caller looked it up in vain
        orphan = _Orphan(event)
        self._by_parent.setdefault(parent, []).append(orphan)
        self._by_block.update(dict.fromkeys(orphan.blocks, orphan))
        self._len += 1
        self._num_bytes += orphan.num_bytes
        return self._make_room()

    def take(self, blocks: Iterable[EngineHash]) -> list[Event]:
        """Return, in order, the events that wait for these blocks and what happened to them."""
        if not self._by_parent:
            return []
        return [
            _decode(event)
            for block in blocks
            for orphan in self._pop(block)
            for event in orphan.events
        ]

    def defer(self, block: EngineHash, event: BlockStored | BlockRemoved) -> bool:
        """Apply an event to a waiting block later; False if the block does not wait."""
        orphan = self._by_block.get(block)
        if orphan is None:
            return False
        later = _encode(msgspec.structs.replace(event, block_hashes=[block]))
        orphan.events.append(later)
        orphan.num_bytes += len(later) + _BYTES_PER_BLOCK
        self._num_bytes += len(later) + _BYTES_PER_BLOCK
        self._make_room()
        return True

    def _make_room(self) -> int:
        before = self._len
        while self._num_bytes > self._max_bytes and self._by_parent:
            self._pop(next(iter(self._by_parent)))
        return before - self._len

    def _pop(self, parent: EngineHash) -> list[_Orphan]:
        orphans = self._by_parent.pop(parent, [])
        for orphan in orphans:
            self._len -= 1
            self._num_bytes -= orphan.num_bytes
            for block in orphan.blocks:
                if self._by_block.get(block) is orphan:
                    del self._by_block[block]
        return orphans
