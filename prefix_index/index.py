"""Block hash -> holders (worker, tier): who holds which prefix.

Invariant: a block is *visible* on a worker only while its parent is a root or visible there too.
Removing a parent hides its descendants until it returns. So the workers that see block i of a chain
are a subset of those that see block i - 1, and ``match`` may bisect instead of walking.

A block costs one slot in flat arrays (``view_blocks``) and the number of a state that says who
holds it (``view_states``), whatever the number of holders, tiers and copies; nothing is kept per
(worker, block). Layouts tried: docs/adr/0005-one-view-in-flat-arrays.md.

Used from one thread (the event loop). Worker names are opaque; a data-parallel rank is a worker.
"""

from __future__ import annotations

from itertools import count as counter
from typing import TYPE_CHECKING, Final

from prefix_index.holdings import MAX_COPIES, TIERS, Tier, count
from prefix_index.view import Holder, View
from prefix_index.view_blocks import HASH_BYTES
from prefix_index.view_hits import Hit, split_hits
from prefix_index.view_trim import Hand

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prefix_index.blocks import BlockHash

__all__ = ["TIERS", "Hit", "Index", "Tier"]

# Leaves evicted before it is found again who has more than its share.
_TRIM_LOT_BLOCKS: Final = 64
# Windows that one store may read without finding a leaf, under 2 ms in all.
_TRIM_WINDOWS: Final = 8
# Slots that a sweep may read per block that it may change: reading costs about a twentieth.
_SLOTS_READ_PER_BLOCK: Final = 16
# Slots that ``entries`` reads in one go.
_PAGE_SLOTS: Final = 4096
# Stamps are unsigned 32 bit; ages are taken around it.
_STAMP_MASK: Final = 0xFFFFFFFF
# No two indexes ever have the same version: an answer of one is never taken for the other's.
_versions: Final = counter()


class Index:
    """The blocks that a pool's workers hold, in process.

    Args:
        block_size: Tokens per block, equal for all workers of one index.
        max_blocks: Bound on (worker, block) entries. Beyond it the workers with more than an equal
            share lose their least recently stored leaf blocks, never a parent before its children.
            The order of age is exact in small indexes and approximate in large ones.

    Attributes:
        version: Another number whenever ``match`` may answer otherwise.
        losses: Another number whenever a worker may see less than before.
    """

    def __init__(self, block_size: int, max_blocks: int = 5_000_000) -> None:
        if block_size <= 0:
            raise ValueError(f"block_size must be positive, not {block_size}")
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.version = self.losses = next(_versions)
        self._num_blocks = 0
        self._stamp = 0
        self._view = View()
        self._hand = Hand(self._view.blocks, self._view.states)
        self._workers: dict[str, Holder] = {}
        self._by_bit: dict[int, Holder] = {}
        # Bits of the workers there are; of cleared ones that blocks still carry; of those of them
        # that the present sweep takes off, and the slot it has come to.
        self._live = 0
        self._retired = 0
        self._sweeping = 0
        self._swept_slots = 0

    @property
    def num_blocks(self) -> int:
        """(worker, block) entries held, visible or not."""
        return self._num_blocks

    def store(
        self, worker: str, hashes: Iterable[BlockHash], parent: BlockHash, tier: Tier = "gpu"
    ) -> None:
        """Count one more copy of each block of a chain.

        Args:
            worker: Holder; made known by its first block.
            hashes: Chain in prompt order.
            parent: Block before the first one, or a ``root_hash``. If it is a block that the worker
                does not hold, the chain stays hidden until it does.
            tier: Where the copies are.
        """
        hashes = hashes if isinstance(hashes, list) else list(hashes)
        if not hashes:
            return
        self.version = next(_versions)
        holder = self._workers.get(worker) or self._join(worker)
        before = holder.num_blocks
        self._stamp = self._stamp + 1 & _STAMP_MASK
        self._view.add(holder, hashes, parent, tier, self._stamp)
        self._num_blocks += holder.num_blocks - before
        self._tidy(len(hashes))

    def remove(self, worker: str, hashes: Iterable[BlockHash], tier: Tier = "gpu") -> None:
        """Count one copy less of each block; where there is none, nothing happens."""
        holder = self._workers.get(worker)
        if holder is None:
            return
        self.version = self.losses = next(_versions)
        before = holder.num_blocks
        self._view.take(holder, hashes, tier)
        self._num_blocks += holder.num_blocks - before

    def set_copies(self, worker: str, block: BlockHash, parent: BlockHash, copies: int) -> None:
        """Give a worker exactly these copies of a block, as a replica is told. Idempotent.

        Args:
            worker: Holder; made known by its first block.
            block: The block.
            parent: Block before it, or a root. A known block keeps the parent it has.
            copies: Packed as ``copies`` returns them; 0 removes the block.

        Raises:
            ValueError: If the hashes are not 16 bytes each or the copies do not fit four tiers.
        """
        if len(block) != HASH_BYTES or len(parent) != HASH_BYTES or not 0 <= copies <= MAX_COPIES:
            raise ValueError(
                f"expected two hashes of {HASH_BYTES} bytes and copies in 64 bits, not "
                f"{len(block)} and {len(parent)} bytes and {copies}"
            )
        self.version = next(_versions)
        holder = self._workers.get(worker)
        if not copies:
            if holder is not None:
                self._set(holder, self._view.blocks.find(block), 0)
            return
        holder = holder or self._join(worker)
        self._stamp = self._stamp + 1 & _STAMP_MASK
        before = holder.num_blocks
        self._view.put(holder, block, parent, copies, self._stamp)
        self._num_blocks += holder.num_blocks - before
        self._tidy(1)

    def clear(self, worker: str) -> None:
        """Forget everything about a worker. O(1): its bit is void at once and swept up later."""
        holder = self._workers.pop(worker, None)
        if holder is None:
            return
        self.version = self.losses = next(_versions)
        del self._by_bit[holder.bit]
        self._live ^= holder.bit
        if holder.num_blocks:
            self._retired |= holder.bit
        self._num_blocks -= holder.num_blocks

    def sweep(self, max_blocks: int) -> bool:
        """Take a slice of cleared workers' blocks away, for whoever owns the loop.

        500 blocks take about 1 ms. Stores sweep a little as well, so that memory stays bounded
        if nobody calls this.

        Args:
            max_blocks: Blocks to take away at most; 16 times as many may be looked at.

        Returns:
            Whether there is more to do.
        """
        view = self._view
        if not self._sweeping:
            self._sweeping, self._swept_slots = self._retired, 0
        if not self._sweeping:
            return False
        end = self._swept_slots + max_blocks * _SLOTS_READ_PER_BLOCK
        self._swept_slots = view.strip(self._sweeping, self._swept_slots, end, max_blocks)
        if self._swept_slots >= view.blocks.num_slots:
            self._retired ^= self._sweeping
            self._sweeping = 0
        return self._retired != 0

    def match(self, hashes: Sequence[BlockHash], probes: Iterable[int] = ()) -> dict[str, Hit]:
        """Return the leading hit of each worker that has one.

        Two look-ups for a prompt that its holders hold to its end, else
        O(different hit lengths x log(len(hashes))); for workers that hold blocks outside
        GPU memory also one step per run of blocks that were stored together, up to 128 runs; the
        tiers of what lies before them are sampled.

        Args:
            hashes: A prompt's chain from its first block; pass the ``usable_blocks`` only.
            probes: Hit lengths in blocks that are likely, in ascending order: each that is right
                saves a bisection.
        """
        if not hashes:
            return {}
        blocks, live = self._view.blocks, self._live
        states, visible = blocks.state, self._view.states.visible
        first = visible[states[blocks.find(hashes[0])]] & live
        if not first:
            return {}
        lengths: dict[Holder, int] = {}
        num_blocks = len(hashes)
        # Most prompts were asked before, so that whoever sees their beginning sees all of them.
        last = visible[states[blocks.find(hashes[-1])]] & live
        if last:
            self._add_lengths(lengths, last, num_blocks)
        # (low, its mask, high, its mask): whoever sees low but not high ends in between.
        spans = []
        if first != last:
            low, low_mask = 0, first
            for length in probes:
                for at in (length - 1, length):
                    if low < at < num_blocks - 1:
                        mask = visible[states[blocks.find(hashes[at])]] & live
                        if mask != low_mask:
                            spans.append((low, low_mask, at, mask))
                        low, low_mask = at, mask
            if low_mask != last:
                spans.append((low, low_mask, num_blocks - 1, last))
        while spans:
            low, low_mask, high, high_mask = spans.pop()
            if high - low == 1:
                self._add_lengths(lengths, low_mask & ~high_mask, high)
                continue
            middle = low + high >> 1
            mask = visible[states[blocks.find(hashes[middle])]] & live
            if mask != low_mask:
                spans.append((low, low_mask, middle, mask))
            if mask != high_mask:
                spans.append((middle, mask, high, high_mask))
        return self._hits(hashes, lengths)

    def shorten(self, worker: str, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Believe an observation: the worker holds only the first ``num_blocks`` of this chain.

        One observation shortens a chain and never deletes it, so the first block always stays:
        a single answer may have been served without the cache for reasons of its own.
        """
        holder = self._workers.get(worker)
        if holder is None:
            return
        self.version = next(_versions)
        for block in reversed(hashes[max(num_blocks, 1) :]):
            self._set(holder, self._view.blocks.find(block), 0)

    def blocks_by_tier(self, worker: str) -> dict[Tier, int]:
        """Return how many different blocks each tier of a worker has, visible or not."""
        holder = self._workers.get(worker)
        return dict(holder.tiers) if holder else dict.fromkeys(TIERS, 0)

    def held_blocks(self, worker: str, tier: Tier = "gpu") -> int:
        """Return how many different blocks one tier of a worker has, visible or not."""
        holder = self._workers.get(worker)
        return holder.tiers[tier] if holder else 0

    def copies(self, worker: str, block: BlockHash) -> int:
        """Return a worker's copies of a block, 16 bits a tier in the order of ``TIERS``.

        0 if it does not hold the block.
        """
        holder = self._workers.get(worker)
        return self._view.copies(holder, self._view.blocks.find(block)) if holder else 0

    def holds(self, worker: str, block: BlockHash, tier: Tier | None = None) -> bool:
        """Say whether a worker has a copy of a block in a tier, or in any, visible or not."""
        copies = self.copies(worker, block)
        return (count(copies, tier) if tier else copies) > 0

    def sees(self, worker: str, block: BlockHash) -> bool:
        """Say whether a worker has a copy of a block and of all blocks before it."""
        holder = self._workers.get(worker)
        return holder is not None and self._view.is_visible(holder, self._view.blocks.find(block))

    def parent(self, worker: str, block: BlockHash) -> BlockHash | None:
        """Return the parent of a block that the worker holds."""
        holder = self._workers.get(worker)
        blocks = self._view.blocks
        slot = blocks.find(block)
        if holder is None or not self._view.copies(holder, slot):
            return None
        return blocks.key(blocks.parent[slot])

    def entries(self, worker: str) -> Iterator[tuple[BlockHash, BlockHash, int]]:
        """Iterate over (block, parent, packed copies) of every held block, in no order.

        The index may change meanwhile: what is held throughout is given exactly once. One step may
        read the whole view; use ``page`` where the loop must not wait for that.
        """
        cursor = 0
        while True:
            found, cursor = self.page(worker, cursor, _PAGE_SLOTS)
            yield from found
            if not cursor:
                return

    def page(
        self, worker: str, cursor: int, max_slots: int
    ) -> tuple[list[tuple[BlockHash, BlockHash, int]], int]:
        """Return a slice of ``entries`` in bounded time.

        Args:
            worker: Holder.
            cursor: 0, or what the call before returned.
            max_slots: Blocks of the whole view to look at, 1,000 take at most 1 ms.

        Returns:
            Entries, perhaps none, and the next cursor; 0 at the end.
        """
        holder = self._workers.get(worker)
        if holder is None:
            return [], 0
        blocks, states, bit = self._view.blocks, self._view.states, holder.bit
        end = cursor + max_slots
        found = [
            (blocks.key(slot), blocks.key(blocks.parent[slot]), states.copies(state, bit))
            for slot, state in enumerate(blocks.state[cursor:end], cursor)
            if states.held[state] & bit
        ]
        return found, end if end < blocks.num_slots else 0

    def _join(self, worker: str) -> Holder:
        bit = 1
        while bit & (self._live | self._retired):  # the lowest free bit keeps the masks short
            bit <<= 1
        holder = self._workers[worker] = self._by_bit[bit] = Holder(worker, bit)
        self._live |= bit
        return holder

    def _set(self, holder: Holder, slot: int, copies: int) -> None:
        self.losses = next(_versions)
        before = holder.num_blocks
        self._view.set(holder, slot, copies)
        self._num_blocks += holder.num_blocks - before

    def _add_lengths(self, lengths: dict[Holder, int], mask: int, num_blocks: int) -> None:
        while mask:
            bit = mask & -mask
            mask ^= bit
            lengths[self._by_bit[bit]] = num_blocks

    def _hits(self, hashes: Sequence[BlockHash], lengths: dict[Holder, int]) -> dict[str, Hit]:
        mixed = {}
        hits: dict[str, Hit] = {}
        hit, hit_blocks = Hit(), 0
        for holder, length in lengths.items():
            if holder.num_below:
                mixed[holder] = length
                continue
            if length != hit_blocks:  # most hold equally much
                hit, hit_blocks = Hit(length * self.block_size), length
            hits[holder.worker] = hit
        return hits | split_hits(self._view, hashes, mixed, self.block_size) if mixed else hits

    def _tidy(self, num_stored: int) -> None:
        """Pay for stored blocks: sweep as many, and evict what is too much, in bounded time."""
        if self._retired:
            self.sweep(num_stored)
        if self._num_blocks > self.max_blocks:
            # Twice, so that what a store left over is gone after the next ones.
            self._trim(2 * num_stored + _TRIM_LOT_BLOCKS)

    def _trim(self, max_blocks: int) -> None:
        windows = _TRIM_WINDOWS
        while windows and max_blocks > 0 and self._num_blocks > self.max_blocks:
            bits = self._largest()
            lot = min(max_blocks, _TRIM_LOT_BLOCKS, self._num_blocks - self.max_blocks)
            max_blocks -= lot
            while windows and lot > 0:
                leaf = self._hand.next_leaf(bits, self._stamp)
                if leaf:
                    lot -= self._evict(leaf, bits)
                else:
                    windows -= 1

    def _largest(self) -> int:
        """Return the bits of the workers with an equal share of all blocks or more."""
        num_workers = len(self._by_bit)
        return sum(
            bit
            for bit, holder in self._by_bit.items()
            if holder.num_blocks * num_workers >= self._num_blocks
        )

    def _evict(self, slot: int, bits: int) -> int:
        """Take a block from those of the workers whose leaf it is and say how many they were."""
        blocks = self._view.blocks
        stamp, parent = blocks.stamp[slot], blocks.parent[slot]
        holders = self._view.states.held[blocks.state[slot]] & bits
        num_gone = 0
        while holders:
            bit = holders & -holders
            holders ^= bit
            if self._hand.is_leaf(slot, bit):
                self._set(self._by_bit[bit], slot, 0)
                num_gone += 1
        self._hand.expose(parent, stamp)
        return num_gone
