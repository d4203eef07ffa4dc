"""Who holds which block, and who sees it: what the index does to one worker and one block or chain.

Works on slots (``view_blocks``) and states (``view_states``) and keeps the invariant that a block
is visible on a worker only while its parent is a root or visible there. Knows nothing of bounds,
retired workers and names; that is ``index.Index``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_index.holdings import ONE_GPU_COPY, TIERS, Tier, count, is_below, minus_one, plus_one
from prefix_index.view_blocks import EMPTY, Blocks
from prefix_index.view_states import States

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prefix_index.blocks import BlockHash


class Holder:
    """One worker's bit and totals.

    Attributes:
        tiers: Blocks with at least one copy in each tier.
        num_hidden: Held blocks that the worker does not see; 0 makes storing cheap.
        num_below: Blocks without a copy in GPU memory; 0 makes splitting a hit by tier free.
    """

    __slots__ = ("bit", "num_below", "num_blocks", "num_hidden", "tiers", "worker")

    def __init__(self, worker: str, bit: int) -> None:
        self.worker = worker
        self.bit = bit
        self.num_blocks = 0
        self.num_hidden = 0
        self.num_below = 0
        self.tiers: dict[Tier, int] = dict.fromkeys(TIERS, 0)

    def recount(self, before: int, after: int, num_blocks: int) -> None:
        """Note that blocks went from these packed copies to those."""
        if before | after == ONE_GPU_COPY and before != after:  # by far the most
            change = num_blocks if after else -num_blocks
            self.tiers["gpu"] += change
            self.num_blocks += change
            return
        for tier in TIERS:
            change = (count(after, tier) > 0) - (count(before, tier) > 0)
            self.tiers[tier] += change * num_blocks
        self.num_blocks += ((after > 0) - (before > 0)) * num_blocks
        self.num_below += (is_below(after) - is_below(before)) * num_blocks


class _Move:
    """What one copy more or less does to all blocks that are in one state."""

    __slots__ = ("after", "before", "copies_after", "copies_before", "num_blocks", "seen")

    def __init__(
        self, states: States, bit: int, before: int, copies_before: int, copies: int, *, seen: bool
    ) -> None:
        self.before = before
        self.copies_before = copies_before
        self.copies_after = copies
        # Held blocks are as visible as they were, new ones as their parent.
        self.seen = bool(states.visible[before] & bit) if copies_before else seen
        self.after = states.put(before, bit, copies, visible=self.seen and copies > 0)
        self.num_blocks = 0


class View:
    """Slots and their states."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.states = States()

    def copies(self, holder: Holder, slot: int) -> int:
        """Return the packed copies that a worker has of a block, 0 if it does not hold it."""
        return self.states.copies(self.blocks.state[slot], holder.bit)

    def is_visible(self, holder: Holder, slot: int) -> bool:
        """Say whether a worker sees a block; of a root it always does."""
        return bool(self.states.visible[self.blocks.state[slot]] & holder.bit)

    def add(
        self, holder: Holder, hashes: Sequence[BlockHash], parent: BlockHash, tier: Tier, stamp: int
    ) -> None:
        """Count one more copy of each block of a chain, at least one block."""
        slots, is_chain = self.blocks.chain(hashes, parent, stamp)
        if is_chain and not holder.num_hidden:
            above = self.blocks.parent[slots[0]]
            self._add_chain(holder, slots, tier, seen=self.is_visible(holder, above))
            return
        for slot in slots:
            self.set(holder, slot, plus_one(self.copies(holder, slot), tier))
        if not is_chain:
            self.blocks.drop_unused(self.blocks.find(parent))

    def put(
        self, holder: Holder, block: BlockHash, parent: BlockHash, copies: int, stamp: int
    ) -> None:
        """Give a worker exactly these copies of a block, at least one."""
        slot, is_below = self.blocks.place(block, parent, stamp)
        self.set(holder, slot, copies)
        if not is_below:
            self.blocks.drop_unused(self.blocks.find(parent))

    def take(self, holder: Holder, hashes: Iterable[BlockHash], tier: Tier) -> None:
        """Count one copy less of each block that has one."""
        blocks, states, bit = self.blocks, self.states, holder.bit
        find, slot_states, child = blocks.find, blocks.state, blocks.child
        moves: dict[int, _Move] = {}
        for block in hashes:
            slot = find(block)
            before = slot_states[slot]
            move = moves.get(before)
            copies = move.copies_before if move else states.copies(before, bit)
            after = move.copies_after if move else minus_one(copies, tier)
            if after == copies:
                continue
            if child[slot] and not after:
                self._settle(holder, moves)
                self.set(holder, slot, 0)
                continue
            if move is None:
                move = moves[before] = _Move(states, bit, before, copies, after, seen=False)
            slot_states[slot] = move.after
            move.num_blocks += 1
            if move.after == EMPTY:
                blocks.release(slot)
        self._settle(holder, moves)

    def set(self, holder: Holder, slot: int, copies: int) -> None:
        """Give a worker exactly these copies of a block, and a block that nobody holds up."""
        blocks, states, bit = self.blocks, self.states, holder.bit
        before = blocks.state[slot]
        copies_before = states.copies(before, bit)
        if copies_before:
            visible = bool(states.visible[before] & bit)
        else:
            visible = self.is_visible(holder, blocks.parent[slot])
        after = states.put(before, bit, copies, visible=visible and copies > 0)
        if after == before:
            return
        states.move(before, after)
        blocks.state[slot] = after
        holder.recount(copies_before, copies, 1)
        if copies_before and copies:
            return
        if not visible:
            holder.num_hidden += 1 if copies else -1
        elif copies:
            if holder.num_hidden:
                self._show_below(holder, slot)
        else:
            self._hide_below(holder, slot)
        if after == EMPTY:
            blocks.release(slot)

    def strip(self, bits: int, start: int, end: int, max_blocks: int) -> int:
        """Take blocks from workers that are gone altogether, so that nothing of theirs is seen.

        Args:
            bits: The workers.
            start: First slot to look at.
            end: One behind the last.
            max_blocks: Blocks to change at most.

        Returns:
            The first slot not looked at.
        """
        states, held, slot_states = self.states, self.states.held, self.blocks.state
        moves: dict[int, list[int]] = {}
        for slot, before in enumerate(slot_states[start:end], start):
            if not held[before] & bits:
                continue
            if not max_blocks:
                end = slot
                break
            max_blocks -= 1
            move = moves.get(before)
            if move is None:
                move = moves[before] = [states.without(before, bits), 0]
            slot_states[slot] = after = move[0]
            move[1] += 1
            if after == EMPTY:
                self.blocks.release(slot)
        states.move_all(moves)
        return end

    def _add_chain(self, holder: Holder, slots: list[int], tier: Tier, *, seen: bool) -> None:
        """Add a copy to each block of a chain, of which the worker has no hidden block."""
        states, slot_states, bit = self.states, self.blocks.state, holder.bit
        moves: dict[int, _Move] = {}
        key = -1
        for slot in slots:
            before = slot_states[slot]
            if before << 1 | seen != key:
                key = before << 1 | seen
                if key not in moves:
                    copies = states.copies(before, bit)
                    after = plus_one(copies, tier)
                    moves[key] = _Move(states, bit, before, copies, after, seen=seen)
                move = moves[key]
            slot_states[slot] = move.after
            move.num_blocks += 1
            seen = move.seen
        self._settle(holder, moves)

    def _settle(self, holder: Holder, moves: dict[int, _Move]) -> None:
        """Count what was moved. Not before the end of a walk: no state in use may be forgotten."""
        for move in moves.values():
            self.states.enter(move.after, move.num_blocks)
        for move in moves.values():
            self.states.leave(move.before, move.num_blocks)
            if move.after == move.before:
                continue
            holder.recount(move.copies_before, move.copies_after, move.num_blocks)
            if not move.seen and not (move.copies_before and move.copies_after):
                holder.num_hidden += move.num_blocks if move.copies_after else -move.num_blocks
        moves.clear()

    def _show_below(self, holder: Holder, slot: int) -> None:
        """Make the held descendants of a block visible."""
        held, visible, bit = self.states.held, self.states.visible, holder.bit
        slot_states = self.blocks.state
        moves: dict[int, list[int]] = {}
        pending = [slot]
        while pending:
            for child in self.blocks.children(pending.pop()):
                state = slot_states[child]
                if held[state] & bit and not visible[state] & bit:
                    self._turn(moves, bit, child, visible=True)
                    pending.append(child)
        holder.num_hidden -= self.states.move_all(moves)

    def _hide_below(self, holder: Holder, slot: int) -> None:
        """Make the descendants of a block invisible."""
        visible, bit, slot_states = self.states.visible, holder.bit, self.blocks.state
        moves: dict[int, list[int]] = {}
        pending = [slot]
        while pending:
            for child in self.blocks.children(pending.pop()):
                if visible[slot_states[child]] & bit:
                    self._turn(moves, bit, child, visible=False)
                    pending.append(child)
        holder.num_hidden += self.states.move_all(moves)

    def _turn(self, moves: dict[int, list[int]], bit: int, slot: int, *, visible: bool) -> None:
        states, before = self.states, self.blocks.state[slot]
        move = moves.get(before)
        if move is None:
            copies = states.copies(before, bit)
            move = moves[before] = [states.put(before, bit, copies, visible=visible), 0]
        self.blocks.state[slot] = move[0]
        move[1] += 1
