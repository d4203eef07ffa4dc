"""Loads under way: pieces of one plan, read by several threads, counted in order.

A piece is neighbouring blocks from one tier. All pieces of a load start at once; only the blocks
before the first one that did not come count. The engine can *close* a piece whatever its thread is
doing: from then on no thread can write into the piece's blocks, since each copy into the pool is
made under the piece's lock. So a store that hangs holds up nobody.

Where the device copies by layer groups, a piece is verified in full first, then its copy is begun
in one go. From then on it has *arrived*: a step may use it, since the step waits for the copy layer
by layer. A copy under way cannot be called back: a piece is not closed before it has landed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from runner.tiers.transfers import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.leases import Lease
    from runner.tiers.tier import Tier
    from runner.tiers.types import (
        BlockMover,
        Deliver,
        GroupMover,
        LoadPlan,
        Outcome,
        Place,
    )

    Read = Callable[[Sequence[Place], Deliver, float], Outcome]


class Piece:
    """Neighbouring blocks of a load that come from one tier.

    Attributes:
        tier: Where from.
        places: Which blocks, in order.
        job: The transfer, once submitted.
        lease: Pin on the tier's slots; None where it has none.
        num_done: Leading blocks in the pool or under way into it, verified. Written by the
            transfer thread; final once the piece has arrived or ended.
        under_way: The copy that the device makes by itself now; None before and after.
        outcome: How it ended; None while it may still write.
    """

    def __init__(self, tier: Tier, places: Sequence[Place], blocks: Sequence[int]) -> None:
        self.tier = tier
        self.places = places
        self.job: Job | None = None
        self.lease: Lease | None = None
        self.num_done = 0
        self.outcome: Outcome | None = None
        self.under_way: Any | None = None
        self._blocks = blocks
        self._lock = threading.Lock()
        self._is_unwanted = False
        self._is_closed = False
        self._read_outcome: Outcome = "failed"

    def make_job(
        self, read: Read, mover: BlockMover, deadline_s: float, settle: Callable[[Job], None]
    ) -> Job:
        """Return the transfer that reads this piece, each block into the pool as it comes."""

        def deliver(index: int, payload: memoryview) -> bool:
            return self._copy_in(mover, index, payload)

        def run() -> None:
            if not self._is_unwanted:
                self._read_outcome = read(self.places, deliver, deadline_s)

        self.job = Job(len(self.places) * mover.block_bytes, run, settle)
        return self.job

    def make_grouped_job(
        self,
        read: Read,
        mover: BlockMover,
        groups: GroupMover,
        deadline_s: float,
        settle: Callable[[Job], None],
        wake: Callable[[], None],
    ) -> Job:
        """Return the transfer that verifies this piece, then copies it by layer groups.

        For stores whose buffers stay as they are while the piece's lease lasts. ``wake`` is called
        when a step may use it; the transfer ends when all of it is in the pool.
        """
        sources: list[memoryview] = []

        def deliver(index: int, payload: memoryview) -> bool:
            sources.append(payload)
            return not self._is_unwanted

        def run() -> None:
            if self._is_unwanted:
                return
            self._read_outcome = read(self.places, deliver, deadline_s)
            if not self._begin(groups, sources):
                for index, source in enumerate(sources):
                    if not self._copy_in(mover, index, source):
                        return
                return
            wake()
            try:
                groups.wait_for(self.under_way)
            except BaseException:
                self.num_done = 0
                raise
            finally:
                self.under_way = None

        self.job = Job(len(self.places) * mover.block_bytes, run, settle)
        return self.job

    def _copy_in(self, mover: BlockMover, index: int, payload: memoryview) -> bool:
        """Copy one block; False if nobody wants more."""
        with self._lock:
            if self._is_closed or self._is_unwanted:
                return False
            mover.copy_in(payload, self._blocks[index])
            self.num_done = index + 1
        return not self._is_unwanted

    def _begin(self, groups: GroupMover, sources: Sequence[memoryview]) -> bool:
        """Begin the copy of what was verified; False if there is none, or it has to be copied."""
        with self._lock:
            if self._is_closed or self._is_unwanted or not sources:
                return False
            under_way = groups.begin_in(sources, self._blocks[: len(sources)])
            if under_way is None:
                return False
            # In this order: who sees the copy sees how much it brings.
            self.num_done = len(sources)
            self.under_way = under_way
        return True

    @property
    def is_complete(self) -> bool:
        """Whether all of it is in the pool, or under way into it."""
        return self.num_done == len(self.places)

    @property
    def has_arrived(self) -> bool:
        """Whether a step may use all of it though the copy is still under way."""
        return self.under_way is not None and self.is_complete

    def end(self) -> Outcome:
        """Note that its thread is done with it; returns how its read ended."""
        job = self.job
        outcome: Outcome = "failed" if job is not None and job.error else self._read_outcome
        if self._is_unwanted and not self.is_complete:
            outcome = "stopped"
        elif self.is_complete:
            outcome = "done"
        elif outcome == "done":
            # A store that claims all and delivered less.
            outcome = "missing"
        self.outcome = outcome
        return outcome

    def close(self) -> bool:
        """Keep any thread from writing into the blocks; False if one is copying: try again."""
        self._is_unwanted = True
        if self.outcome is not None:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self.under_way is not None:
                return False
            self._is_closed = True
        finally:
            self._lock.release()
        self.outcome = "done" if self.is_complete else "stopped"
        return True


class Load:
    """One plan being carried out.

    Attributes:
        plan: What was planned.
        pieces: In order of the prompt; fewer blocks than planned if some were gone.
        started_s: When.
        deadline_s: Closed then, whatever is missing.
        is_cancelled: Its request has ended.
        is_late: It was closed at its deadline.
    """

    def __init__(
        self, plan: LoadPlan, pieces: list[Piece], started_s: float, deadline_s: float
    ) -> None:
        self.plan = plan
        self.pieces = pieces
        self.started_s = started_s
        self.deadline_s = deadline_s
        self.is_cancelled = False
        self.is_late = False

    @property
    def first_short(self) -> Piece | None:
        """The first piece that ended without all of its blocks."""
        for piece in self.pieces:
            if piece.outcome is None:
                return None
            if not piece.is_complete:
                return piece
        return None

    def has_ended(self) -> bool:
        """Whether no thread writes into its blocks any more; closes what has become useless.

        Those of a load that is wanted as a whole may have arrived only, see the module.
        """
        is_cut = self.is_cancelled or self.is_late
        has_ended = True
        for piece in self.pieces:
            if piece.has_arrived and not is_cut:
                continue
            if piece.outcome is None and not (is_cut and piece.close()):
                has_ended = False
            elif not piece.is_complete:
                is_cut = True
        return has_ended
