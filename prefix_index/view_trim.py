"""Which blocks go when the view is full: a clock hand over the slots, the oldest of a window first.

Slots are filled in order of arrival and freed ones are filled again behind the hand, so the hand
meets old blocks before young ones; blocks that were stored again meanwhile carry a younger stamp
and are passed over. A view that fits into one window is trimmed in exact order of age. No queue, no
entry per leaf.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prefix_index.view_blocks import Blocks
    from prefix_index.view_states import States

# Slots read in one go: about 0.2 ms.
_WINDOW_SLOTS: Final = 2048
# Children looked at to find one that the same worker holds. Beyond it the block stays: a hub.
MAX_CHILDREN: Final = 4096
# Stamps are compared around this.
_STAMPS: Final = 1 << 32


class Hand:
    """Finds leaves of workers in about the order in which they were stored."""

    def __init__(self, blocks: Blocks, states: States) -> None:
        self._blocks = blocks
        self._states = states
        self._at = 1
        # (stamp, slot) of leaves found, the oldest last.
        self._found: list[tuple[int, int]] = []

    def next_leaf(self, bits: int, now: int) -> int:
        """Return the slot of an old leaf of any of these workers.

        Args:
            bits: The workers.
            now: Stamp of this moment.

        Returns:
            A slot; 0 if the window just read had none, which says nothing of the next one.
        """
        blocks, held = self._blocks, self._states.held
        for is_read in (False, True):
            while self._found:
                stamp, slot = self._found.pop()
                holders = held[blocks.state[slot]] & bits
                if holders and blocks.stamp[slot] == stamp and self.is_leaf(slot, holders):
                    return slot
            if not is_read:
                self._read_window(bits, now)
        return 0

    def is_leaf(self, slot: int, bits: int) -> bool:
        """Say whether one of these workers has no child of the block."""
        blocks = self._blocks
        if not blocks.child[slot]:
            return True
        while bits:
            bit = bits & -bits
            bits ^= bit
            if not blocks.has_child(slot, self._states.held, bit, MAX_CHILDREN):
                return True
        return False

    def expose(self, slot: int, stamp: int) -> None:
        """Note that a leaf with this stamp left its parent, which is next unless it is younger."""
        age_more = (stamp - self._blocks.stamp[slot]) % _STAMPS
        if age_more < _STAMPS >> 1:
            self._found.append((self._blocks.stamp[slot], slot))

    def _read_window(self, bits: int, now: int) -> None:
        blocks, held = self._blocks, self._states.held
        stamps, state, joined = blocks.stamp, blocks.state, blocks.joined
        start = self._at if self._at < blocks.num_slots else 1
        self._at = end = min(start + _WINDOW_SLOTS, blocks.num_slots)
        window = state[start:end]
        theirs = {each for each in set(window) if held[each] & bits}
        found = []
        for slot in compress(range(start, end), map(theirs.__contains__, window)):
            # By far most have a child with the same holders in the next slot.
            if joined[slot + 1] and state[slot + 1] == state[slot]:
                continue
            if self.is_leaf(slot, held[state[slot]] & bits):
                found.append(((now - stamps[slot]) % _STAMPS, slot))
        found.sort()
        # Only the older half, or the hand would take young blocks for want of old ones near by.
        self._found = [(stamps[slot], slot) for _, slot in found[len(found) // 2 :]]
