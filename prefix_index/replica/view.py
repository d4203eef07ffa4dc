"""One worker as this process sees it: who reads its events, and how far its view has come."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from prefix_index.holdings import ONE_GPU_COPY
from prefix_index.replica.codec import Head, SharedValueError, entry_order, unpack_delta
from prefix_index.replica.publication import Publication

if TYPE_CHECKING:
    from prefix_index.blocks import BlockHash
    from prefix_index.events import EngineHash
    from prefix_index.index import Index
    from prefix_index.replica.source import Source

# hold: it reads the events and publishes. tail: it takes what the holder publishes. alone: it reads
# the events because nobody can be asked who should.
Role = Literal["none", "hold", "tail", "alone"]

# Deltas that may wait for a load to end, some 10 MB at most; beyond it the load starts again.
_MAX_WAITING: Final = 4096


class Entry:
    """One delta as it came from the stream."""

    __slots__ = ("data", "head", "id", "last")

    def __init__(self, entry_id: bytes, last: bytes, head: Head, data: bytes) -> None:
        self.id = entry_id
        self.last = last
        self.head = head
        self.data = data


class View:
    """One worker's blocks in the index, as far as this package writes them. Event loop only.

    Attributes:
        role: What this process does about the worker.
        lease: Value of our lease while ``role`` is ``hold``; fences what is published.
        holder: Who reads its events, as last seen in Redis.
        applied: Id of the last delta in the view, published or taken over; empty before the first.
        current_s: When the view was last known to be the truth; None before.
        needs_load: The view cannot be continued and must be read as a whole.
        is_loading: That is happening; deltas wait in ``waiting``.
        num_shared: Blocks that Redis has of it.
        decode_errors: Values of it in Redis that could not be read.
        loads: Times the whole state was read.
    """

    def __init__(self, index: Index, worker: str, source: Source) -> None:
        self.worker = worker
        self.source = source
        self.publication = Publication(index, worker, source)
        self.role: Role = "none"
        self.lease = b""
        self.holder = ""
        self.generation = 0
        self.applied = b""
        self.head = Head()
        self.current_s: float | None = None
        self.needs_load = False
        self.is_loading = False
        self.waiting: deque[Entry] = deque()
        self.num_shared = 0
        self.decode_errors = 0
        self.loads = 0
        # The last delta may have reached Redis although its answer did not come.
        self.is_unsure = False
        # What is in Redis or here cannot be continued from.
        self.is_broken = False
        self.loaded_s = float("-inf")
        # Where the stream stood when the view was last found to be behind.
        self.behind_at: bytes | None = None
        self._index = index
        self._is_following = False

    @property
    def is_following(self) -> bool:
        """Whether this process reads the worker's events itself."""
        return self._is_following

    def follow(self) -> None:
        """Start reading the worker's events, behind what the view has."""
        if self._is_following:
            return
        self._is_following = True
        is_whole = not (self.is_loading or self.needs_load or self.is_broken)
        self.stop_loading()
        self.needs_load = self.is_broken = False
        publication = self.publication
        publication.forget()
        publication.epoch = self.head.epoch
        publication.is_silent = self.head.is_silent
        start = self.head.next_sequence, self.head.digest
        if self.applied and not (is_whole and start[0]):
            # Going on from a part would count copies twice: begin with the first batch.
            self.source.clear()
            publication.restart()
            start = 0, 0
        self.source.listen(publication.saw)
        self.source.follow(*start)

    def unfollow(self) -> None:
        """Stop reading the worker's events; what was not published must come from the others."""
        if not self._is_following:
            return
        self._is_following = False
        self.source.listen(None)
        self.source.unfollow()
        if self.is_unsure or not self.publication.is_empty:
            self.needs_load = True
        self.is_unsure = False
        self.publication.forget()

    def become_tail(self) -> None:
        """Take from now on what the holder publishes."""
        if self.role == "tail":
            return
        self.unfollow()
        self.role = "tail"
        self.source.set_silent(self.head.is_silent)

    def start_loading(self) -> None:
        """Let deltas wait from here on."""
        self.needs_load = False
        self.is_loading = True
        self.waiting.clear()

    def stop_loading(self) -> None:
        """Let no delta wait any more; one that waits now is a hole."""
        if self.is_loading and self.waiting:
            self.needs_load = True
        self.is_loading = False
        self.waiting.clear()

    def take(self, entry: Entry) -> None:
        """Take over a delta of the stream, in its order, or find that there is a hole.

        Raises:
            SharedValueError: If it cannot be read; the view then needs a load.
        """
        if self.is_loading:
            if len(self.waiting) >= _MAX_WAITING:
                self.needs_load = True
                self.waiting.clear()
            self.waiting.append(entry)
        elif self.role == "tail" and not self.needs_load:
            self.apply(entry)

    def apply(self, entry: Entry) -> None:
        """Write a delta, if it is the next one.

        Raises:
            SharedValueError: If it cannot be read; the view then needs a load.
        """
        if self.applied and entry_order(entry.id) <= entry_order(self.applied):
            return
        if not entry.head.is_reset and entry.last != self.applied:
            self.needs_load = True
            return
        self.source.set_silent(entry.head.is_silent)
        if entry.head.is_reset:
            self.source.clear()
        try:
            self._write(entry.data)
        except SharedValueError:
            self.needs_load = True
            raise
        self.applied = entry.id
        self.head = entry.head

    def _write(self, data: bytes) -> None:
        index, worker = self._index, self.worker
        names: list[EngineHash] = []
        named: list[BlockHash] = []
        # Blocks that come new, one below the other: storing them together costs a third.
        run: list[BlockHash] = []
        above = b""
        for block, state in unpack_delta(data):
            parent, copies, name = state
            if block == parent:
                raise SharedValueError("a block is its own parent")
            if name is not None:
                names.append(name)
                named.append(block)
            is_new = copies == ONE_GPU_COPY and not index.copies(worker, block)
            if run and not (is_new and parent == run[-1]):
                index.store(worker, run, above)
                run = []
            if not is_new:
                index.set_copies(worker, block, parent, copies)
                continue
            if not run:
                above = parent
            run.append(block)
        index.store(worker, run, above)
        self.source.adopt(names, named)
