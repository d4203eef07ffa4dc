"""Reading blocks: neighbours at once, every block verified before anybody sees it.

While one piece is verified and handed on, the next is on its way from the disk: at most one read
per caller is under way at any time.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.tiers.segments.direct_io import BufferStack
from runner.tiers.segments.layout import EntryError, checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.tiers.segments.arena import Arena
    from runner.tiers.segments.files import Segment
    from runner.tiers.segments.layout import Entry, SegmentLayout
    from runner.tiers.segments.tally import Tally
    from runner.tiers.types import BlockRecord, Deliver, Outcome, Place

# Read at once: enough that handing pieces from thread to thread costs little, and no more than this
# is read past a deadline.
_PIECE_BYTES = 8 * 2**20

# Helpers reading ahead: more callers at once than this read their pieces one after the other.
_MAX_READING_AHEAD = 4


@dataclass(frozen=True, slots=True)
class _Run:
    """Wanted blocks in neighbouring slots: one read."""

    segment: Segment
    slot: int
    records: list[BlockRecord]

    @property
    def end(self) -> tuple[Segment, int]:
        """The slot after it."""
        return self.segment, self.slot + len(self.records)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Wanted blocks that fit into one buffer.

    Attributes:
        first: Place of the first of them among all that is wanted.
        runs: Where they are.
    """

    first: int
    runs: list[_Run]

    @property
    def num_blocks(self) -> int:
        return sum(len(run.records) for run in self.runs)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block as read, not verified yet; ``raw`` and ``checksum`` are from before the read."""

    segment: Segment
    slot: int
    raw: bytes
    checksum: bytes
    payload: memoryview


@dataclass(frozen=True, slots=True)
class _Fetched:
    """The leading blocks of a piece, and why there are no more of them."""

    first: int
    blocks: list[_Block]
    outcome: Outcome


class BlockReader:
    """Reads of one store. Any thread, several at once."""

    def __init__(
        self,
        layout: SegmentLayout,
        arena: Arena,
        *,
        forget: Callable[[Segment, int, bytes], None],
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        """Make a reader.

        Args:
            layout: Of the segments.
            arena: Where the slots are.
            forget: Called with segment, slot and entry of a damaged block.
            tally: Where failures are counted.
            clock: Monotonic, seconds.
        """
        self._layout = layout
        self._arena = arena
        self._forget = forget
        self._tally = tally
        self._clock = clock
        self._max_blocks = max(1, _PIECE_BYTES // layout.stride_bytes)
        self._buffers = BufferStack(self._max_blocks * layout.stride_bytes)
        self._helpers = ThreadPoolExecutor(_MAX_READING_AHEAD, "segments-read")

    def close(self) -> None:
        """End the helpers."""
        self._helpers.shutdown()

    def read(self, wanted: Sequence[Place], deliver: Deliver, deadline_s: float) -> Outcome:
        """See ``BlockStore.read``."""
        pieces = self._pieces(wanted)
        with self._buffers.take() as here, self._buffers.take() as there:
            ahead: Future[_Fetched] | None = None
            try:
                for index, piece in enumerate(pieces):
                    if self._clock() >= deadline_s:
                        return "stopped"
                    fetched = ahead.result() if ahead else self._fetch(piece, here)
                    ahead = None
                    if index + 1 < len(pieces) and fetched.outcome == "done":
                        ahead = self._helpers.submit(self._fetch, pieces[index + 1], there)
                    outcome = self._hand_on(fetched, deliver, deadline_s)
                    if outcome != "done":
                        return outcome
                    here, there = there, here
            finally:
                # The buffers are not ours to give back while somebody reads into them.
                if ahead:
                    wait([ahead])
        # What has no slot was left out of the pieces.
        num_found = sum(piece.num_blocks for piece in pieces)
        return "done" if num_found == len(wanted) else "missing"

    def _pieces(self, wanted: Sequence[Place]) -> list[_Piece]:
        """Cut what is wanted into pieces, as far as there are such slots."""
        pieces: list[_Piece] = []
        for index, place in enumerate(wanted):
            found = self._arena.locate(place.slot)
            if found is None:
                break
            if index % self._max_blocks == 0:
                pieces.append(_Piece(index, []))
            runs = pieces[-1].runs
            if runs and runs[-1].end == found:
                runs[-1].records.append(place.record)
            else:
                runs.append(_Run(*found, [place.record]))
        return pieces

    def _fetch(self, piece: _Piece, buffer: memoryview) -> _Fetched:
        """Read the leading blocks of a piece that the tables say are there."""
        blocks: list[_Block] = []
        for run in piece.runs:
            target = buffer[len(blocks) * self._layout.stride_bytes :]
            found, outcome = self._fetch_run(run, target)
            blocks += found
            if outcome != "done":
                return _Fetched(piece.first, blocks, outcome)
        return _Fetched(piece.first, blocks, "done")

    def _fetch_run(self, run: _Run, target: memoryview) -> tuple[list[_Block], Outcome]:
        raw = run.segment.entries(run.slot, len(run.records))
        found: list[Entry] = []
        for raw_entry, record in zip(raw, run.records, strict=True):
            entry = self._entry(raw_entry, record)
            if entry is None:
                break
            found.append(entry)
        stride = self._layout.stride_bytes
        if not found:
            return [], "missing"
        try:
            count = run.segment.read_slots(run.slot, target[: len(found) * stride])
        except OSError:
            self._tally.add("failed_reads")
            return [], "failed"
        # A payload that the file's end cuts off is shorter, hence fails its checksum.
        came = target[:count]
        blocks = [
            _Block(
                run.segment,
                run.slot + index,
                raw[index],
                entry.checksum,
                came[index * stride : index * stride + self._layout.block_bytes],
            )
            for index, entry in enumerate(found)
        ]
        return blocks, "done" if len(blocks) == len(run.records) else "missing"

    def _entry(self, raw: bytes, record: BlockRecord) -> Entry | None:
        """Return the entry if it is of this very block."""
        try:
            entry = self._layout.parse_entry(raw)
        except EntryError:
            return None
        if entry is None or entry.record.key != record.key or entry.record.tokens != record.tokens:
            return None
        return entry

    def _hand_on(self, fetched: _Fetched, deliver: Deliver, deadline_s: float) -> Outcome:
        """Verify and deliver what was read."""
        for index, block in enumerate(fetched.blocks):
            if self._clock() >= deadline_s:
                return "stopped"
            if checksum(block.payload) != block.checksum:
                return self._damaged(block)
            if not deliver(fetched.first + index, block.payload):
                return "stopped"
        return fetched.outcome

    def _damaged(self, block: _Block) -> Outcome:
        if block.segment.entries(block.slot, 1) != [block.raw]:
            # Overwritten or forgotten while it was read: what was wanted is simply gone.
            return "missing"
        self._tally.add("damaged_reads")
        self._forget(block.segment, block.slot, block.raw)
        return "damaged"
