"""A runner whose disk can be made unreadable from outside, for ``bench.soak``.

    python -m bench.soak_disk FAULT OPTIONS OF THE RUNNER

While the file ``FAULT`` is there, the share of the disk tier's reads that it says ends with EIO,
those made while the runner starts too. Everything else is the runner that users start: the fault
sits below it, where a bad disk's is.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runner.tiers.segments.direct_io import Os


@contextmanager
def unreadable(fault: Path, share: float) -> Iterator[None]:
    """Let this share of the reads fail of the runner that was started with ``fault``."""
    # Renamed, so that the runner never sees half of it.
    draft = fault.with_suffix(".draft")
    draft.write_text(str(share))
    draft.rename(fault)
    try:
        yield
    finally:
        fault.unlink()


def num_spoiled(fault: Path) -> int:
    """Return how many reads have failed of the runners that were started with ``fault``."""
    try:
        return _tally(fault).stat().st_size
    except FileNotFoundError:
        return 0


def spoil_reads(fault: Path, rng: random.Random) -> None:
    """Let reads of this process's segment files fail while ``fault`` says so."""
    from runner.tiers.segments import direct_io

    def preadv(files: Os, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if rng.random() >= _share(fault):
            return os.preadv(fd, buffers, offset)
        _count(fault)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    direct_io.Os.preadv = preadv  # type: ignore[method-assign]


def _share(fault: Path) -> float:
    try:
        return float(fault.read_text())
    except FileNotFoundError:
        return 0.0


def _count(fault: Path) -> None:
    """Add a byte to the tally: appending needs no lock, and outlives a kill."""
    with _tally(fault).open("ab", buffering=0) as tally:
        tally.write(b".")


def _tally(fault: Path) -> Path:
    return fault.with_suffix(".spoiled")


def main() -> int:
    """Start the runner."""
    from runner.__main__ import main as run

    spoil_reads(Path(sys.argv[1]), random.Random())
    return run(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
