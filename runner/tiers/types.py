"""What the parts of the tiers say to each other.

The engine thread decides everything: what is stored where, what is loaded, what is given up. The
transfer threads only move bytes, through stores that block. A block's bytes are the same on every
tier: those of one block of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from runner.kvkeys import BlockChain, KvKey

TierName = Literal["cpu", "disk", "remote", "peer"]
"""Where a block can be loaded from, nearest first; ``peer`` only for one request."""

Direction = Literal["read", "write"]

Outcome = Literal["done", "missing", "damaged", "failed", "stopped"]
"""How a transfer ended: all of it; a block that is not there; one whose bytes are not what was
stored; an error of the medium; or stopped by whoever asked (abort, deadline)."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One block's identity, as it travels and is kept with its bytes.

    Attributes:
        key: Of the block.
        parent: Key of the block before it, or its root.
        tokens: Its packed token ids (``pack_tokens``); compared on a hit.
        depth: Blocks before it in its sequence.
    """

    key: KvKey
    parent: KvKey
    tokens: bytes
    depth: int


@dataclass(frozen=True, slots=True)
class Place:
    """A block on one tier.

    Attributes:
        record: Which block.
        slot: Its place in the tier's arena; 0 where a tier is addressed by key.
    """

    record: BlockRecord
    slot: int = 0


Deliver: TypeAlias = Callable[[int, memoryview], bool]
"""Takes the verified bytes of the i-th wanted block; False: stop, nobody wants the rest."""


class BlockStore(Protocol):
    """The bytes of one tier. Blocking calls from transfer threads, several at once."""

    block_bytes: int

    def read(self, wanted: Sequence[Place], deliver: Deliver, deadline_s: float) -> Outcome:
        """Deliver blocks in order, each verified against its checksum, key and token ids.

        Stops at the first that cannot be had. A buffer is valid only during its call.

        Args:
            wanted: First block first.
            deliver: Called from this thread.
            deadline_s: On the monotonic clock; past it the read stops with ``stopped``.
        """
        ...

    def write(self, places: Sequence[Place], payloads: Sequence[memoryview]) -> list[bool]:
        """Store blocks; returns which are there now. Never raises for a fault of the medium."""
        ...

    def close(self) -> None:
        """Free what it holds; no call is in progress and none follows."""
        ...


class BlockMover(Protocol):
    """Copies whole blocks between the pool and host memory; called from transfer threads.

    Ordering against the engine's own work is its business: a copy out begins after the step that
    wrote the block, a copy in after the last step that could read the block's former content.
    """

    block_bytes: int
    groups: GroupMover | None
    """None where a copy is done when it returns, as in host memory."""

    def copy_out(self, block: int, target: memoryview) -> None:
        """Copy a pinned block of the pool into ``target``."""
        ...

    def copy_in(self, source: memoryview, block: int) -> None:
        """Copy bytes into a block reserved for loading; done when this returns."""
        ...


class GroupMover(Protocol):
    """Copies into the pool that a step may begin to use before they are done, layer by layer."""

    def begin_in(self, sources: Sequence[memoryview], blocks: Sequence[int]) -> Any | None:
        """Begin to copy host memory into blocks reserved for loading; transfer threads.

        The sources must stay as they are until ``wait_for`` returns.

        Returns:
            The copy, for the other two; None if the device cannot copy from this memory by itself.
        """
        ...

    def wait_for(self, copy: Any) -> None:
        """Block until all of a copy is in the pool; transfer threads."""
        ...

    def announce(self, copy: Any) -> None:
        """Let the next step wait for a copy, each layer for its own part; engine thread only."""
        ...


@dataclass(frozen=True, slots=True)
class PeerSource:
    """Another runner that a request says holds its prefix (``kv_transfer_params.source``)."""

    url: str
    tokens: int


@dataclass(frozen=True, slots=True)
class LoadQuery:
    """What one waiting request could load.

    Attributes:
        owner: The request, for cancelling.
        chain: Keys of its prompt's full blocks.
        first_block: Blocks the pool holds already.
        max_blocks: No block from here on may be loaded (the last token is always computed, and
            the request's own cap).
        prompt_tokens: Tokens of its prompt.
        waiting_tokens: Prefill tokens of other requests that computing less would serve sooner.
        source: A peer to ask, if it named one.
    """

    owner: str
    chain: BlockChain
    first_block: int
    max_blocks: int
    prompt_tokens: int
    waiting_tokens: int
    source: PeerSource | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load worth its price; the scheduler reserves ``num_blocks`` and starts it.

    Attributes:
        id: Unique in this process.
        query: What was asked.
        num_blocks: Blocks from ``query.first_block`` on.
        expected_s: Until all are in the pool.
    """

    id: int
    query: LoadQuery
    num_blocks: int
    expected_s: float


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load has ended, whatever way; its blocks are the scheduler's again.

    Attributes:
        plan_id: Which.
        num_blocks: Leading blocks that are in the pool, verified.
        blocks_by_tier: The same by where they came from.
        outcome: Why it stopped there.
        elapsed_s: From start to end.
    """

    plan_id: int
    num_blocks: int
    blocks_by_tier: dict[TierName, int]
    outcome: Outcome
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Committed:
    """A block that has just become findable in the pool, offered to the tiers.

    Attributes:
        record: Which.
        block: Where in the pool.
        chain: Of its sequence: salt and adapter, for the events.
        can_store: Within the request's ``max_offload_tokens``.
    """

    record: BlockRecord
    block: int
    chain: BlockChain
    can_store: bool


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of one tier at one moment; the ``_total`` ones only grow.

    Attributes:
        tier: Which.
        capacity_bytes: Hard bound; None where the tier has none of ours (remote, peer).
        used_bytes: Bytes of blocks held; None where we cannot know.
        num_blocks: Blocks held, likewise.
        queue_bytes: Bytes asked for and not yet moved, by direction.
        oldest_s: Age of the oldest transfer under way or waiting, by direction; 0 for none.
        moved_bytes_total: By direction.
        moved_blocks_total: By direction.
        hit_tokens_total: Prompt tokens loaded from here.
        evictions_total: Blocks given up for room.
        dropped_total: Blocks that were worth storing and found the queue full.
        store_failed_total: Blocks whose write failed.
        damaged_total: Blocks read whose bytes were not what was stored.
        load_failed_total: Loads that ended early, for any reason but the request's own end.
        gated_total: Loads refused since recomputing was cheaper.
        orphans_total: Pins freed at their deadline since their owner never did.
        is_paused: Writing has stopped for a while (disk full, store away).
    """

    tier: TierName
    capacity_bytes: int | None = None
    used_bytes: int | None = None
    num_blocks: int | None = None
    queue_bytes: dict[Direction, int] = field(default_factory=dict)
    oldest_s: dict[Direction, float] = field(default_factory=dict)
    moved_bytes_total: dict[Direction, int] = field(default_factory=dict)
    moved_blocks_total: dict[Direction, int] = field(default_factory=dict)
    hit_tokens_total: int = 0
    evictions_total: int = 0
    dropped_total: int = 0
    store_failed_total: int = 0
    damaged_total: int = 0
    load_failed_total: int = 0
    gated_total: int = 0
    orphans_total: int = 0
    is_paused: bool = False


class TransferObserver(Protocol):
    """Hears of every transfer, from any thread; must return at once."""

    def transferred(
        self, tier: TierName, direction: Direction, elapsed_s: float, num_bytes: int
    ) -> None:
        """Note a finished transfer."""
        ...

    def gained(self, predicted_s: float, actual_s: float) -> None:
        """Note what a finished restore was to save and did; negative if it lost."""
        ...
