"""A file that lines are appended to, through rotation and full disks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterable

# Readable by the operator's group; others have no business with who asked for what.
FILE_MODE = 0o640

log = structlog.get_logger("warmlane")


class AppendFile:
    """A file that lines are appended to, whatever happens to it; one thread only.

    Attributes:
        written: Whole lines written.
        failed: Lines that could not be.
    """

    def __init__(self, path: str) -> None:
        self.written = 0
        self.failed = 0
        self._path = path
        self._is_torn = False
        self._is_failing = False
        self._fd: int | None = self._open()

    def write(self, lines: Iterable[bytes]) -> None:
        """Append lines, each with a line end; counts, never raises."""
        lines = list(lines)
        if not lines:
            return
        try:
            done = self._append(lines)
        except OSError as error:
            done = 0
            self._report(error)
        else:
            if done == len(lines):
                self._is_failing = False
        self.written += done
        self.failed += len(lines) - done

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, lines: list[bytes]) -> int:
        """Return how many lines are on disk whole."""
        fd = self._current()
        # Half a line that a full disk left must not swallow the next one.
        data = (b"\n" if self._is_torn else b"") + b"\n".join(lines) + b"\n"
        done = 0
        try:
            while done < len(data):
                done += os.write(fd, memoryview(data)[done:])
        except OSError as error:
            self._report(error)
        whole, end = 0, len(data) - sum(map(len, lines)) - len(lines)
        for line in lines:
            end += len(line) + 1
            # Without its line end, too: the next write begins with one.
            whole += end - 1 <= done
        if done:
            self._is_torn = data[done - 1 : done] != b"\n"
        return whole

    def _current(self) -> int:
        """Return the file of that name, opened anew if it was moved away."""
        if self._fd is not None:
            try:
                named, opened = os.stat(self._path), os.fstat(self._fd)
                is_same = (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)
            except FileNotFoundError:
                is_same = False
            if not is_same:
                self.close()
        if self._fd is None:
            self._fd = self._open()
            self._is_torn = False
        return self._fd

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def _report(self, error: OSError) -> None:
        """Say it once, until writing works again."""
        if not self._is_failing:
            self._is_failing = True
            log.warning("log_not_written", path=self._path, error=error.strerror)
