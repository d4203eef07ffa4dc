"""Blocks on their way from the pool to the tiers, and the thread that copies them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.tiers.types import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.kvkeys import BlockChain
    from runner.leases import Lease
    from runner.tiers.arena import Arena
    from runner.tiers.books import Entry
    from runner.tiers.host import HostStore
    from runner.tiers.types import BlockMover, BlockRecord, TierName


class Outgoing:
    """One block being stored on one tier or several.

    It is copied out of the pool once: into its slot of the cpu tier, from where the other tiers
    are written too, or into a staging slot. The source stays as it is until the last tier is done.

    Attributes:
        record: Which block.
        chain: Its sequence, for the events.
        block: Where in the pool.
        entries: Reserved places by tier; None where a tier is addressed by key.
        source: Memory that the tiers are written from.
        staging_slot: Of ``source``, if it is one.
        host_lease: Pin on ``source`` where it is a held block of the cpu tier.
        num_pending: Tiers that are not done.
        is_copied: The bytes are in ``source``; set by the copying thread.
        is_void: Whatever comes of it must not be found: the books were cleared, or a pin was lost.
    """

    __slots__ = (
        "block",
        "chain",
        "entries",
        "host_lease",
        "is_copied",
        "is_void",
        "num_pending",
        "record",
        "source",
        "staging_slot",
    )

    def __init__(self, record: BlockRecord, chain: BlockChain, block: int) -> None:
        self.record = record
        self.chain = chain
        self.block = block
        self.entries: dict[TierName, Entry | None] = {}
        self.source = memoryview(b"")
        self.staging_slot: int | None = None
        self.host_lease: Lease | None = None
        self.num_pending = 0
        self.is_copied = False
        self.is_void = False


class Staging:
    """Slots of memory for blocks that leave the pool for a slow tier; engine thread only."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free = list(range(arena.num_slots - 1, -1, -1))

    @property
    def num_bytes(self) -> int:
        """Bytes of blocks that fit at a time."""
        return self._arena.num_slots * self._arena.block_bytes

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return self._arena.num_slots - len(self._free)

    def take(self, item: Outgoing) -> bool:
        """Give a block a slot to be copied into; False if none is free."""
        if not self._free:
            return False
        item.staging_slot = self._free.pop()
        item.source = self._arena.view(item.staging_slot)
        return True

    def give_back(self, item: Outgoing) -> None:
        """Take a block's slot back, if it has one; no thread reads it any more."""
        if item.staging_slot is not None:
            self._free.append(item.staging_slot)
            item.staging_slot = None


def copy_out(items: Sequence[Outgoing], mover: BlockMover, host: HostStore | None) -> None:
    """Copy blocks out of the pool into their sources; runs on a transfer thread.

    Stops at the first that is void: then the others of its batch are too, or will not be missed.
    """
    for item in items:
        if item.is_void:
            return
        mover.copy_out(item.block, item.source)
        entry = item.entries.get("cpu")
        if host is not None and entry is not None:
            host.seal(Place(item.record, entry.slot))
        item.is_copied = True
