"""Writes blocks down behind the engine's back: what is worth it, where there is room, in batches.

A block leaves the pool once, on the copying thread, and is pinned there only that long; then each
tier's writer takes it from host memory. Whatever has no room is dropped and counted: the engine
never waits for a store.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from runner.tiers.health import Health
from runner.tiers.staging import Outgoing, copy_out
from runner.tiers.transfers import Job
from runner.tiers.types import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.kvkeys import KvKey
    from runner.leases import Lease, LeaseBook
    from runner.tiers.admission import Admission
    from runner.tiers.announce import Announcer
    from runner.tiers.books import Entry
    from runner.tiers.gain import Gain
    from runner.tiers.host import HostStore
    from runner.tiers.past import Past
    from runner.tiers.staging import Staging
    from runner.tiers.tier import Tier
    from runner.tiers.transfers import Lane
    from runner.tiers.types import (
        BlockMover,
        BlockRecord,
        Committed,
        TierName,
        TransferObserver,
    )

# One write: long enough for the medium's full rate, short enough that a store that is stopped or
# fails costs little.
MAX_BATCH_BLOCKS = 64

# One batch moves while the next is waiting: more would only be queued further from the books.
MAX_OPEN_WRITES = 2

# A copy out of the pool takes milliseconds; a pin this old is forgotten or its thread is stuck.
PIN_DEADLINE_S = 30.0


class Storer:
    """Stores of all tiers; engine thread only."""

    def __init__(
        self,
        tiers: dict[TierName, Tier],
        lane: Lane,
        mover: BlockMover,
        leases: LeaseBook,
        announcer: Announcer,
        admission: Admission,
        gain: Gain,
        past: Past,
        *,
        find_block: Callable[[KvKey, bytes], int | None],
        host: HostStore | None,
        staging: Staging | None,
        max_pinned_blocks: int,
        max_waiting_blocks: int,
        is_reading: Callable[[Tier], bool],
        observer: TransferObserver,
        clock: Callable[[], float],
    ) -> None:
        """Use ``build_tiers``; ``tiers`` are those that are written."""
        self._tiers = tiers
        self._lane = lane
        self._mover = mover
        self._leases = leases
        self._announcer = announcer
        self._admission = admission
        self._gain = gain
        self._past = past
        self._host = host
        self._staging = staging
        self._max_pinned_blocks = max_pinned_blocks
        self._max_waiting = max_waiting_blocks
        self._find_block = find_block
        # Offered, and neither pinned nor reserved anywhere: looked up again when their turn comes.
        self._waiting: deque[Committed] = deque()
        self._is_reading = is_reading
        self._observer = observer
        self._clock = clock
        self._copying = Health("copying blocks out of the pool")
        self._num_pinned = 0
        self._num_batches = 0
        self._under_way: dict[Outgoing, None] = {}
        self._outbox: dict[TierName, deque[Outgoing]] = {name: deque() for name in tiers}
        # On their way to the remote tier, which has no books to say so.
        self._sending: set[KvKey] = set()

    @property
    def num_open(self) -> int:
        """Blocks being stored, or waiting for their turn."""
        return len(self._under_way) + len(self._waiting)

    def offer(self, blocks: Sequence[Committed], now_s: float) -> None:
        """Begin to store what is worth it; see ``Tiers.offer``."""
        self._waiting += (block for block in blocks if block.can_store)
        while len(self._waiting) > self._max_waiting:
            self._drop(self._waiting.popleft().record, now_s)
        self.flush(now_s)

    def flush(self, now_s: float) -> None:
        """Begin with what waited for pins, and hand the writers what waits for them."""
        self._begin(now_s)
        for tier in self._tiers.values():
            # Before any write into the slots that are to be forgotten.
            self._invalidate(tier)
            outbox = self._outbox[tier.name]
            # Loads have the medium for themselves as long as what waits has room to wait.
            if 2 * tier.storing_bytes <= tier.max_storing_bytes and self._is_reading(tier):
                continue
            while outbox and tier.writer is not None and tier.writer.num_open < MAX_OPEN_WRITES:
                batch = [outbox.popleft() for _ in range(min(len(outbox), MAX_BATCH_BLOCKS))]
                self._write(tier, tier.writer, batch)

    def void_all(self) -> None:
        """Let nothing that is under way be found when it has arrived."""
        self._waiting.clear()
        for item in self._under_way:
            item.is_void = True

    def _begin(self, now_s: float) -> None:
        """Take up offered blocks, as many as may be pinned at a time."""
        to_copy: list[Outgoing] = []
        while self._waiting and self._num_pinned < self._max_pinned_blocks:
            offered = self._waiting.popleft()
            record = offered.record
            block = self._find_block(record.key, record.tokens)
            if block is None:
                self._drop(record, now_s)
                continue
            item = Outgoing(record, offered.chain, block)
            if not self._admit(item, now_s):
                continue
            self._under_way[item] = None
            if item.is_copied:
                self._send(item)
            else:
                to_copy.append(item)
        for start in range(0, len(to_copy), MAX_BATCH_BLOCKS):
            self._copy(to_copy[start : start + MAX_BATCH_BLOCKS], now_s)

    def _drop(self, record: BlockRecord, now_s: float) -> None:
        """Count a block that has waited in vain, on every tier that lacks it."""
        for tier in self._tiers.values():
            if not self._is_known(tier, record, now_s):
                tier.counters.dropped += 1

    def _admit(self, item: Outgoing, now_s: float) -> bool:
        """Reserve a place on every tier that should have the block; False if none should."""
        for tier in self._tiers.values():
            if not self._is_wanted(tier, item.record, now_s):
                continue
            if self._reserve(tier, item):
                item.num_pending += 1
                tier.storing_bytes += self._mover.block_bytes
            else:
                tier.counters.dropped += 1
        if not item.num_pending or self._find_source(item, now_s):
            return item.num_pending > 0
        for name in list(item.entries):
            self._tiers[name].counters.dropped += 1
            self._end(self._tiers[name], item, is_stored=False)
        return False

    def _is_wanted(self, tier: Tier, record: BlockRecord, now_s: float) -> bool:
        """Whether a tier lacks a block, works, and the block is worth its room there."""
        if self._is_known(tier, record, now_s) or tier.is_write_paused(now_s):
            return False
        touches = self._past.touches(record.key)
        return self._admission.worth_storing(
            tier.name, record, touches, tier.fullness, tier.storing_bytes, now_s
        )

    def _is_known(self, tier: Tier, record: BlockRecord, now_s: float) -> bool:
        """Whether a tier has a block, or soon will."""
        if tier.books is not None:
            return tier.books.knows(record.key)
        return record.key in self._sending or tier.holds(record.key, record.tokens, now_s)

    def _reserve(self, tier: Tier, item: Outgoing) -> bool:
        """Reserve a block's place on a tier; False if there is no room, there or on the way."""
        if tier.storing_bytes + self._mover.block_bytes > tier.max_storing_bytes:
            return False
        entry = None
        if tier.books is not None:
            entry = tier.reserve(item.record, self._past.touches(item.record.key))
            if entry is None:
                return False
        else:
            self._sending.add(item.record.key)
        item.entries[tier.name] = entry
        return True

    def _find_source(self, item: Outgoing, now_s: float) -> bool:
        """Say from where a block's tiers are written; False if there is no memory for it."""
        held = self._host_entry(item)
        if held is not None and self._host is not None:
            item.host_lease = self._lease_host(held, now_s)
            item.source = self._host.view(held.slot)
            item.is_copied = True
            return True
        if self._copying.is_paused(now_s):
            return False
        entry = item.entries.get("cpu")
        if entry is not None and self._host is not None:
            item.source = self._host.target(entry.slot)
        elif self._staging is None or not self._staging.take(item):
            return False
        self._num_pinned += 1
        return True

    def _host_entry(self, item: Outgoing) -> Entry | None:
        """Return where the cpu tier holds a block that other tiers want."""
        cpu = self._tiers.get("cpu")
        if cpu is None or cpu.books is None:
            return None
        return cpu.books.find(item.record.key, item.record.tokens)

    def _lease_host(self, entry: Entry, now_s: float) -> Lease | None:
        leases = self._tiers["cpu"].leases
        if leases is None:
            return None
        return leases.take("store", "store", now_s + PIN_DEADLINE_S, [entry.slot])

    def _copy(self, items: list[Outgoing], now_s: float) -> None:
        """Have blocks copied out of the pool, pinned meanwhile."""
        self._num_batches += 1
        lease = self._leases.take(
            f"store-{self._num_batches}",
            "store",
            now_s + PIN_DEADLINE_S,
            [item.block for item in items],
        )
        self._lane.submit(
            Job(
                len(items) * self._mover.block_bytes,
                partial(copy_out, items, self._mover, self._host),
                partial(self._copied, items, lease),
            )
        )

    def _copied(self, items: list[Outgoing], lease: Lease, job: Job) -> None:
        """Take note that blocks have left the pool; the slow tiers are next."""
        now_s = self._clock()
        # Without the pin the block may have been overwritten while it was copied.
        was_pinned = self._leases.release(lease)
        self._num_pinned -= len(items)
        if job.error is None:
            self._copying.succeeded()
        else:
            self._copying.failed(now_s, job.error)
        cpu = self._tiers.get("cpu")
        num_copied = 0
        for item in items:
            # Forgetting everything meanwhile is no failure.
            has_failed = not (item.is_void or (was_pinned and item.is_copied))
            is_sound = not (item.is_void or has_failed)
            item.is_void = not is_sound
            if cpu is not None and "cpu" in item.entries:
                entry = item.entries["cpu"]
                if is_sound and entry is not None and item.num_pending > 1:
                    item.host_lease = self._lease_host(entry, now_s)
                num_copied += is_sound
                cpu.counters.store_failed += has_failed
                self._end(cpu, item, is_stored=is_sound)
            self._send(item)
        if cpu is not None and num_copied:
            self._count(cpu, num_copied, job)

    def _send(self, item: Outgoing) -> None:
        """Queue a copied block for the writers of its other tiers."""
        for name in list(item.entries):
            self._outbox[name].append(item)

    def _write(self, tier: Tier, writer: Lane, batch: list[Outgoing]) -> None:
        """Have a tier's writer write blocks; those that are void end here."""
        items = []
        for item in batch:
            if item.is_void:
                self._end(tier, item, is_stored=False)
            else:
                items.append(item)
        store = tier.store
        if not items or store is None:
            return
        places = []
        for item in items:
            entry = item.entries[tier.name]
            places.append(Place(item.record, entry.slot if entry else 0))
        payloads = [item.source for item in items]
        results: list[bool] = []

        def run() -> None:
            results.extend(store.write(places, payloads))

        num_bytes = len(items) * self._mover.block_bytes
        writer.submit(Job(num_bytes, run, partial(self._written, tier, items, results)))

    def _written(self, tier: Tier, items: list[Outgoing], results: list[bool], job: Job) -> None:
        """Take note of the end of a write."""
        num_stored = sum(results)
        if num_stored:
            self._count(tier, num_stored, job)
            tier.writing.succeeded()
        elif not getattr(tier.store, "is_paused", False):
            # A store that pauses by itself has said so.
            tier.writing.failed(self._clock(), job.error)
        results += [False] * (len(items) - len(results))
        for item, is_stored in zip(items, results, strict=True):
            tier.counters.store_failed += not is_stored
            self._end(tier, item, is_stored=is_stored and self._is_source_sound(item))

    def _is_source_sound(self, item: Outgoing) -> bool:
        """Whether what a block was written from has stayed as it was."""
        leases = self._tiers["cpu"].leases if "cpu" in self._tiers else None
        return item.host_lease is None or (leases is not None and item.host_lease in leases)

    def _count(self, tier: Tier, num_blocks: int, job: Job) -> None:
        num_bytes = num_blocks * self._mover.block_bytes
        tier.moved("write", num_blocks, num_bytes)
        self._gain.pricing.transfers.observe(tier.name, "write", num_bytes, job.elapsed_s)
        self._observer.transferred(tier.name, "write", job.elapsed_s, num_bytes)

    def _end(self, tier: Tier, item: Outgoing, *, is_stored: bool) -> None:
        """Finish a block's way to one tier; after the last one its source is free."""
        entry = item.entries.pop(tier.name)
        is_stored = is_stored and not item.is_void
        tier.storing_bytes -= self._mover.block_bytes
        if tier.index is not None:
            self._sending.discard(item.record.key)
            if is_stored:
                tier.index.note(item.record.key, True, self._clock())
                tier.index.announce(item.chain, item.record.depth)
        elif tier.books is not None and entry is not None:
            if is_stored:
                tier.books.commit(entry)
                entry.is_announced = True
                self._announcer.stored(tier.name, item.chain, item.record.depth)
            else:
                tier.books.drop(entry)
        item.num_pending -= 1
        if not item.num_pending:
            self._let_go(item)

    def _let_go(self, item: Outgoing) -> None:
        self._under_way.pop(item, None)
        if self._staging is not None:
            self._staging.give_back(item)
        if item.host_lease is not None and (leases := self._tiers["cpu"].leases) is not None:
            leases.release(item.host_lease)
            item.host_lease = None

    def _invalidate(self, tier: Tier) -> None:
        """Have a store forget slots that were freed without a new block in them."""
        if tier.books is None or not tier.books.unwritten:
            return
        slots, tier.books.unwritten = tier.books.unwritten, []
        invalidate = getattr(tier.store, "invalidate", None)
        if tier.name == "disk" and tier.writer is not None and invalidate is not None:
            # Before any write into them: the writer takes its jobs in order.
            tier.writer.submit(Job(0, partial(invalidate, slots), lambda job: None))
