"""Making segments ahead of use: a new file's first writes are several times slower.

A segment is written full of zeros under a temporary name, reaches the disk, and only then gets its
name, so that whatever bears a segment's name is whole. All of it happens in a thread of its own.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from runner.tiers.segments.backoff import Backoff
from runner.tiers.segments.direct_io import aligned_buffer, write_whole
from runner.tiers.segments.files import Segment, SegmentFds
from runner.tiers.segments.layout import PAGE_BYTES
from runner.tiers.segments.locks import root_locked
from runner.tiers.segments.usage import TEMPORARY_SUFFIX, namespaces

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runner.tiers.segments.arena import Arena
    from runner.tiers.segments.direct_io import Os
    from runner.tiers.segments.layout import SegmentLayout
    from runner.tiers.segments.tally import Tally

# A store has some 64 files however large it is (two descriptors each), and small stores have files
# of at most this size, so that the first is ready soon.
_MAX_FILES = 64
_SMALL_SEGMENT_BYTES = 64 * 2**20
# Even a tiny store has several files: it can shrink by one and keep the others.
_MIN_FILES = 4

# Left to others on the filesystem: a twentieth of it, and never more than this.
_SPARE_DIVISOR = 20
_MAX_SPARE_BYTES = 2**30

# How often a store that may not grow looks whether others have made room.
_LOOK_AGAIN_S = 60.0

# Written at once while zeroing: enough for the disk's full rate, little enough to stop soon.
_ZERO_BYTES = 4 * 2**20

_log = structlog.get_logger()


class Grower:
    """Creates segments until the capacity is used, one segment ahead of the blocks.

    ``step`` and the thread's loop belong to one thread; everything else may be called from any.

    Attributes:
        capacity_bytes: Bound for all files under the root, other namespaces' included.
        other_namespaces_bytes: As last measured.
        set_aside_bytes: Of our ``.bad`` files, as last measured.
        is_growing: Whether more slots are being made, or will be once those there are used.
    """

    def __init__(
        self,
        directory: Path,
        layout: SegmentLayout,
        arena: Arena,
        *,
        capacity_bytes: int,
        next_number: int,
        is_direct: bool,
        files: Os,
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.other_namespaces_bytes = 0
        self.set_aside_bytes = 0
        self.is_growing = True
        self._directory = directory
        self._layout = layout
        self._arena = arena
        self._next_number = next_number
        self._is_direct = is_direct
        self._files = files
        self._tally = tally
        self._clock = clock
        self._backoff = Backoff(clock)
        self._rest_until_s = float("-inf")
        self._usual_slots = layout.slots_within(_segment_bytes(capacity_bytes)) or 1
        self._max_slots = self._usual_slots
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="segments-grow", daemon=True)

    @property
    def is_failing(self) -> bool:
        """Whether the last segment could not be made."""
        return self._backoff.delay_s > 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; a segment under way is given up and removed."""
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def wake(self) -> None:
        """Say that slots have been used."""
        if self._needs_more():
            self._wake.set()

    def measure(self) -> int:
        """Return the bytes under the root that are left of the capacity; may be negative.

        Raises:
            OSError: If the root cannot be listed.
        """
        used = namespaces(self._directory.parent)
        ours = [usage for usage in used if usage.name == self._directory.name]
        total = sum(usage.num_bytes for usage in used)
        self.other_namespaces_bytes = total - sum(usage.num_bytes for usage in ours)
        self.set_aside_bytes = sum(usage.set_aside_bytes for usage in ours)
        return self.capacity_bytes - total

    def step(self) -> float | None:
        """Create a segment if one is due; returns seconds until the next look, None: when woken."""
        rest_s = max(self._backoff.remaining_s, self._rest_until_s - self._clock())
        if rest_s > 0:
            return rest_s
        if not self._needs_more():
            self.is_growing = True
            return None
        temporary = self._path(TEMPORARY_SUFFIX)
        try:
            num_slots = self._reserve(temporary)
            if num_slots:
                self.is_growing = True
                self._fill(temporary, num_slots)
        except OSError as error:
            self._give_up(temporary, error)
            return self._backoff.remaining_s
        if not num_slots:
            self.is_growing = False
            self._rest_until_s = self._clock() + _LOOK_AGAIN_S
            return _LOOK_AGAIN_S
        return 0.0

    def _run(self) -> None:
        while not self._is_stopping:
            wait_s = self.step()
            self._wake.wait(wait_s)
            self._wake.clear()

    def _needs_more(self) -> bool:
        return self._arena.num_slots - self._arena.num_live < self._usual_slots

    def _path(self, suffix: str = "") -> Path:
        return self._directory / f"seg-{self._next_number:06d}.kv{suffix}"

    def _reserve(self, temporary: Path) -> int:
        """Take room for a segment, so that others see it taken; returns its slots."""
        with root_locked(self._directory.parent):
            disk = self._files.statvfs(self._directory)
            spare = min(disk.f_blocks * disk.f_frsize // _SPARE_DIVISOR, _MAX_SPARE_BYTES)
            free = disk.f_bavail * disk.f_frsize - spare
            room = min(self.measure(), free)
            num_slots = min(self._layout.slots_within(room), self._max_slots)
            if num_slots:
                fd = self._files.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                try:
                    os.ftruncate(fd, self._layout.file_bytes(num_slots))
                finally:
                    os.close(fd)
            return num_slots

    def _fill(self, temporary: Path, num_slots: int) -> None:
        """Write a reserved segment, name it and add it to the arena."""
        fds = SegmentFds(self._files, temporary, 0, is_direct=self._is_direct)
        try:
            if not self._write(fds, num_slots):
                temporary.unlink()
                fds.close()
                return
            path = self._path()
            self._files.rename(temporary, path)
            _sync_directory(self._files, self._directory)
        except OSError:
            fds.close()
            raise
        self._next_number += 1
        table = bytearray(self._layout.table_bytes(num_slots))
        self._arena.add(Segment(path, self._layout, self._files, fds, table))
        self._max_slots = self._usual_slots
        self._backoff.succeeded()

    def _write(self, fds: SegmentFds, num_slots: int) -> bool:
        """Write zeros and the header, and wait for the disk; False: stopped in between."""
        zeros = aligned_buffer(_ZERO_BYTES)
        offset, end = self._layout.data_offset(num_slots), self._layout.file_bytes(num_slots)
        while offset < end:
            if self._is_stopping:
                return False
            piece = zeros[: end - offset]
            write_whole(self._files, fds.data, [piece], offset, unit=PAGE_BYTES)
            offset += piece.nbytes
        table = bytes(self._layout.data_offset(num_slots) - PAGE_BYTES)
        header = self._layout.pack_header(self._next_number, num_slots)
        write_whole(self._files, fds.buffered, [header, table], 0, unit=1)
        self._files.fsync(fds.buffered)
        return True

    def _give_up(self, temporary: Path, error: OSError) -> None:
        with suppress(OSError):
            temporary.unlink()
        self._tally.add("failed_segments")
        self.is_growing = False
        # Where space is scarcer than the filesystem says (a quota), half a segment may still fit.
        self._max_slots = max(1, self._max_slots // 2)
        self._backoff.failed()
        _log.warning(
            "segment not created",
            directory=str(self._directory),
            error=str(error),
            retry_s=self._backoff.delay_s,
        )


def _segment_bytes(capacity_bytes: int) -> int:
    small = min(_SMALL_SEGMENT_BYTES, capacity_bytes // _MIN_FILES)
    return max(capacity_bytes // _MAX_FILES, small)


def _sync_directory(files: Os, directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.fsync(fd)
    finally:
        os.close(fd)
