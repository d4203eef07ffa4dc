"""One tier as the engine thread sees it: its books, its store, its queues and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from runner.tiers.health import Health
from runner.tiers.types import TierStats

if TYPE_CHECKING:
    from runner.kvkeys import KvKey
    from runner.leases import LeaseBook
    from runner.tiers.announce import Announcer
    from runner.tiers.books import Entry, TierBooks
    from runner.tiers.lookups import RemoteIndex
    from runner.tiers.transfers import Lane
    from runner.tiers.types import BlockRecord, BlockStore, Direction, Outcome, Place, TierName


@dataclass(slots=True)
class Counters:
    """What only grows; names as in ``TierStats``."""

    moved_bytes: dict[Direction, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    moved_blocks: dict[Direction, int] = field(default_factory=lambda: {"read": 0, "write": 0})
    hit_tokens: int = 0
    dropped: int = 0
    store_failed: int = 0
    damaged: int = 0
    load_failed: int = 0
    gated: int = 0


@dataclass(slots=True)
class Tier:
    """A source of blocks; engine thread only, apart from what its lanes' threads do in ``store``.

    Attributes:
        name: Which.
        reader: Queue of loads.
        announcer: Tells others what the tier comes to hold and gives up.
        store: Its bytes; None for peers, which are asked by address.
        books: What it holds; None where others hold it for us.
        index: What is known of a tier that others write too; None elsewhere.
        leases: Pins on its slots; None without books.
        writer: Queue of stores; None where nothing is written.
        counters: See there.
        reading: Whether reads work.
        writing: Whether writes work.
        max_storing_bytes: Bound of ``storing_bytes``.
        storing_bytes: Of blocks on their way here, staged or still in the pool.
    """

    name: TierName
    reader: Lane
    announcer: Announcer
    store: BlockStore | None = None
    books: TierBooks | None = None
    index: RemoteIndex | None = None
    leases: LeaseBook | None = None
    writer: Lane | None = None
    max_storing_bytes: int = 0
    counters: Counters = field(default_factory=Counters)
    storing_bytes: int = 0
    reading: Health = field(init=False)
    writing: Health = field(init=False)

    def __post_init__(self) -> None:
        """Make the parts that are named after the tier."""
        self.reading = Health(f"reading from tier {self.name}")
        self.writing = Health(f"writing to tier {self.name}")

    @property
    def lanes(self) -> list[Lane]:
        """All its queues."""
        return [self.reader] if self.writer is None else [self.reader, self.writer]

    @property
    def capacity_blocks(self) -> int:
        """Blocks that fit once all slots are made; 0 where others hold the blocks for us."""
        if self.books is None:
            return 0
        is_growing = getattr(self.store, "is_growing", False)
        num_slots: int = getattr(self.store, "num_slots", 0) if is_growing else 0
        return max(self.books.num_slots, num_slots)

    @property
    def fullness(self) -> float:
        """Share of the room in use (0..1); 0 where others see to the room."""
        if self.books is None:
            return 0.0
        return self.books.num_used / max(1, self.capacity_blocks)

    def holds(self, key: KvKey, tokens: bytes, now_s: float) -> bool:
        """Whether a block can be loaded from here, as far as is known."""
        if self.books is not None:
            return self.books.find(key, tokens) is not None
        return self.index is not None and self.index.holds(key, now_s) is True

    def reserve(self, record: BlockRecord, touches: int) -> Entry | None:
        """Return a slot for a block, evicting if there will be none otherwise; None if full."""
        if self.books is None:
            return None
        # A store may make its slots while it is in use; until it is done none need to be given up.
        self.books.grow(getattr(self.store, "ready_slots", 0))
        may_evict = not getattr(self.store, "is_growing", False)
        return self.books.reserve(record, touches, may_evict=may_evict)

    def lose(self, place: Place, outcome: Outcome, now_s: float) -> None:
        """Forget a block that could not be read, so that nobody tries it again."""
        if outcome == "damaged":
            self.counters.damaged += 1
        key = place.record.key
        if self.index is not None:
            # A store that is away has lost nothing.
            if outcome != "failed":
                self.index.lose(key, now_s)
            return
        entry = None if self.books is None else self.books.find(key, place.record.tokens)
        if entry is not None and entry.slot == place.slot:
            self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """Forget a held block, and say so."""
        if self.books is not None:
            self.books.drop(entry)
        if entry.is_announced:
            self.announcer.removed(self.name, entry.record.key)

    def moved(self, direction: Direction, num_blocks: int, num_bytes: int) -> None:
        """Count a transfer."""
        self.counters.moved_blocks[direction] += num_blocks
        self.counters.moved_bytes[direction] += num_bytes

    def is_write_paused(self, now_s: float) -> bool:
        """Whether nothing is to be stored for now."""
        return self.writing.is_paused(now_s) or getattr(self.store, "is_paused", False)

    def stats(self, block_bytes: int, now_s: float) -> TierStats:
        """Return the figures of this moment."""
        books, counters = self.books, self.counters
        queue: dict[Direction, int] = {"read": self.reader.queued_bytes}
        oldest: dict[Direction, float] = {"read": self.reader.oldest_s(now_s)}
        if self.writer is not None:
            # What waits is in the writer's queue or on its way there.
            queue["write"] = self.storing_bytes
            oldest["write"] = self.writer.oldest_s(now_s)
        return TierStats(
            tier=self.name,
            capacity_bytes=None if books is None else self.capacity_blocks * block_bytes,
            used_bytes=None if books is None else len(books) * block_bytes,
            num_blocks=None if books is None else len(books),
            queue_bytes=queue,
            oldest_s=oldest,
            moved_bytes_total=dict(counters.moved_bytes),
            moved_blocks_total=dict(counters.moved_blocks),
            hit_tokens_total=counters.hit_tokens,
            evictions_total=0 if books is None else books.evictions_total,
            dropped_total=counters.dropped,
            store_failed_total=counters.store_failed,
            damaged_total=counters.damaged,
            load_failed_total=counters.load_failed,
            gated_total=counters.gated,
            orphans_total=0 if self.leases is None else self.leases.orphans_total,
            is_paused=self.is_write_paused(now_s),
        )
