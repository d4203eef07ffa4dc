"""One open segment file: its table, mirrored in memory, and its slots.

Payload goes past the page cache where the filesystem allows it, the table through it: the kernel
keeps what was written if the process dies, and nothing here waits for the disk. A power cut can
leave an entry without its payload; the payload's checksum then makes it a miss.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from runner.tiers.segments.direct_io import read_whole, write_whole
from runner.tiers.segments.layout import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from runner.tiers.segments.direct_io import Os
    from runner.tiers.segments.layout import SegmentLayout


class Segment:
    """A segment file. Slots are numbered from 0 within it.

    Attributes:
        path: Of the file.
        num_slots: Slots it has.
        num_bytes: Its size.
        num_live: Slots that hold a block.
        lock: Held while entries change, so that file and mirror agree.
    """

    def __init__(
        self, path: Path, layout: SegmentLayout, files: Os, fds: SegmentFds, table: bytearray
    ) -> None:
        self.path = path
        self.lock = threading.Lock()
        self._layout = layout
        self._files = files
        self._fds = fds
        self._table = table
        self.num_slots = len(table) // layout.entry_bytes
        self.num_bytes = layout.file_bytes(self.num_slots)
        self._data_offset = layout.data_offset(self.num_slots)
        self.num_live = sum(raw != layout.free_entry for raw in self.entries(0, self.num_slots))

    def entries(self, first: int, count: int) -> list[bytes]:
        """Return the entries of neighbouring slots. Any thread."""
        size = self._layout.entry_bytes
        raw = bytes(self._table[first * size : (first + count) * size])
        return [raw[at : at + size] for at in range(0, len(raw), size)]

    def put_entries(self, first: int, entries: Sequence[bytes]) -> None:
        """Write the entries of neighbouring slots, to the file and then to the mirror.

        The caller holds ``lock``.

        Raises:
            OSError: As the medium says; the mirror is unchanged then.
        """
        size = self._layout.entry_bytes
        raw = b"".join(entries)
        write_whole(self._files, self._fds.buffered, [raw], PAGE_BYTES + first * size, unit=1)
        self.put_mirror(first, entries)

    def put_mirror(self, first: int, entries: Sequence[bytes]) -> None:
        """Change what this process knows of neighbouring slots; the caller holds ``lock``."""
        size, free = self._layout.entry_bytes, self._layout.free_entry
        before = self.entries(first, len(entries))
        self.num_live += sum(raw != free for raw in entries) - sum(raw != free for raw in before)
        self._table[first * size : (first + len(entries)) * size] = b"".join(entries)

    def read_slots(self, first: int, target: memoryview) -> int:
        """Fill ``target``, a multiple of the stride, from a slot on; returns the bytes read.

        Raises:
            OSError: As the medium says.
        """
        offset = self._offset(first)
        count = read_whole(self._files, self._fds.data, target, offset)
        self._drop_from_cache(offset, count)
        return count

    def write_slots(self, first: int, buffers: Sequence[memoryview]) -> None:
        """Write neighbouring slots; every buffer is a multiple of the stride and aligned.

        Raises:
            OSError: As the medium says; any part may have been written.
        """
        offset = self._offset(first)
        write_whole(self._files, self._fds.data, buffers, offset, unit=PAGE_BYTES)
        self._drop_from_cache(offset, sum(buffer.nbytes for buffer in buffers))

    def close(self) -> None:
        """Close the file."""
        self._fds.close()

    def _offset(self, slot: int) -> int:
        return self._data_offset + slot * self._layout.stride_bytes

    def _drop_from_cache(self, offset: int, num_bytes: int) -> None:
        if not self._fds.is_direct:
            os.posix_fadvise(self._fds.data, offset, num_bytes, os.POSIX_FADV_DONTNEED)


class SegmentFds:
    """The two ways into one segment file: through the page cache and past it.

    Attributes:
        buffered: For header and table.
        data: For slots; the same as ``buffered`` where O_DIRECT is refused.
        is_direct: Whether ``data`` is O_DIRECT.
    """

    def __init__(self, files: Os, path: Path, flags: int, *, is_direct: bool) -> None:
        """Open the file with ``flags``; raises OSError."""
        self.is_direct = is_direct
        self.buffered = self.data = files.open(path, os.O_RDWR | flags)
        if not is_direct:
            return
        try:
            self.data = files.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            os.close(self.buffered)
            raise

    def close(self) -> None:
        """Close both."""
        for fd in {self.buffered, self.data}:
            os.close(fd)
