"""Loads under way: pieces of one plan, read by several threads, counted in order.

A piece is neighbouring blocks from one tier. All pieces of a load start at once; only the blocks
before the first one that did not come count. The engine can *close* a piece whatever its thread is
doing: from then on no thread can write into the piece's blocks, since each copy into the pool is
made under the piece's lock. So a store that hangs holds up nobody.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from runner.tiers.transfers import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.leases import Lease
    from runner.tiers.tier import Tier
    from runner.tiers.types import BlockMover, Deliver, LoadPlan, Outcome, Place

    Read = Callable[[Sequence[Place], Deliver, float], Outcome]


class Piece:
    """Neighbouring blocks of a load that come from one tier.

    Attributes:
        tier: Where from.
        places: Which blocks, in order.
        job: The transfer, once submitted.
        lease: Pin on the tier's slots; None where it has none.
        num_done: Leading blocks in the pool, verified. Written by the transfer thread; final once
            the piece has ended.
        outcome: How it ended; None while it may still write.
    """

    def __init__(self, tier: Tier, places: Sequence[Place], blocks: Sequence[int]) -> None:
        self.tier = tier
        self.places = places
        self.job: Job | None = None
        self.lease: Lease | None = None
        self.num_done = 0
        self.outcome: Outcome | None = None
        self._blocks = blocks
        self._lock = threading.Lock()
        self._is_unwanted = False
        self._is_closed = False
        self._read_outcome: Outcome = "failed"

    def make_job(
        self, read: Read, mover: BlockMover, deadline_s: float, settle: Callable[[Job], None]
    ) -> Job:
        """Return the transfer that reads this piece."""

        def deliver(index: int, payload: memoryview) -> bool:
            with self._lock:
                if self._is_closed or self._is_unwanted:
                    return False
                mover.copy_in(payload, self._blocks[index])
                self.num_done = index + 1
            return not self._is_unwanted

        def run() -> None:
            if not self._is_unwanted:
                self._read_outcome = read(self.places, deliver, deadline_s)

        self.job = Job(len(self.places) * mover.block_bytes, run, settle)
        return self.job

    @property
    def is_complete(self) -> bool:
        """Whether all of it is in the pool."""
        return self.num_done == len(self.places)

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
        self._is_closed = True
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
        """Whether no thread writes into its blocks any more; closes what has become useless."""
        is_cut = self.is_cancelled or self.is_late
        has_ended = True
        for piece in self.pieces:
            if piece.outcome is None and not (is_cut and piece.close()):
                has_ended = False
            elif not piece.is_complete:
                is_cut = True
        return has_ended
