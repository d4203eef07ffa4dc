"""What one tier of slots holds: keys, slots, pins, and who leaves first when it is full.

Bookkeeping only, no bytes; the engine thread's alone. A slot is in exactly one state: free, being
written, held (its block can be found), or leaving (dropped, yet somebody still reads it). The
parts add up to the slots after every call; ``check`` verifies it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runner.kvkeys import KvKey
    from runner.tiers.gdsf import EvictionOrder
    from runner.tiers.types import BlockRecord, Place


class Entry:
    """A block's place on the tier.

    Attributes:
        record: Which block.
        slot: Where.
        is_held: Its bytes are there and it can be found; False while being written and once it
            has been dropped.
        is_announced: An event said that it is here.
    """

    __slots__ = ("is_announced", "is_held", "record", "slot")

    def __init__(self, record: BlockRecord, slot: int) -> None:
        self.record = record
        self.slot = slot
        self.is_held = False
        self.is_announced = False


class TierBooks:
    """The books of one tier.

    Args:
        num_slots: Usable from the start; ``grow`` adds more.
        order: Says who leaves first; used by these books alone.
        on_evicted: Hears of each block given up for room, before its slot is used again.

    Attributes:
        num_slots: Slots usable now.
        evictions_total: Blocks given up for room.
        unwritten: Slots that were freed though their store may hold something that must not be
            found again; whoever reads this list tells the store and clears it.
    """

    def __init__(
        self, num_slots: int, order: EvictionOrder, on_evicted: Callable[[Entry], None]
    ) -> None:
        self.num_slots = num_slots
        self.evictions_total = 0
        self.unwritten: list[int] = []
        self._order = order
        self._on_evicted = on_evicted
        self._entries: dict[KvKey, Entry] = {}
        # Lowest first: blocks stored one after the other lie side by side and move in one piece.
        self._free = list(range(num_slots))
        self._pins: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._num_writing = 0

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._entries) - self._num_writing

    def __iter__(self) -> Iterator[Entry]:
        """Blocks that can be found."""
        return (entry for entry in self._entries.values() if entry.is_held)

    @property
    def num_pinned(self) -> int:
        """Slots pinned by anyone."""
        return len(self._pins)

    @property
    def num_writing(self) -> int:
        """Blocks whose bytes are on their way."""
        return self._num_writing

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    def grow(self, num_slots: int) -> None:
        """Make more slots usable."""
        for slot in range(self.num_slots, num_slots):
            heapq.heappush(self._free, slot)
        self.num_slots = max(self.num_slots, num_slots)

    def knows(self, key: KvKey) -> bool:
        """Whether the block is held or on its way."""
        return key in self._entries

    def get(self, key: KvKey) -> Entry | None:
        """Return where a block of this key is held."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.is_held else None

    def find(self, key: KvKey, tokens: bytes) -> Entry | None:
        """Return where a block is held; equal keys with other tokens are a miss."""
        entry = self.get(key)
        return entry if entry is not None and entry.record.tokens == tokens else None

    def touch(self, key: KvKey) -> None:
        """Note that a request asked for a block."""
        self._order.touch(key)

    def adopt(self, places: Sequence[Place]) -> list[Entry]:
        """Take over what a store held before these books were opened; the other slots are free."""
        for place in places:
            record = place.record
            entry = Entry(record, place.slot)
            entry.is_held = True
            self._entries[record.key] = entry
            self._order.add(record.key, record.parent, record.depth)
        taken = {place.slot for place in places}
        self._free = [slot for slot in range(self.num_slots) if slot not in taken]
        return list(self._entries.values())

    def reserve(
        self, record: BlockRecord, touches: int = 1, *, may_evict: bool = True
    ) -> Entry | None:
        """Return a slot for a block that is not known here; None if there is no room.

        Args:
            record: Which block.
            touches: How often requests have asked for it.
            may_evict: Give up another block if no slot is free: a leaf, by the order.
        """
        # Its parent must not leave to make room for it, hence first into the order.
        self._order.add(record.key, record.parent, record.depth, touches=touches)
        if not self._free and not (may_evict and self._evict_one(record.key)):
            self._order.remove(record.key)
            return None
        entry = Entry(record, heapq.heappop(self._free))
        self._entries[record.key] = entry
        self._num_writing += 1
        return entry

    def commit(self, entry: Entry) -> None:
        """Make a reserved block findable: its bytes are in its slot."""
        if self._entries.get(entry.record.key) is not entry or entry.is_held:
            raise ValueError(f"slot {entry.slot} is not being written")
        entry.is_held = True
        self._num_writing -= 1

    def drop(self, entry: Entry) -> None:
        """Forget a block, held or not; its slot is free once nobody reads it.

        Only whoever writes a reserved block may drop it.
        """
        if self._entries.get(entry.record.key) is not entry:
            return
        del self._entries[entry.record.key]
        self._order.remove(entry.record.key)
        if not entry.is_held:
            self._num_writing -= 1
        entry.is_held = False
        self.unwritten.append(entry.slot)
        self._free_slot(entry.slot)

    def pin(self, slot: int) -> None:
        """Keep a slot's bytes as they are."""
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """Undo one ``pin``."""
        left = self._pins.pop(slot) - 1
        if left:
            self._pins[slot] = left
        elif slot in self._leaving:
            self._leaving.remove(slot)
            heapq.heappush(self._free, slot)

    def _evict_one(self, arriving: KvKey) -> bool:
        def is_pinned(key: KvKey) -> bool:
            entry = self._entries.get(key)
            return key == arriving or entry is None or not entry.is_held or entry.slot in self._pins

        key = self._order.pop_victim(is_pinned)
        if key is None:
            return False
        entry = self._entries.pop(key)
        entry.is_held = False
        self.evictions_total += 1
        self._on_evicted(entry)
        heapq.heappush(self._free, entry.slot)
        return True

    def _free_slot(self, slot: int) -> None:
        if slot in self._pins:
            self._leaving.add(slot)
        else:
            heapq.heappush(self._free, slot)

    def check(self) -> None:
        """Verify that every slot is in one state.

        Raises:
            AssertionError: If one is in none or in two.
        """
        used = [entry.slot for entry in self._entries.values()]
        slots = sorted([*used, *self._free, *self._leaving])
        if slots != list(range(self.num_slots)):
            raise AssertionError("slots are lost, or in two states")
        writing = sum(not entry.is_held for entry in self._entries.values())
        if writing != self._num_writing:
            raise AssertionError("the count of blocks being written is off")
        if not set(self._pins) <= set(used) | self._leaving:
            raise AssertionError("a free slot is pinned")
