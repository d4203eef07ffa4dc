"""The disk tier's store: a directory of segments, one writer, every read verified.

No write waits for the disk (``files.py``); nothing the medium does raises (a result says it); what
is found after a crash is what checksums prove.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from runner.tiers.segments.arena import Arena
from runner.tiers.segments.direct_io import Os, takes_direct_io
from runner.tiers.segments.errors import SegmentsError
from runner.tiers.segments.grow import Grower
from runner.tiers.segments.layout import LAYOUT_VERSION, SegmentLayout
from runner.tiers.segments.locks import DirectoryLock
from runner.tiers.segments.reading import BlockReader
from runner.tiers.segments.recover import Recovery, scan
from runner.tiers.segments.tally import SegmentStats, Tally
from runner.tiers.segments.usage import NAMESPACE_FILE, TEMPORARY_SUFFIX, namespaces
from runner.tiers.segments.writing import BlockWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from runner.kvkeys import KvKey
    from runner.tiers.segments.files import Segment
    from runner.tiers.types import Deliver, Outcome, Place

# Hex digits of a namespace in its directory's name; the whole digest stands in every header.
_NAME_DIGITS = 16

_log = structlog.get_logger()


class SegmentStore:
    """A ``BlockStore`` in segment files; made by ``open``.

    Any thread may call, several at once; the figures are cheap and may be read by the engine
    thread. Slots are given out by whoever uses the store: 0 to ``ready_slots`` - 1 can be written.

    Attributes:
        block_bytes: Of a payload.
        num_slots: Slots there will never be more of.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        arena: Arena,
        lock: DirectoryLock,
        grower: Grower,
        *,
        next_sequence: int,
        is_direct: bool,
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        self.block_bytes = layout.block_bytes
        self.num_slots = max(grower.capacity_bytes // layout.stride_bytes, arena.num_slots)
        self._arena = arena
        self._lock = lock
        self._grower = grower
        self._is_direct = is_direct
        self._tally = tally
        self._writer = BlockWriter(
            layout, arena, next_sequence=next_sequence, tally=tally, clock=clock
        )
        self._reader = BlockReader(
            layout, arena, forget=self._writer.forget_entry, tally=tally, clock=clock
        )
        grower.start()

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        namespace: KvKey,
        facts: Mapping[str, object],
        block_bytes: int,
        block_size: int,
        capacity_bytes: int,
        clock: Callable[[], float],
        files: Os | None = None,
    ) -> tuple[SegmentStore, list[Place]]:
        """Open a namespace's directory under ``root`` and begin to make segments in it.

        Args:
            root: May hold several namespaces; made if it is not there.
            namespace: Digest of everything that makes the bytes usable.
            facts: What the digest is over, for people: written to namespace.json.
            block_bytes: Payload of a block.
            block_size: Tokens of a block.
            capacity_bytes: Bound for all files under ``root``, other namespaces' included.
            clock: Monotonic, seconds; deadlines of reads are on it.
            files: The system calls.

        Returns:
            The store, and the newest copy of every block found in the directory.

        Raises:
            SegmentsInUseError: If another process writes there.
            SegmentsError: If the directory cannot be used or the capacity holds no block.
        """
        files = files or Os()
        layout = SegmentLayout(namespace, block_bytes, block_size)
        if not layout.slots_within(capacity_bytes):
            raise SegmentsError(
                f"{capacity_bytes} bytes hold no block of {block_bytes} bytes; "
                f"expected at least {layout.file_bytes(1)}"
            )
        directory = root / namespace.hex()[:_NAME_DIGITS]
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = DirectoryLock(directory)
        except OSError as error:
            raise SegmentsError(f"{directory} cannot be used for segments: {error}") from error
        try:
            return cls._opened(directory, layout, lock, facts, capacity_bytes, clock, files)
        except BaseException as error:
            lock.release()
            if not isinstance(error, OSError):
                raise
            raise SegmentsError(f"{directory} cannot be used for segments: {error}") from error

    @classmethod
    def _opened(
        cls,
        directory: Path,
        layout: SegmentLayout,
        lock: DirectoryLock,
        facts: Mapping[str, object],
        capacity_bytes: int,
        clock: Callable[[], float],
        files: Os,
    ) -> tuple[SegmentStore, list[Place]]:
        _describe(directory, layout, facts)
        is_direct = takes_direct_io(files, directory)
        if not is_direct:
            _log.warning("no O_DIRECT: segments go through the page cache", path=str(directory))
        tally = Tally()
        recovery = Recovery(directory, layout, files, tally, is_direct=is_direct)
        segments, next_number = recovery.run()
        segments = _within(segments, directory.parent, capacity_bytes)
        places, next_sequence = scan(segments, layout, tally)
        arena = Arena(segments)
        grower = Grower(
            directory,
            layout,
            arena,
            capacity_bytes=capacity_bytes,
            next_number=next_number,
            is_direct=is_direct,
            files=files,
            tally=tally,
            clock=clock,
        )
        grower.measure()
        if grower.other_namespaces_bytes:
            _log.info(
                "other namespaces use part of the capacity; "
                "runner.tiers.segments.clean lists and deletes them",
                root=str(directory.parent),
                num_bytes=grower.other_namespaces_bytes,
            )
        store = cls(
            layout,
            arena,
            lock,
            grower,
            next_sequence=next_sequence,
            is_direct=is_direct,
            tally=tally,
            clock=clock,
        )
        return store, places

    @property
    def ready_slots(self) -> int:
        """Slots that can be written; grows while the store is open, never shrinks."""
        return self._arena.num_slots

    @property
    def is_growing(self) -> bool:
        """Whether more slots are being made, or will be once those there are used."""
        return self._grower.is_growing

    @property
    def is_paused(self) -> bool:
        """Whether writing has stopped for a while: the medium refused, or never took a segment."""
        return self._writer.is_paused or (not self.ready_slots and self._grower.is_failing)

    def read(self, wanted: Sequence[Place], deliver: Deliver, deadline_s: float) -> Outcome:
        """See ``BlockStore.read``."""
        return self._reader.read(wanted, deliver, deadline_s)

    def write(self, places: Sequence[Place], payloads: Sequence[memoryview]) -> list[bool]:
        """See ``BlockStore.write``. Neighbouring slots go out together, from aligned memory as is.

        Raises:
            ValueError: If a payload is not of a block's size.
        """
        stored = self._writer.write(places, payloads)
        self._grower.wake()
        return stored

    def invalidate(self, slots: Sequence[int]) -> None:
        """Forget what is in these slots, also for the next opening."""
        self._writer.forget(slots)

    def stats(self) -> SegmentStats:
        """Return figures of this moment."""
        tally = self._tally
        return SegmentStats(
            capacity_bytes=self._grower.capacity_bytes,
            file_bytes=sum(segment.num_bytes for segment in self._arena.segments),
            other_namespaces_bytes=self._grower.other_namespaces_bytes,
            set_aside_bytes=self._grower.set_aside_bytes,
            ready_slots=self.ready_slots,
            live_slots=self._arena.num_live,
            is_direct=self._is_direct,
            is_paused=self.is_paused,
            damaged_reads_total=tally["damaged_reads"],
            damaged_entries_total=tally["damaged_entries"],
            failed_reads_total=tally["failed_reads"],
            failed_writes_total=tally["failed_writes"],
            refused_writes_total=tally["refused_writes"],
            segments_set_aside_total=tally["segments_set_aside"],
            segments_unreadable_total=tally["segments_unreadable"],
            failed_segments_total=tally["failed_segments"],
            pauses_total=tally["pauses"],
        )

    def close(self) -> None:
        """Stop the background thread, close the files and let others open the directory."""
        self._grower.stop()
        self._reader.close()
        self._writer.close()
        for segment in self._arena.segments:
            segment.close()
        self._lock.release()


def _describe(directory: Path, layout: SegmentLayout, facts: Mapping[str, object]) -> None:
    """Write namespace.json for people; the store does without it."""
    content = {
        "namespace": layout.namespace.hex(),
        "layout_version": LAYOUT_VERSION,
        "block_bytes": layout.block_bytes,
        "block_size": layout.block_size,
        "facts": dict(facts),
    }
    temporary = directory / (NAMESPACE_FILE + TEMPORARY_SUFFIX)
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n")
        temporary.rename(directory / NAMESPACE_FILE)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        _log.warning("namespace not described", path=str(directory), error=str(error))


def _within(segments: list[Segment], root: Path, capacity_bytes: int) -> list[Segment]:
    """Return the segments that the capacity has room for; the emptiest of the others go first.

    A lowered limit takes effect at once. Other namespaces' files and those set aside are never
    removed for it.
    """
    excess = sum(usage.num_bytes for usage in namespaces(root)) - capacity_bytes
    kept = list(segments)
    for segment in sorted(segments, key=lambda segment: segment.num_live):
        if excess <= 0:
            break
        segment.close()
        try:
            segment.path.unlink()
        except OSError as error:
            _log.warning("segment over the capacity not removed", error=str(error))
        else:
            excess -= segment.num_bytes
            _log.info("segment removed: over the capacity", path=str(segment.path))
        kept.remove(segment)
    return kept
