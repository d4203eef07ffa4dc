"""Puts the tiers of one runner together from its options."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from runner.kvkeys import root_key
from runner.leases import LeaseBook
from runner.tiers.admission import Admission
from runner.tiers.announce import Announcer, announce_recovered
from runner.tiers.arena import allocate_arena, slot_bytes
from runner.tiers.books import TierBooks
from runner.tiers.decision_log import DecisionLog
from runner.tiers.finder import Finder
from runner.tiers.gain import Gain
from runner.tiers.gdsf import EvictionOrder
from runner.tiers.loader import Loader
from runner.tiers.lookups import RemoteIndex
from runner.tiers.manager import Parts, TierManager
from runner.tiers.media import Stores, TiersError, open_stores
from runner.tiers.past import Past
from runner.tiers.pricing import Pricing
from runner.tiers.probes import Probes
from runner.tiers.reuse import ReuseHistory
from runner.tiers.staging import Staging
from runner.tiers.step_model import StepModel
from runner.tiers.storer import MAX_BATCH_BLOCKS, Storer
from runner.tiers.tier import Tier
from runner.tiers.transfer_model import TransferModel
from runner.tiers.transfers import Acks, Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.kvkeys import KvKey
    from runner.pool.blocks import BlockPool
    from runner.tiers.books import Entry
    from runner.tiers.options import TierOptions
    from runner.tiers.remote import RemoteStore
    from runner.tiers.types import BlockMover, BlockStore, Place, TierName, TransferObserver

__all__ = ["TiersError", "build_tiers", "join_tiers"]

# Disk: one thread reaches two thirds of the rate of four, three all of it. Remote: with the writer
# and the look-ups these are the connections that its store keeps. Peers: one answer each.
READER_THREADS: dict[TierName, int] = {"cpu": 1, "disk": 3, "remote": 2, "peer": 4}

# What a slow tier may be behind the engine: some seconds of prefill on a CPU, half a second of a
# disk. At least one full batch in flight and one waiting.
STAGING_BYTES = 128 * 2**20
STAGING_BLOCKS = 2 * MAX_BATCH_BLOCKS

# Pinned blocks cannot be evicted for requests that wait; a quarter is never missed, and what one
# step computes is in use by its requests anyway, up to half of a small pool.
PINNED_SHARE = 4
PINNED_SHARE_OF_STEP = 2


def build_tiers(
    options: TierOptions,
    *,
    pool: BlockPool,
    mover: BlockMover,
    leases: LeaseBook,
    namespace: KvKey,
    facts: Mapping[str, object],
    chunk_tokens: int,
    wake: Callable[[], None],
    observer: TransferObserver,
    clock: Callable[[], float] = time.monotonic,
    is_cuda: bool = False,
) -> TierManager | None:
    """Open the configured tiers and start their threads; None if there are none.

    Args:
        options: Which tiers.
        pool: The device pool.
        mover: Copies its blocks.
        leases: Pins of its blocks; swept by the engine.
        namespace: Of the base model: everything that makes the bytes usable.
        facts: What the namespace is over, for people.
        chunk_tokens: Most tokens of a step.
        wake: Makes the engine poll soon; called from transfer threads.
        observer: Hears of every transfer.
        clock: Monotonic, in seconds.
        is_cuda: Whether the device copies from host memory by itself, which wants it pinned.

    Raises:
        TiersError: If one cannot be had; nothing is left open then.
    """
    if not options.has_any:
        return None
    stores = open_stores(
        options, mover.block_bytes, pool.block_size, namespace, facts, clock, is_cuda=is_cuda
    )
    return join_tiers(
        stores,
        pool=pool,
        mover=mover,
        leases=leases,
        namespace=namespace,
        chunk_tokens=chunk_tokens,
        wake=wake,
        observer=observer,
        clock=clock,
    )


def join_tiers(
    stores: Stores,
    *,
    pool: BlockPool,
    mover: BlockMover,
    leases: LeaseBook,
    namespace: KvKey,
    chunk_tokens: int,
    wake: Callable[[], None],
    observer: TransferObserver,
    clock: Callable[[], float],
    sleep: Callable[[float], None] = time.sleep,
) -> TierManager:
    """Put a manager together over opened stores; arguments as of ``build_tiers``."""
    acks = Acks(wake)
    announcer = Announcer(pool.block_size)
    past = Past()
    pricing = Pricing(
        StepModel(), TransferModel(), pool.block_size, mover.block_bytes, chunk_tokens
    )
    copying = Lane("kv-copy", 1, acks, clock=clock)
    tiers = _Tiers(acks, announcer, past, pricing, clock)
    staging = None
    if stores.disk is not None or stores.remote is not None:
        staging = _staging(mover.block_bytes, stores.allocators)
    if stores.host is not None:
        tiers.add_slotted("cpu", stores.host, stores.host.num_slots, writer=copying)
    if stores.disk is not None:
        tiers.add_slotted("disk", stores.disk, stores.disk.ready_slots)
        tiers.adopt(stores.recovered, root_key(namespace), pool.block_size)
    if stores.remote is not None:
        tiers.add_remote(stores.remote)
    if stores.peers is not None:
        tiers.add_peers()
    for tier in tiers.by_name.values():
        tier.max_storing_bytes = pool.num_blocks * mover.block_bytes
        # The cpu tier needs no memory on the way: blocks are copied straight into their slots.
        if staging is not None and tier.name != "cpu":
            tier.max_storing_bytes = staging.num_bytes
    own: dict[TierName, Tier] = {
        name: tier for name, tier in tiers.by_name.items() if name != "peer"
    }
    gain = Gain(pricing, tuple(own), DecisionLog(observer.gained))
    finder = Finder(list(own.values()), gain)
    admission = Admission(pricing, ReuseHistory())
    loader = Loader(
        tiers.by_name,
        finder,
        gain,
        mover,
        announcer,
        block_size=pool.block_size,
        peers=stores.peers,
        observer=observer,
        clock=clock,
        wake=wake,
    )
    storer = Storer(
        own,
        copying,
        mover,
        leases,
        announcer,
        admission,
        gain,
        past,
        find_block=pool.block_of,
        host=stores.host,
        staging=staging,
        max_pinned_blocks=_max_pinned_blocks(pool.num_blocks, chunk_tokens // pool.block_size),
        # What is not in the pool any more could not be stored anyway.
        max_waiting_blocks=pool.num_blocks,
        is_reading=loader.is_reading,
        observer=observer,
        clock=clock,
    )
    probes = Probes(
        tiers.by_name,
        gain,
        mover.block_bytes,
        peers=stores.peers,
        peer_blocks=loader.wanted,
        clock=clock,
    )
    return TierManager(
        Parts(
            tiers=tiers.by_name,
            lanes=[copying, *tiers.lanes],
            acks=acks,
            finder=finder,
            loader=loader,
            storer=storer,
            probes=probes,
            gain=gain,
            admission=admission,
            past=past,
            announcer=announcer,
            host=stores.host,
            peers=stores.peers,
            block_bytes=mover.block_bytes,
            clock=clock,
            sleep=sleep,
        )
    )


class _Tiers:
    """Makes the tiers, with their queues."""

    def __init__(
        self,
        acks: Acks,
        announcer: Announcer,
        past: Past,
        pricing: Pricing,
        clock: Callable[[], float],
    ) -> None:
        self.by_name: dict[TierName, Tier] = {}
        self.lanes: list[Lane] = []
        self._acks = acks
        self._announcer = announcer
        self._past = past
        self._pricing = pricing
        self._clock = clock

    def add_slotted(
        self, name: TierName, store: BlockStore, num_slots: int, writer: Lane | None = None
    ) -> None:
        """Add a tier whose slots are given out here."""

        def evicted(entry: Entry) -> None:
            self._past.evicted(entry.record.key)
            if entry.is_announced:
                self._announcer.removed(name, entry.record.key)

        pricing = self._pricing
        order = EvictionOrder(lambda depth: pricing.saved_per_block_s(name, depth))
        books = TierBooks(num_slots, order, evicted)
        self.by_name[name] = Tier(
            name,
            self._lane(name, "read", READER_THREADS[name]),
            self._announcer,
            store=store,
            books=books,
            leases=LeaseBook(books.pin, books.unpin),
            writer=writer or self._lane(name, "write", 1),
        )

    def adopt(self, recovered: Sequence[Place], root: KvKey, block_size: int) -> None:
        """Take over what the disk held."""
        books = self.by_name["disk"].books
        if books is not None:
            entries = books.adopt(recovered)
            announce_recovered(self._announcer, "disk", entries, root, block_size)

    def add_remote(self, store: RemoteStore) -> None:
        """Add the tier that other runners write too."""
        asking = self._lane("remote", "ask", 1)
        self.by_name["remote"] = Tier(
            "remote",
            self._lane("remote", "read", READER_THREADS["remote"]),
            self._announcer,
            store=store,
            index=RemoteIndex(store, asking, self._announcer, self._clock),
            writer=self._lane("remote", "write", 1),
        )

    def add_peers(self) -> None:
        """Add the other runners."""
        self.by_name["peer"] = Tier(
            "peer", self._lane("peer", "read", READER_THREADS["peer"]), self._announcer
        )

    def _lane(self, tier: TierName, work: str, num_threads: int) -> Lane:
        lane = Lane(f"kv-{tier}-{work}", num_threads, self._acks, clock=self._clock)
        self.lanes.append(lane)
        return lane


def _max_pinned_blocks(pool_blocks: int, step_blocks: int) -> int:
    of_step = min(step_blocks, pool_blocks // PINNED_SHARE_OF_STEP)
    return max(1, pool_blocks // PINNED_SHARE, of_step)


def _staging(block_bytes: int, allocators: tuple[Callable[[int], memoryview], ...]) -> Staging:
    num_bytes = max(STAGING_BYTES, STAGING_BLOCKS * slot_bytes(block_bytes))
    return Staging(allocate_arena(num_bytes, block_bytes, option="staging", allocators=allocators))
