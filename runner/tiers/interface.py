"""What the engine asks of the tiers beneath its pool; ``manager.py`` answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prefix_index.events import Event
    from runner.kvkeys import KvKey
    from runner.leases import LeaseBook, LoanedBlock
    from runner.pool.blocks import BlockPool
    from runner.tiers.peer import PeerStore
    from runner.tiers.types import (
        BlockMover,
        Committed,
        LoadDone,
        LoadPlan,
        LoadQuery,
        TierStats,
    )


class BuildTiers(Protocol):
    """Builds the tiers of an engine around its pool."""

    def __call__(
        self,
        *,
        pool: BlockPool,
        leases: LeaseBook,
        mover: BlockMover,
        namespace: KvKey,
        facts: Mapping[str, object],
        chunk_tokens: int,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> Tiers | None:
        """Open every configured tier.

        Args:
            pool: Blocks to store and to load into are pinned and reserved here.
            leases: Of the pool; swept by the engine.
            mover: Copies its blocks.
            namespace: Root of all keys.
            facts: What the namespace was made of.
            chunk_tokens: Most tokens of one step.
            wake: Makes a sleeping engine poll; called from any thread.
            clock: Monotonic seconds.
        """
        ...


class Tiers(Protocol):
    """All tiers of one engine. Called from the engine thread only; no call waits for a transfer."""

    @property
    def has_work(self) -> bool:
        """Whether transfers are under way."""
        ...

    @property
    def peers(self) -> PeerStore | None:
        """What pulls from other runners; thread-safe figures."""
        ...

    def consider(self, query: LoadQuery, now_s: float) -> LoadPlan | Literal["pending"] | None:
        """Say what to load for a waiting request.

        Returns:
            A plan for this very query, to be started or cancelled at once; ``pending`` while a
            look-up is under way: ask again; None if there is nothing worth loading.
        """
        ...

    def start(self, plan: LoadPlan, blocks: Sequence[int]) -> None:
        """Begin a load into blocks reserved for it, one per planned block."""
        ...

    def cancel(self, owner: str) -> None:
        """Forget a request's look-ups and end its load soon; its ``LoadDone`` still comes."""
        ...

    def poll(self, now_s: float) -> list[LoadDone]:
        """Take in what the transfer threads have done; returns the loads that have ended."""
        ...

    def offer(self, blocks: Sequence[Committed], now_s: float) -> None:
        """Consider blocks for storing that have become findable in the pool or were hit there."""
        ...

    def touch(self, keys: Sequence[KvKey], now_s: float) -> None:
        """Note the use of a prompt's keys."""
        ...

    def observe_step(
        self, num_tokens: int, attended_tokens: int, decode_rows: int, elapsed_s: float
    ) -> None:
        """Learn from one step of the engine.

        Args:
            num_tokens: Tokens computed, decode rows included.
            attended_tokens: Over all of them, the tokens each one attends to.
            decode_rows: How many of them were single tokens of running samples.
            elapsed_s: How long the model took.
        """
        ...

    def why_missing(self, owner: str, key: KvKey) -> Literal["cold", "evicted", "gated", "failed"]:
        """Say why a block that a request would have used was not loaded."""
        ...

    def pin_cpu(self, keys: Sequence[KvKey], owner: str, deadline_s: float) -> list[LoanedBlock]:
        """Pin the leading ones of some blocks that are in host memory, until the deadline.

        From the lending thread, while the engine thread neither reads nor changes its books;
        ``unpin_cpu`` likewise.
        """
        ...

    def unpin_cpu(self, owner: str) -> None:
        """End what ``pin_cpu`` gave an owner, and forget what was found damaged."""
        ...

    def drain_events(self) -> list[Event]:
        """Return the KV events since the last call, in order."""
        ...

    def stats(self) -> list[TierStats]:
        """Return the figures of every tier."""
        ...

    def decisions(self) -> list[dict[str, object]]:
        """Return the last decisions about loads, oldest first."""
        ...

    def next_wake_s(self, now_s: float) -> float | None:
        """Return in how many seconds to poll though nobody wakes the engine; None for never."""
        ...

    def clear(self) -> None:
        """Forget every block of every tier."""
        ...

    def close(self) -> None:
        """End the transfer threads and free everything."""
        ...
