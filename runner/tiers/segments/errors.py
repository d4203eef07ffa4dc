"""What opening a segment directory can fail with; reads and writes answer with results instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class SegmentsError(Exception):
    """The directory cannot be used; the message says which and why, for whoever configured it."""


class SegmentsInUseError(SegmentsError):
    """Another process writes there: a directory has one writer.

    Attributes:
        directory: Which.
        pid: Of the other process, None where it could not be read.
    """

    def __init__(self, directory: Path, pid: int | None) -> None:
        holder = f"process {pid}" if pid is not None else "another process"
        super().__init__(
            f"{directory} is in use by {holder}; give each runner a directory of its own, "
            "or let them share blocks through the remote tier"
        )
        self.directory = directory
        self.pid = pid
