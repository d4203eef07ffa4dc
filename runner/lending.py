"""Blocks lent to other runners: from the pool, and from host memory beneath it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from runner.leases import Loan, LoanedBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.kvkeys import KvKey
    from runner.leases import LeaseBook
    from runner.pool.blocks import BlockPool
    from runner.tiers.interface import Tiers
    from runner.tiers.types import BlockMover


class Lender:
    """Makes loans; used by the thread that has the engine's books."""

    def __init__(
        self, pool: BlockPool, leases: LeaseBook, mover: BlockMover, tiers: Tiers | None
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._mover = mover
        self._tiers = tiers

    def lend(self, keys: Sequence[KvKey], owner: str, deadline_s: float) -> Loan:
        """Lend the leading ones of some blocks that the pool or host memory holds."""
        loaned: list[LoanedBlock] = []
        pooled: list[int] = []
        while len(loaned) < len(keys):
            block = self._pool.block_of(keys[len(loaned)])
            if block is not None:
                record = self._pool.record_of(block)
                pooled.append(block)
                loaned.append(LoanedBlock(record, partial(_copy_out, self._mover, block)))
                continue
            below = self._lend_host(keys[len(loaned) :], owner, deadline_s)
            if not below:
                break
            loaned += below
        if pooled:
            self._leases.take(owner, "peer", deadline_s, pooled)
        return Loan(owner, deadline_s, tuple(loaned))

    def _lend_host(self, keys: Sequence[KvKey], owner: str, deadline_s: float) -> list[LoanedBlock]:
        if self._tiers is None:
            return []
        return self._tiers.pin_cpu(keys, owner, deadline_s)

    def give_back(self, owner: str) -> None:
        """End an owner's loans; blocks may be reused from now on."""
        self._leases.release_owner(owner)
        if self._tiers is not None:
            self._tiers.unpin_cpu(owner)


def _copy_out(mover: BlockMover, block: int, target: memoryview) -> bool:
    """Copy a block of the pool, whose bytes are what they are: it keeps no checksums."""
    mover.copy_out(block, target)
    return True
