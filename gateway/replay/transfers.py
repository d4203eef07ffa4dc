"""Transfers of KV between simulated workers, and the store they may share."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from gateway.replay.kv_cache import Change

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.replay.engine import Job
    from gateway.replay.fleet import Fleet, Placement
    from prefix_index.blocks import BlockHash

# Fixed seconds of one transfer: look-up, connection, first bytes.
LATENCY_S = 0.020


class Store:
    """A store that all workers share: blocks that were computed or restored twice.

    Source: the simulation behind the design, variant B "seen twice": equal to writing all blocks
    at a fraction of the bytes written.

    Args:
        capacity_blocks: How many it keeps; the least recently used go first.
        announce: Told of blocks stored and dropped.
    """

    def __init__(self, capacity_blocks: int, announce: Callable[[Change], None]) -> None:
        self._capacity_blocks = capacity_blocks
        self._announce = announce
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def saw(self, blocks: Sequence[BlockHash]) -> None:
        """Note a prompt that a worker has cached; keeps what was seen before."""
        parent = b""
        for block in blocks:
            if block in self._seen and block not in self._blocks:
                self._announce(Change(True, "remote", [block], parent))
            parent = block
        for block in reversed(blocks):
            if block in self._seen:
                self._blocks[block] = None
                self._blocks.move_to_end(block)
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._blocks) > self._capacity_blocks:
            self._announce(Change(False, "remote", [self._blocks.popitem(last=False)[0]]))
        # What was seen once is remembered for as many blocks as four times the store.
        while len(self._seen) > 4 * self._capacity_blocks:
            self._seen.popitem(last=False)

    def prefix(self, blocks: Sequence[BlockHash]) -> int:
        """Return how many leading blocks are in the store."""
        stored = self._blocks
        for i, block in enumerate(blocks):
            if block not in stored:
                return i
        return len(blocks)


class Links:
    """Network links of the workers: one queue in and one out for each, first come first served.

    Args:
        fleet: The fleet.
        peer_bytes_per_s: Between two workers.
        store_bytes_per_s: Between the store and a worker.
        store: The store, if there is one.

    Attributes:
        moved_bytes: Bytes transferred so far.
        num_pulls: Transfers so far.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        peer_bytes_per_s: float,
        store_bytes_per_s: float,
        store: Store | None = None,
    ) -> None:
        self._fleet = fleet
        self._peer_bytes_per_s = peer_bytes_per_s
        self._store_bytes_per_s = store_bytes_per_s
        self._store = store
        self._in_free_s: dict[int, float] = {}
        self._out_free_s: dict[int, float] = {}
        self.moved_bytes = 0.0
        self.num_pulls = 0

    def start(self, placement: Placement, job: Job, now_s: float) -> tuple[int, float]:
        """Begin what a router asked for, as far as the source still has it.

        Returns:
            Tokens moved, and the seconds that keeps the links busy; 0 if it is gone.
        """
        pull, fleet = placement.pull, self._fleet
        assert pull is not None
        wanted = job.blocks[: pull.num_blocks]
        own = fleet.held_prefix(placement.worker, wanted)
        if pull.source is None:
            there = self._store.prefix(wanted) if self._store is not None else 0
            bytes_per_s = self._store_bytes_per_s
        else:
            there = fleet.held_prefix(pull.source, wanted)
            bytes_per_s = self._peer_bytes_per_s
        if there <= own:
            return 0, 0.0
        tokens = (there - own) * fleet.model.block_tokens
        moved_bytes = tokens * fleet.model.kv_bytes_per_token
        busy_s = moved_bytes / bytes_per_s
        free_s = self._in_free_s.get(placement.worker, 0.0)
        if pull.source is not None:  # the store's own link is taken to be wide enough
            free_s = max(free_s, self._out_free_s.get(pull.source, 0.0))
        end_s = max(now_s, free_s) + busy_s
        self._in_free_s[placement.worker] = end_s
        if pull.source is not None:
            self._out_free_s[pull.source] = end_s
        job.pulled_blocks, job.pulled_s = there, end_s + LATENCY_S
        self.moved_bytes += moved_bytes
        self.num_pulls += 1
        return tokens, busy_s

    def computed(self, job: Job) -> None:
        """Note that a prompt is cached on its worker, which may write to the store."""
        if self._store is not None:
            self._store.saw(job.blocks)
