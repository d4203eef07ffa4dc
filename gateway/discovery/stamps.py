"""Whether a file became another one since it was looked at last."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Files are looked at this often: one system call, and nobody waits longer for a change.
LOOK_EVERY_S = 1.0

Stamp = tuple[int, int, int, int]


def stamp_of(path: str | Path) -> Stamp | None:
    """Return what changes whenever a file is written or replaced; None if it cannot be read.

    Links are followed, so a mounted ConfigMap, whose folder is exchanged as a whole, counts too.
    """
    try:
        found = os.stat(path)  # one call for links, devices and all
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
