"""Leases: whoever keeps a block from being reused says who, why and until when.

Published engines leaked pins whose owner never came back until the pool was full. Here a pin
without a deadline cannot be had: ``sweep`` frees what its owner forgot, and counts it.

Used by the thread that has the engine's books, except for ``LoanedBlock.read_into``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from runner.tiers.types import BlockRecord

LeaseReason = Literal["store", "load", "peer"]
"""Why: being copied to a lower tier; read for a load; lent to another runner."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A right to read some blocks; equal only to itself.

    Attributes:
        owner: Whose: a transfer's or a request's name.
        reason: What for.
        deadline_s: On the book's clock; freed then at the latest.
        blocks: What is pinned.
    """

    owner: str
    reason: LeaseReason
    deadline_s: float
    blocks: tuple[int, ...]


class LeaseBook:
    """All leases on the blocks of one arena.

    Args:
        pin: Keeps a block from reuse; called once per lease and block.
        unpin: Undoes one ``pin``.

    Attributes:
        orphans_total: Leases freed at their deadline since their owner never did.
    """

    def __init__(self, pin: Callable[[int], None], unpin: Callable[[int], None]) -> None:
        self.orphans_total = 0
        self._pin = pin
        self._unpin = unpin
        self._leases: dict[Lease, None] = {}

    def __len__(self) -> int:
        """Leases out."""
        return len(self._leases)

    def __contains__(self, lease: Lease) -> bool:
        """Whether a lease has not ended."""
        return lease in self._leases

    def take(
        self, owner: str, reason: LeaseReason, deadline_s: float, blocks: Iterable[int]
    ) -> Lease:
        """Pin blocks until ``release`` or the deadline."""
        lease = Lease(owner, reason, deadline_s, tuple(blocks))
        for block in lease.blocks:
            self._pin(block)
        self._leases[lease] = None
        return lease

    def release(self, lease: Lease) -> bool:
        """End a lease; False if it has ended before, by a sweep for one."""
        if lease not in self._leases:
            return False
        del self._leases[lease]
        for block in lease.blocks:
            self._unpin(block)
        return True

    def release_owner(self, owner: str) -> int:
        """End all leases of an owner and return how many there were."""
        owned = [lease for lease in self._leases if lease.owner == owner]
        for lease in owned:
            self.release(lease)
        return len(owned)

    def sweep(self, now_s: float) -> list[Lease]:
        """End and return the leases past their deadline."""
        orphans = [lease for lease in self._leases if lease.deadline_s <= now_s]
        for lease in orphans:
            self.release(lease)
        self.orphans_total += len(orphans)
        return orphans

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline; None without leases."""
        return min((lease.deadline_s for lease in self._leases), default=None)

    def release_all(self) -> None:
        """End every lease."""
        for lease in list(self._leases):
            self.release(lease)


@dataclass(frozen=True, slots=True)
class LoanedBlock:
    """A block lent to another runner.

    Attributes:
        record: Which.
        read_into: Copies its bytes into a buffer of their length, and says whether they are still
            what was stored, as far as that can be told; from any thread.
    """

    record: BlockRecord
    read_into: Callable[[memoryview], bool]


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks that another runner may read for a while.

    Bytes count only if the deadline has not passed *after* they were copied and the loan has not
    been given back: from then on a block may hold something else.

    Attributes:
        owner: Gives it back.
        deadline_s: On the monotonic clock.
        blocks: Of the leading keys asked for, those that are held, in order.
    """

    owner: str
    deadline_s: float
    blocks: Sequence[LoanedBlock]
