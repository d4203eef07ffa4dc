"""The prefix cache of a modelled engine: paged GPU memory, CPU and disk tiers behind it.

Source: the simulator behind the design's routing tables, its engine model (section 10): LRU over
unreferenced blocks, of one prompt the deepest block goes first; what leaves the GPU is written to
the CPU tier, what leaves the CPU tier to the disk. A restored block stays in its lower tier, as
in engines that offload. One block is 512 tokens there, any size here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from prefix_index.blocks import BlockHash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


LowerTier = Literal["cpu", "disk"]


class Change(NamedTuple):
    """Blocks that a tier got or lost: what an engine would announce.

    Attributes:
        stored: True for stored, False for removed.
        tier: Which tier.
        blocks: In prompt order when stored.
        parent: Block before the first one; empty for a first block, and for removals.
    """

    stored: bool
    tier: Literal["gpu", "cpu", "disk", "remote"]
    blocks: Sequence[BlockHash]
    parent: BlockHash = b""


class Match(NamedTuple):
    """Leading blocks of a prompt that are cached, by the fastest tier of each block."""

    gpu: list[BlockHash]
    cpu: list[BlockHash]
    disk: list[BlockHash]

    @property
    def num_blocks(self) -> int:
        """Cached leading blocks of all tiers."""
        return len(self.gpu) + len(self.cpu) + len(self.disk)


class LowerCache:
    """A tier below the GPU: blocks in the order in which they were last written."""

    def __init__(
        self,
        tier: LowerTier,
        capacity_blocks: int,
        below: LowerCache | None,
        parent_of: Callable[[BlockHash], BlockHash],
        announce: Callable[[Change], None],
    ) -> None:
        self.tier = tier
        self.blocks: OrderedDict[BlockHash, float] = OrderedDict()
        self._capacity_blocks = capacity_blocks
        self._below = below
        self._parent_of = parent_of
        self._announce = announce

    def write(self, block: BlockHash, released_s: float) -> None:
        """Keep a block that fell out of the tier above; pushes the oldest one further down."""
        blocks = self.blocks
        if block not in blocks:
            self._announce(Change(True, self.tier, [block], self._parent_of(block)))
        blocks[block] = released_s
        blocks.move_to_end(block)
        while len(blocks) > self._capacity_blocks:
            oldest, since_s = blocks.popitem(last=False)
            # Stored below first: a block that is nowhere in between would hide its descendants.
            if self._below is not None:
                self._below.write(oldest, since_s)
            self._announce(Change(False, self.tier, [oldest]))


class KvCache:
    """Blocks of one engine. Not thread-safe; knows no clock but what it is told.

    Args:
        gpu_blocks: Blocks of GPU memory, for cached and private ones together.
        cpu_blocks: Blocks of the CPU tier; 0 = there is none.
        disk_blocks: Blocks of the disk tier; needs a CPU tier above it.
        announce: Told of every change of a tier, in order.

    Attributes:
        gpu_blocks: As given.
        num_pinned: Blocks that requests use, cached or private.
    """

    def __init__(
        self,
        gpu_blocks: int,
        cpu_blocks: int,
        disk_blocks: int,
        announce: Callable[[Change], None],
    ) -> None:
        self.gpu_blocks = gpu_blocks
        self.num_pinned = 0
        self._announce = announce
        self._users: dict[BlockHash, int] = {}
        # Unreferenced blocks -> when they were released, the first to go in front.
        self._free: OrderedDict[BlockHash, float] = OrderedDict()
        self._parents: dict[BlockHash, BlockHash] = {}
        parent_of = self._parents.__getitem__
        self._disk = (
            LowerCache("disk", disk_blocks, None, parent_of, announce) if disk_blocks else None
        )
        self._cpu = (
            LowerCache("cpu", cpu_blocks, self._disk, parent_of, announce) if cpu_blocks else None
        )

    @property
    def num_cached(self) -> int:
        """Blocks on the GPU that can be hit."""
        return len(self._users) + len(self._free)

    def has_gpu(self, block: BlockHash) -> bool:
        """Say whether a block is on the GPU."""
        return block in self._users or block in self._free

    def has(self, block: BlockHash) -> bool:
        """Say whether a block is in any tier."""
        if block in self._users or block in self._free:
            return True
        if self._cpu is None:
            return False
        return block in self._cpu.blocks or (self._disk is not None and block in self._disk.blocks)

    def match(self, blocks: Sequence[BlockHash]) -> Match:
        """Return the cached beginning of a prompt."""
        users, free = self._users, self._free
        cpu = self._cpu.blocks if self._cpu is not None else {}
        disk = self._disk.blocks if self._disk is not None else {}
        found = Match([], [], [])
        for block in blocks:
            if block in users or block in free:
                found.gpu.append(block)
            elif block in cpu:
                found.cpu.append(block)
            elif block in disk:
                found.disk.append(block)
            else:
                break
        return found

    def fits(self, hits: Sequence[BlockHash], num_new: int) -> bool:
        """Say whether ``num_new`` blocks can be had once the hits on the GPU are pinned."""
        if self.num_pinned + len(hits) + num_new <= self.gpu_blocks:  # the common case
            return True
        free = self._free
        num_unpinned = sum([block in free for block in hits])
        return self.num_pinned + num_unpinned + num_new <= self.gpu_blocks

    def pin(self, hits: Iterable[BlockHash], num_new: int) -> None:
        """Take hits on the GPU and new private blocks for a request that ``fits``."""
        users, free = self._users, self._free
        for block in hits:
            if block in users:
                users[block] += 1
            else:
                del free[block]
                users[block] = 1
                self.num_pinned += 1
        self.num_pinned += num_new
        surplus = self.num_pinned + len(free) - self.gpu_blocks
        if surplus > 0:
            self._evict(surplus)

    def publish(self, blocks: Sequence[BlockHash], parent: BlockHash) -> list[BlockHash]:
        """Make private blocks findable whose contents are there now; returns those that became so.

        A block that somebody else computed meanwhile stays private, as a second copy.
        """
        users, free = self._users, self._free
        fresh = [block for block in blocks if block not in users and block not in free]
        if not fresh:
            return fresh
        before = parent
        for block in blocks:
            self._parents[block] = before
            before = block
        for block in fresh:
            users[block] = 1
        if len(fresh) == len(blocks):
            self._announce(Change(True, "gpu", fresh, parent))
        else:
            for block in fresh:
                self._announce(Change(True, "gpu", [block], self._parents[block]))
        return fresh

    def release(self, held: Sequence[BlockHash], num_private: int, now_s: float) -> None:
        """Give back a request's blocks; the deepest becomes the first to be evicted."""
        users, free = self._users, self._free
        self.num_pinned -= num_private
        for block in reversed(held):
            count = users[block]
            if count == 1:
                del users[block]
                free[block] = now_s
                self.num_pinned -= 1
            else:
                users[block] = count - 1

    def _evict(self, count: int) -> None:
        free, cpu = self._free, self._cpu
        gone = []
        for _ in range(count):
            block, released_s = free.popitem(last=False)
            gone.append(block)
            if cpu is not None:
                cpu.write(block, released_s)
        self._announce(Change(False, "gpu", gone))
