"""What one pool shares: its workers' blocks, routings to workers that tell nothing, look-ups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.fleet.sharing.anchors import SharedAnchors
from gateway.fleet.sharing.source import WorkerSource
from prefix_index.memo import MAX_MEMO_BYTES
from prefix_index.names import NameBudget
from prefix_index.prompts import ANCHOR_SHARE
from prefix_index.replica.lookup import Lookup
from prefix_index.replica.pool import PoolReplica
from prefix_index.replica.tasks import run_together
from prefix_index.replica.touches import Touches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.fleet.fleet import Fleet
    from gateway.routing.pool import Pool, Worker
    from prefix_index.blocks import BlockHash
    from prefix_index.index import Index
    from prefix_index.replica.link import Link

# Names freed in one go, 2 ms.
_SWEEP_NAMES: Final = 10_000
# Redis has this many more blocks than the view before a look-up can pay.
_MIN_MISSING_BLOCKS: Final = 64
# The view is bounded and evicts ahead of its bound.
_FULL: Final = 0.9


class SharedPool:
    """What one pool shares: the views of its workers, routings, look-ups."""

    def __init__(
        self,
        fleet: Fleet,
        pool: Pool,
        index: Index,
        link: Link,
        *,
        name: str,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.index = index
        self.budget = NameBudget.for_blocks(index.max_blocks)
        self.replica = PoolReplica(link, pool.name, name, index, clock=clock)
        self.lookup = Lookup(link, self.replica.leases, index)
        self.touches = Touches(
            link, pool.name, name, on_touch=self._touched_elsewhere, above=self._above
        )
        self.anchors = SharedAnchors(link, pool.name, MAX_MEMO_BYTES // ANCHOR_SHARE)
        self._fleet = fleet

    async def run(self) -> None:
        """Share until cancelled; then give up what was held."""
        try:
            await run_together(self.replica.run(), self.touches.run(), self.anchors.run())
        finally:
            await self.lookup.close()

    def add(self, worker: Worker) -> None:
        """Share a worker's events."""
        source = WorkerSource(self._fleet, self.pool, worker, self.index, self.budget)
        self.replica.add(worker.id, source)

    def routed(self, worker: Worker, hashes: Sequence[BlockHash], root: BlockHash) -> None:
        """Take note of a request that went to a worker; returns at once."""
        if worker.mode == "approximate":
            self.touches.touched(worker.id, hashes, root)
        if self.is_full and self.num_missing_blocks >= _MIN_MISSING_BLOCKS:
            self.lookup.look_up(hashes, root, list(self.replica.views))

    @property
    def is_full(self) -> bool:
        """Whether the view has no room for everything that Redis has."""
        return self.index.num_blocks >= _FULL * self.index.max_blocks

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that Redis has and the view has not, at least."""
        num_shared = sum(view.num_shared for view in self.replica.views.values())
        return max(0, num_shared - self.index.num_blocks)

    @property
    def num_decode_errors(self) -> int:
        """Shared values that could not be read."""
        parts = self.replica, self.touches, self.lookup, self.anchors, self.anchors.map
        return sum(part.decode_errors for part in parts)

    def look_after(self) -> None:
        """Believe workers again whose tokens are ours again, and free what was cleared."""
        if self.pool.reader is not None and self.pool.reader.anchors is not self.anchors:
            self.pool.reader.anchors = self.anchors
        for worker_id, view in self.replica.views.items():
            worker = self.pool.workers.get(worker_id)
            if worker is None or view.role != "tail" or view.head.is_silent:
                continue
            if worker.mode == "approximate":
                self.pool.set_mode(worker, "exact")
                view.needs_load = True
        self.budget.sweep(_SWEEP_NAMES)

    def _touched_elsewhere(
        self, worker_id: str, hashes: Sequence[BlockHash], root: BlockHash
    ) -> None:
        worker = self.pool.workers.get(worker_id)
        residency = None if worker is None else self.pool.residency(worker)
        if residency is not None:
            residency.touch(hashes, root)

    def _above(self, worker: str, block: BlockHash, depth: int) -> list[BlockHash] | None:
        chain: list[BlockHash] = []
        at: BlockHash | None = block
        while at is not None and len(chain) < depth:
            chain.append(at)
            at = self.index.parent(worker, at)
        return chain[::-1] if len(chain) == depth else None
