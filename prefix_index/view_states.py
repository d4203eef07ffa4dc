"""Who holds a block, as one small number: equal answers are kept once.

Millions of blocks share few thousand combinations of holders and copies. Each combination is a
state with an id; a block costs four bytes for it, whatever tiers and copies there are.
"""

from __future__ import annotations

from typing import TypeAlias

from prefix_index.holdings import ONE_GPU_COPY
from prefix_index.view_blocks import EMPTY, ROOT

# (worker's bit, packed copies) of holders that do not have exactly one copy in GPU memory.
_Exceptions: TypeAlias = tuple[tuple[int, int], ...]


class States:
    """The states, counted by the blocks that have them; one without blocks is forgotten.

    ``EMPTY`` (nobody) and ``ROOT`` (holds nothing, visible to everybody) are always there.

    Attributes:
        visible: State -> bits of the workers that see the block.
        held: State -> bits of those that hold it, visible or not.
    """

    def __init__(self) -> None:
        self.visible: list[int] = []
        self.held: list[int] = []
        self._exceptions: list[_Exceptions] = []
        self._num_blocks: list[int] = []
        self._ids: dict[tuple[int, int, _Exceptions], int] = {}
        self._free: list[int] = []
        for state, visible in ((EMPTY, 0), (ROOT, -1)):
            assert self._id(visible, 0, ()) == state

    def __len__(self) -> int:
        return len(self._ids)

    def copies(self, state: int, bit: int) -> int:
        """Return a worker's packed copies, 0 if it does not hold the block."""
        if not self.held[state] & bit:
            return 0
        for other, copies in self._exceptions[state]:
            if other == bit:
                return copies
        return ONE_GPU_COPY

    def put(self, state: int, bit: int, copies: int, *, visible: bool) -> int:
        """Return the state in which a worker has these copies (0: none); to be entered."""
        if state == ROOT:
            return ROOT
        exceptions = self._exceptions[state]
        if exceptions:
            exceptions = tuple(pair for pair in exceptions if pair[0] != bit)
        if copies not in (0, ONE_GPU_COPY):
            # In the order of bits, so that equal states are equal tuples.
            exceptions = tuple(sorted((*exceptions, (bit, copies))))
        seen, held = self.visible[state] & ~bit, self.held[state] & ~bit
        return self._id(seen | bit if visible else seen, held | bit if copies else held, exceptions)

    def without(self, state: int, bits: int) -> int:
        """Return the state without several workers; to be entered."""
        exceptions = tuple(pair for pair in self._exceptions[state] if not pair[0] & bits)
        return self._id(self.visible[state] & ~bits, self.held[state] & ~bits, exceptions)

    def move(self, before: int, after: int) -> None:
        """Note that a block went from one state to another."""
        self.enter(after, 1)
        self.leave(before, 1)

    def move_all(self, moves: dict[int, list[int]]) -> int:
        """Note moves, ``before -> [after, number of blocks]``, and return how many blocks moved.

        To be called once they are all made: only now states without blocks are forgotten.
        """
        for after, num_blocks in moves.values():
            self.enter(after, num_blocks)
        for before, (_, num_blocks) in moves.items():
            self.leave(before, num_blocks)
        return sum(num_blocks for _, num_blocks in moves.values())

    def enter(self, state: int, num_blocks: int) -> None:
        """Note that blocks came into a state."""
        self._num_blocks[state] += num_blocks

    def leave(self, state: int, num_blocks: int) -> None:
        """Note that blocks left a state; without any it is forgotten and its id given away."""
        if state <= ROOT:
            return
        self._num_blocks[state] -= num_blocks
        if not self._num_blocks[state]:
            del self._ids[self.visible[state], self.held[state], self._exceptions[state]]
            self._free.append(state)

    def _id(self, visible: int, held: int, exceptions: _Exceptions) -> int:
        key = visible, held, exceptions
        state = self._ids.get(key)
        if state is not None:
            return state
        if self._free:
            state = self._free.pop()
            self.visible[state], self.held[state], self._exceptions[state] = key
        else:
            state = len(self.visible)
            self.visible.append(visible)
            self.held.append(held)
            self._exceptions.append(exceptions)
            self._num_blocks.append(0)
        self._ids[key] = state
        return state
