"""What a directory of segments holds when it is opened: only headers and tables are read.

A file that is not what we would have written is renamed to ``.bad`` and kept for whoever wants to
look; nothing in it is trusted.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from runner.tiers.segments.arena import Arena
from runner.tiers.segments.direct_io import read_whole
from runner.tiers.segments.files import Segment, SegmentFds
from runner.tiers.segments.layout import PAGE_BYTES, EntryError, HeaderError
from runner.tiers.segments.usage import BAD_SUFFIX, SEGMENT_NAME, TEMPORARY_SUFFIX
from runner.tiers.types import Place

if TYPE_CHECKING:
    from pathlib import Path

    from runner.kvkeys import KvKey
    from runner.tiers.segments.direct_io import Os
    from runner.tiers.segments.layout import Entry, SegmentLayout
    from runner.tiers.segments.tally import Tally

_log = structlog.get_logger()


class Recovery:
    """Opens what is in one namespace's directory; its lock is held, nobody else writes there."""

    def __init__(
        self, directory: Path, layout: SegmentLayout, files: Os, tally: Tally, *, is_direct: bool
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._files = files
        self._tally = tally
        self._is_direct = is_direct

    def run(self) -> tuple[list[Segment], int]:
        """Return the whole segments, by number, and the next number that is free.

        Raises:
            OSError: If the directory cannot be listed.
        """
        segments = []
        next_number = 0
        for path in sorted(self._directory.iterdir()):
            match = SEGMENT_NAME.match(path.name)
            if match is None:
                continue
            if path.name.endswith(TEMPORARY_SUFFIX):
                with suppress(OSError):
                    path.unlink()
                continue
            number = int(match[1])
            next_number = max(next_number, number + 1)
            segment = self._open(path, number) if match[0] == path.name else None
            if segment is not None:
                segments.append(segment)
        return segments, next_number

    def _open(self, path: Path, number: int) -> Segment | None:
        try:
            fds = SegmentFds(self._files, path, 0, is_direct=self._is_direct)
            try:
                table = self._table(fds, number)
            except (HeaderError, OSError):
                fds.close()
                raise
        except HeaderError as error:
            self._set_aside(path, str(error))
            return None
        except OSError as error:
            self._tally.add("segments_unreadable")
            _log.warning("segment left out", path=str(path), error=str(error))
            return None
        return Segment(path, self._layout, self._files, fds, table)

    def _table(self, fds: SegmentFds, number: int) -> bytearray:
        page = bytearray(PAGE_BYTES)
        count = read_whole(self._files, fds.buffered, memoryview(page), 0)
        num_slots = self._layout.parse_header(bytes(page[:count]), number)
        expected, found = self._layout.file_bytes(num_slots), os.fstat(fds.buffered).st_size
        if found != expected:
            raise HeaderError(f"it has {found} bytes, expected {expected}")
        table = bytearray(self._layout.table_bytes(num_slots))
        if read_whole(self._files, fds.buffered, memoryview(table), PAGE_BYTES) < len(table):
            raise HeaderError("its table is cut off")
        return table

    def _set_aside(self, path: Path, reason: str) -> None:
        target = path.with_name(path.name + BAD_SUFFIX)
        copy = 2
        while target.exists():
            target = path.with_name(f"{path.name}.{copy}{BAD_SUFFIX}")
            copy += 1
        try:
            self._files.rename(path, target)
        except OSError as error:
            self._tally.add("segments_unreadable")
            _log.warning("segment left out", path=str(path), reason=reason, error=str(error))
            return
        self._tally.add("segments_set_aside")
        _log.warning(
            "segment set aside; it counts against the capacity until it is removed",
            path=str(target),
            reason=reason,
        )


def scan(segments: list[Segment], layout: SegmentLayout, tally: Tally) -> tuple[list[Place], int]:
    """Return the newest copy of every block in some segments, and the next sequence.

    Older copies and damaged entries are freed. Slots are numbered as an arena of these segments
    numbers them.
    """
    newest: dict[KvKey, tuple[Entry, int]] = {}
    next_sequence = 1
    arena = Arena(segments)
    num_damaged = 0
    first_slot = 0
    for segment in segments:
        for index, raw in enumerate(segment.entries(0, segment.num_slots)):
            slot = first_slot + index
            try:
                entry = layout.parse_entry(raw)
            except EntryError:
                num_damaged += 1
                _free(arena, slot, layout)
                continue
            if entry is None:
                continue
            next_sequence = max(next_sequence, entry.sequence + 1)
            older = newest.get(entry.record.key)
            if older is not None and older[0].sequence > entry.sequence:
                _free(arena, slot, layout)
                continue
            if older is not None:
                _free(arena, older[1], layout)
            newest[entry.record.key] = (entry, slot)
        first_slot += segment.num_slots
    if num_damaged:
        tally.add("damaged_entries", num_damaged)
        _log.warning("damaged entries left out", count=num_damaged)
    return [Place(entry.record, slot) for entry, slot in newest.values()], next_sequence


def _free(arena: Arena, slot: int, layout: SegmentLayout) -> None:
    found = arena.locate(slot)
    if found is None:
        return
    segment, index = found
    try:
        segment.put_entries(index, [layout.free_entry])
    except OSError:
        segment.put_mirror(index, [layout.free_entry])
