"""Who may write: one process per namespace's directory, one grower at a time per root.

Both are flocks: they end with the process that holds them, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from runner.tiers.segments.errors import SegmentsInUseError
from runner.tiers.segments.usage import LOCK_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Enough for any process id.
_PID_BYTES = 20


class DirectoryLock:
    """The right to write in one directory, from construction until ``release``."""

    def __init__(self, directory: Path) -> None:
        """Take it.

        Raises:
            SegmentsInUseError: If another process, or another store of this one, has it.
            OSError: If the lock file cannot be made.
        """
        path = directory / LOCK_FILE
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _lock(self._fd, directory)
                # Whoever removed the directory's content may have taken this very file with it.
                if _is_same_file(self._fd, path):
                    break
            except BaseException:
                os.close(self._fd)
                raise
            os.close(self._fd)
        # Only said to whoever comes second; a full disk must not keep the first one out.
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Give it up."""
        os.close(self._fd)


def _lock(fd: int, directory: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        written = os.pread(fd, _PID_BYTES, 0)
        pid = int(written) if written.isdigit() else None
        raise SegmentsInUseError(directory, pid) from None


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def root_locked(root: Path) -> Iterator[None]:
    """Hold the root while room in it is measured and taken; waits for others to be done.

    Filesystems without locks on directories go without: two openers that start at the same moment
    may then together pass the limit by one segment.
    """
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
