"""What a process knows of one worker and the others do not yet: written behind, coalesced, bounded.

States are packed when a batch was applied, not when they are sent: what is in Redis then is the
truth right behind one batch, and a later holder can go on from there without counting twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from prefix_index.blocks import BlockHash
from prefix_index.replica.codec import Head, pack_state

if TYPE_CHECKING:
    from prefix_index.events import EngineHash
    from prefix_index.index import Index
    from prefix_index.ingest import FeedChange
    from prefix_index.replica.source import Source

# Blocks of one delta: what a prefill of 4k to 16k tokens stores goes out in one piece, and applying
# it takes a millisecond.
DELTA_BLOCKS: Final = 256
# Changes kept for a Redis that is away, 3 MB per worker; beyond it everything is sent again.
MAX_PENDING_BLOCKS: Final = 16_384


class Delta(NamedTuple):
    """One call of the publishing script.

    Attributes:
        states: Packed states, empty for blocks that are gone.
        head: Where a new holder could go on; from the first batch only while parts are missing.
        sequence: How far the events were read; never goes back within an epoch.
    """

    states: dict[BlockHash, bytes]
    head: Head
    sequence: int


class Publication:
    """The changes of one worker that are still to be published; event loop only.

    Attributes:
        epoch: Counts the times that everything was void; shared by all holders.
        is_reset: What others hold of the worker is void, and the next delta says so.
        is_silent: Whether the worker stopped telling, as published.
        restarts: Times that everything had to be sent again.
    """

    def __init__(self, index: Index, worker: str, source: Source) -> None:
        self.epoch = 0
        self.is_reset = False
        self.is_silent = False
        self.restarts = 0
        self._index = index
        self._worker = worker
        self._source = source
        self._pending: dict[BlockHash, bytes] = {}
        self._position = (0, 0)
        # Taken from pending and not acknowledged; newer states of the same blocks are in pending.
        self._flight: dict[BlockHash, bytes] = {}
        self._flight_position = (0, 0)
        # Names of blocks still to be sent because everything is sent again.
        self._backlog: list[EngineHash] = []
        self._must_list = False
        # Everything was sent, but not yet how far the events are read.
        self._owes_position = False

    @property
    def is_empty(self) -> bool:
        """Whether others know everything."""
        return not (self.num_pending or self.is_reset or self._must_list or self._owes_position)

    @property
    def num_pending(self) -> int:
        """Blocks still to be published, as far as they are listed."""
        return len(self._pending) + len(self._flight) + len(self._backlog)

    def forget(self) -> None:
        """Others know better: nothing is to be published."""
        self._pending, self._flight, self._backlog = {}, {}, []
        self.is_reset = self._must_list = self._owes_position = False

    def saw(self, change: FeedChange) -> None:
        """Take note of a batch that was just applied to the index."""
        if change.cleared:
            self.forget()
            self.epoch += 1
            self.is_reset = True
        elif self._must_list:
            return
        index, worker, pending = self._index, self._worker, self._pending
        for block, name in change.blocks.items():
            copies = index.copies(worker, block)
            parent = index.parent(worker, block) if copies else None
            pending[block] = b"" if parent is None else pack_state(parent, copies, name)
        self._position = self._source.position()
        if len(pending) > MAX_PENDING_BLOCKS + len(self._backlog):
            self.restart()

    def restart(self) -> None:
        """Publish everything again: what Redis has is not what it should be."""
        self.forget()
        self.epoch += 1
        self.restarts += 1
        self.is_reset = self._must_list = True

    def next_delta(self) -> Delta | None:
        """Return what to publish next, None if there is nothing; ``done`` follows when it is."""
        if self._must_list:
            self._must_list = False
            self._backlog = list(self._source.names())
            self._owes_position = True
            self._position = self._source.position()
        if self._backlog:
            return self._delta(self._listed_again(), is_whole=False)
        if not self._flight:
            self._flight, self._pending = self._pending, {}
            self._flight_position = self._position
        if not (self._flight or self.is_reset or self._owes_position):
            return None
        if len(self._flight) <= DELTA_BLOCKS:
            return self._delta(self._flight.copy(), is_whole=True)
        blocks = list(self._flight)[:DELTA_BLOCKS]
        return self._delta({block: self._flight[block] for block in blocks}, is_whole=False)

    def done(self, delta: Delta) -> None:
        """The delta is in Redis."""
        if delta.head.epoch != self.epoch:
            return  # void meanwhile
        self.is_reset = False
        if self._backlog:
            del self._backlog[-DELTA_BLOCKS:]
            return
        for block in delta.states:
            self._flight.pop(block, None)
        if not self._flight:
            self._owes_position = False

    def _delta(self, states: dict[BlockHash, bytes], *, is_whole: bool) -> Delta:
        sequence, digest = self._flight_position if not self._backlog else self._position
        head = Head(
            epoch=self.epoch,
            next_sequence=sequence if is_whole else 0,
            digest=digest if is_whole else 0,
            is_reset=self.is_reset,
            is_silent=self.is_silent,
        )
        return Delta(states, head, sequence)

    def _listed_again(self) -> dict[BlockHash, bytes]:
        states = {}
        index, worker = self._index, self._worker
        for name in self._backlog[-DELTA_BLOCKS:]:
            block = self._source.block_of(name)
            parent = index.parent(worker, block) if block is not None else None
            if block is not None and parent is not None:
                states[block] = pack_state(parent, index.copies(worker, block), name)
        return states
