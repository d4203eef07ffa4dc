"""Reading and writing past the page cache: system calls, aligned memory, whole transfers.

O_DIRECT wants addresses, offsets and lengths that are multiples of the disk's block. Where a
filesystem refuses it, the same calls go through the page cache and what was moved is dropped from
there: blocks are cached once already, in the pool.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from runner.tiers.segments.layout import PAGE_BYTES
from runner.tiers.segments.usage import PROBE_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Os:
    """The system calls that can fail on a bad, full or slow disk; tests put their own here."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file, readable and writable by its owner alone: KV is as private as prompts."""
        return os.open(path, flags, 0o600)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into buffers; returns bytes read."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        """Write from buffers; returns bytes written."""
        return os.pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        """Wait until a file is on the disk."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its name."""
        os.rename(source, target)

    def statvfs(self, path: Path) -> os.statvfs_result:
        """Ask a filesystem for its size and free space."""
        return os.statvfs(path)


def aligned_buffer(num_bytes: int) -> memoryview:
    """Return zeroed memory that begins on a page, so that O_DIRECT takes it without a copy.

    Huge pages where the kernel has them: a transfer is then described in few pieces, which made
    reads of 360 KiB twice as fast.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # EINVAL from kernels built without huge pages.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def is_aligned(view: memoryview) -> bool:
    """Return whether O_DIRECT takes this memory as it is."""
    if view.nbytes % PAGE_BYTES:
        return False
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    return address % PAGE_BYTES == 0


class BufferStack:
    """Aligned buffers of one size, used again by whichever thread comes next.

    As many exist as were ever in use at once. Any thread.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        # append and pop of a list are atomic.
        self._free: list[memoryview] = []

    @contextmanager
    def take(self) -> Iterator[memoryview]:
        """Lend a buffer; its content is arbitrary."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = aligned_buffer(self._num_bytes)
        try:
            yield buffer
        finally:
            self._free.append(buffer)


def read_whole(files: Os, fd: int, target: memoryview, offset: int) -> int:
    """Fill ``target`` from a file; returns the bytes read, fewer only at the file's end.

    Raises:
        OSError: As the medium says.
    """
    done = 0
    while done < target.nbytes:
        count = files.preadv(fd, [target[done:]], offset + done)
        if count >= target.nbytes - done:
            return target.nbytes
        # Whatever cut it short, the next try must begin on a page again.
        if count < PAGE_BYTES:
            return done + count
        done += count - count % PAGE_BYTES
    return done


def write_whole(
    files: Os, fd: int, buffers: Sequence[memoryview | bytes], offset: int, *, unit: int
) -> None:
    """Write all of ``buffers`` one after the other.

    Args:
        files: The system calls.
        fd: Open for writing.
        buffers: What to write.
        offset: Where in the file.
        unit: After a short write the rest begins on a multiple of this many bytes.

    Raises:
        OSError: As the medium says; EIO if it takes less than ``unit`` bytes.
    """
    rest = [memoryview(buffer) for buffer in buffers]
    while rest:
        count = files.pwritev(fd, rest, offset)
        count -= count % unit
        if count <= 0:
            raise OSError(errno.EIO, "the disk took nothing")
        offset += count
        rest = _after(rest, count)


def _after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what follows the first ``num_bytes`` of some buffers."""
    for index, buffer in enumerate(buffers):
        if num_bytes < buffer.nbytes:
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= buffer.nbytes
    return []


def takes_direct_io(files: Os, directory: Path) -> bool:
    """Return whether the filesystem of ``directory`` reads and writes with O_DIRECT.

    Tried with a page in a file of its own: some filesystems refuse only the transfer.
    """
    path = directory / PROBE_FILE
    page = aligned_buffer(PAGE_BYTES)
    fd = -1
    try:
        fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        write_whole(files, fd, [page], 0, unit=PAGE_BYTES)
        return read_whole(files, fd, page, 0) == PAGE_BYTES
    except OSError:
        # Full or broken counts as refused: through the page cache it works at least later.
        return False
    finally:
        if fd >= 0:
            os.close(fd)
        with suppress(OSError):
            path.unlink()
