"""Block hashes -> slots, and the tree they form, in flat arrays: about 50 bytes per block.

A block's hash names its parent, so parent and children are properties of the block, whoever holds
it. Every block has a slot: the same place in parallel arrays, which cost no object per block and
which the garbage collector never walks. Slot 0 is nobody.

A block that nobody holds keeps its slot only as the parent of others (a *ghost*), cut off from its
own parent. Roots have slots as well; they count their children instead of listing them.

Source: W. Litwin, "Linear hashing" (VLDB 1980), so that the table grows by one bucket at a time.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import TYPE_CHECKING, Final

from prefix_index.blocks import is_root

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash

HASH_BYTES: Final = 16
# Shift that turns a slot into the offset of its key.
_KEY_SHIFT: Final = 4
# A third of the time that slices of a bytearray take.
_pack_key: Final = Struct(f"{HASH_BYTES}s").pack_into
_unpack_key: Final = Struct(f"{HASH_BYTES}s").unpack_from
# States of slots that hold no block; ``view_states.States`` has both.
EMPTY: Final = 0
ROOT: Final = 1

_TAG_MASK: Final = 0xFFFFFFFF
# Slots are added in lots of this size: growing nine arrays one by one would cost more than a store.
_LOT_SLOTS: Final = 256
_MIN_BUCKETS: Final = 64


class Blocks:
    """The slots. Used from one thread.

    Attributes:
        parent: Slot -> slot of the parent; 0 for roots, ghosts and free slots.
        child: Slot -> its first child; for a root the number of its children.
        state: Slot -> id of who holds the block. Written by the owner.
        stamp: Slot -> when the block was last stored, in the owner's clock.
        joined: Slot -> 1 where the parent is the slot before; one longer than the others. Chains
            are mostly stored in one go, and such runs are read as slices.
    """

    __slots__ = (
        *("_chain", "_free", "_heads", "_keys", "_next", "_num_used", "_previous"),
        *("_tags", "_wide", "child", "joined", "parent", "stamp", "state"),
    )

    def __init__(self) -> None:
        self._keys = bytearray()
        # Low bits of Python's own keyed hash: nobody can aim at one bucket.
        self._tags: array[int] = array("I")
        # First slot of each bucket; next slot of the same bucket, or next free slot.
        self._heads: array[int] = array("I", bytes(4 * _MIN_BUCKETS))
        self._chain: array[int] = array("I")
        self._wide = 2 * _MIN_BUCKETS - 1
        self._free = 0
        self._num_used = 0
        self.parent: array[int] = array("I")
        self.child: array[int] = array("I")
        # Brothers and sisters.
        self._next: array[int] = array("I")
        self._previous: array[int] = array("I")
        self.state: array[int] = array("I")
        self.stamp: array[int] = array("I")
        self.joined = bytearray(1)
        self._free = self._grow() + 1  # slot 0 is nobody

    def __len__(self) -> int:
        """Return how many slots are in use, roots and ghosts included."""
        return self._num_used

    @property
    def num_slots(self) -> int:
        """Slots in use or free, slot 0 included."""
        return len(self.state)

    def find(self, block: BlockHash) -> int:
        """Return the slot of a block, a ghost or a root; 0 if there is none."""
        tag = hash(block) & _TAG_MASK
        tags, chain = self._tags, self._chain
        heads = self._heads
        bucket = tag & self._wide
        slot = heads[bucket if bucket < len(heads) else bucket & self._wide >> 1]
        while slot:
            if tags[slot] == tag and self._keys.startswith(block, slot << _KEY_SHIFT):
                return slot
            slot = chain[slot]
        return 0

    def key(self, slot: int) -> BlockHash:
        """Return the hash that has this slot."""
        block: bytes = _unpack_key(self._keys, slot << _KEY_SHIFT)[0]
        return block

    def chain(
        self, hashes: Sequence[BlockHash], parent: BlockHash, stamp: int
    ) -> tuple[list[int], bool]:
        """Find or make the slots of a chain; whoever asks must give the new ones a state.

        Args:
            hashes: Chain in prompt order, at least one block.
            parent: Block or root before the first one; becomes a ghost if it is not known.
            stamp: This moment, for all of them.

        Returns:
            The slots, and whether each one's parent is the block before. A block that is known
            under another parent stays there.

        Raises:
            ValueError: If a hash does not have 16 bytes; nothing is changed then.
        """
        lengths = {*map(len, hashes), len(parent)}
        if lengths != {HASH_BYTES}:
            raise ValueError(f"a block hash has {HASH_BYTES} bytes, not {sorted(lengths)}")
        above = self.find(parent) or self._add_parent(parent)
        # The inner loop of ingest: ``find``, ``_add`` and ``_link`` written out.
        tags, chain, heads, stamps = self._tags, self._chain, self._heads, self.stamp
        parents, children, joined, keys = self.parent, self.child, self.joined, self._keys
        is_key, wide, num_heads = keys.startswith, self._wide, len(heads)
        root = above if self.state[above] == ROOT else 0
        free = self._free
        num_new = 0
        slots = []
        is_chain = True
        for block in hashes:
            tag = hash(block) & _TAG_MASK
            bucket = tag & wide
            if bucket >= num_heads:
                bucket &= wide >> 1
            slot = heads[bucket]
            while slot and (tags[slot] != tag or not is_key(block, slot << _KEY_SHIFT)):
                slot = chain[slot]
            if not slot:
                slot = free or self._grow()
                free = chain[slot]
                _pack_key(keys, slot << _KEY_SHIFT, block)
                num_new += 1
                tags[slot] = tag
                chain[slot] = heads[bucket]
                heads[bucket] = slot
                if children[above]:
                    self._link(slot, above)
                else:
                    parents[slot] = above
                    children[above] = 1 if above == root else slot
                    joined[slot] = above == slot - 1
            elif parents[slot] != above:
                if parents[slot] or self.state[slot] != EMPTY:
                    is_chain = False
                else:
                    self._link(slot, above)
            stamps[slot] = stamp
            slots.append(slot)
            above = slot
        self._free = free
        self._num_used += num_new
        self._widen()
        return slots, is_chain

    def place(self, block: BlockHash, parent: BlockHash, stamp: int) -> tuple[int, bool]:
        """Find or make the slot of one block: ``chain`` of hashes that were checked."""
        above = self.find(parent) or self._add_parent(parent)
        slot = self.find(block)
        is_below = True
        if not slot:
            slot = self._add(block)
            self._link(slot, above)
        elif self.parent[slot] != above:
            is_below = not self.parent[slot] and self.state[slot] == EMPTY
            if is_below:
                self._link(slot, above)
        self.stamp[slot] = stamp
        if self._num_used > len(self._heads):
            self._widen()
        return slot, is_below

    def children(self, slot: int) -> list[int]:
        """Return the children of a block or ghost (not of a root), the youngest first."""
        children = []
        child = self.child[slot]
        while child:
            children.append(child)
            child = self._next[child]
        return children

    def has_child(self, slot: int, states: Sequence[int], bit: int, max_children: int) -> bool:
        """Say whether a worker holds a child of a block.

        Args:
            slot: Block.
            states: Who holds, by state: ``States.held``.
            bit: The worker.
            max_children: Children to look at; with more, the answer is yes.
        """
        child = self.child[slot]
        while child:
            if states[self.state[child]] & bit or not max_children:
                return True
            max_children -= 1
            child = self._next[child]
        return False

    def path_states(self, slot: int, num_blocks: int, max_runs: int) -> array[int]:
        """Return the states of a block and of its nearest ancestors, the block's own last.

        O(runs): blocks that were stored together lie together.

        Args:
            slot: The block.
            num_blocks: States wanted; there are fewer if the chain is scattered over more runs.
            max_runs: Runs to read.
        """
        runs: list[array[int]] = []
        while slot and num_blocks > 0 and len(runs) < max_runs:
            start = max(self.joined.rfind(0, 0, slot + 1), slot - num_blocks + 1)
            runs.append(self.state[start : slot + 1])
            num_blocks -= slot + 1 - start
            slot = self.parent[start]
        states: array[int] = array("I")
        for run in reversed(runs):
            states += run
        return states

    def release(self, slot: int) -> None:
        """Give up a slot that nobody holds; it stays as a ghost while it has children."""
        self.state[slot] = EMPTY
        parent = self.parent[slot]
        if parent:
            self._unlink(slot, parent)
        if not self.child[slot]:
            self._drop(slot)
        if parent != slot:
            self.drop_unused(parent)

    def drop_unused(self, slot: int) -> None:
        """Give up a ghost or a root without children. Both have no parent: this ends here."""
        if slot and not self.child[slot] and self.state[slot] <= ROOT:
            self._drop(slot)

    def _add_parent(self, block: BlockHash) -> int:
        slot = self._add(block)
        if is_root(block):
            self.state[slot] = ROOT
        return slot

    def _add(self, block: BlockHash) -> int:
        slot = self._free or self._grow()
        self._free = self._chain[slot]
        _pack_key(self._keys, slot << _KEY_SHIFT, block)
        self._num_used += 1
        tag = self._tags[slot] = hash(block) & _TAG_MASK
        bucket = self._bucket(tag)
        self._chain[slot] = self._heads[bucket]
        self._heads[bucket] = slot
        return slot

    def _drop(self, slot: int) -> None:
        bucket = self._bucket(self._tags[slot])
        chain = self._chain
        at = self._heads[bucket]
        if at == slot:
            self._heads[bucket] = chain[slot]
        else:
            while chain[at] != slot:
                at = chain[at]
            chain[at] = chain[slot]
        self.state[slot] = EMPTY
        chain[slot] = self._free
        self._free = slot
        self._num_used -= 1

    def _link(self, slot: int, parent: int) -> None:
        self.parent[slot] = parent
        self.joined[slot] = parent == slot - 1
        if self.state[parent] == ROOT:
            self.child[parent] += 1
            return
        sibling = self._next[slot] = self.child[parent]
        if sibling:
            self._previous[sibling] = slot
        self.child[parent] = slot

    def _unlink(self, slot: int, parent: int) -> None:
        self.parent[slot] = 0
        self.joined[slot] = 0
        if self.state[parent] == ROOT:
            self.child[parent] -= 1
            return
        following, previous = self._next[slot], self._previous[slot]
        if previous:
            self._next[previous] = following
        else:
            self.child[parent] = following
        if following:
            self._previous[following] = previous
        self._next[slot] = self._previous[slot] = 0

    def _bucket(self, tag: int) -> int:
        bucket = tag & self._wide
        return bucket if bucket < len(self._heads) else bucket & self._wide >> 1

    def _widen(self) -> None:
        """Add a bucket per block there is, and move into each what belongs there."""
        tags, chain, heads = self._tags, self._chain, self._heads
        wide = self._wide
        for new in range(len(heads), self._num_used):
            stay = move = 0
            slot = heads[new & wide >> 1]
            while slot:
                following = chain[slot]
                if tags[slot] & wide == new:
                    chain[slot] = move
                    move = slot
                else:
                    chain[slot] = stay
                    stay = slot
                slot = following
            heads[new & wide >> 1] = stay
            heads.append(move)
            if new == wide:
                wide = 2 * wide + 1
        self._wide = wide

    def _grow(self) -> int:
        """Add free slots and return the first of them."""
        first = len(self.state)
        zeros = bytes(4 * _LOT_SLOTS)
        for numbers in (self._tags, self.parent, self.child, self._next, self._previous):
            numbers.frombytes(zeros)
        for numbers in (self.state, self.stamp):
            numbers.frombytes(zeros)
        self._keys += bytes(HASH_BYTES * _LOT_SLOTS)
        self.joined += bytes(_LOT_SLOTS)
        # The free ones in ascending order, so that a chain gets neighbouring slots.
        self._chain.extend(range(first + 1, first + _LOT_SLOTS))
        self._chain.append(0)
        return first
