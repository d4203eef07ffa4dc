"""Linux namespaces, as far as Python's library does not know them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNET = 0x40000000


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one, outer ones first; those that end meanwhile have none."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def own_ids(pid: int) -> list[str]:
    """Return a process's ids, one for each namespace that it is in."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{pid}/status").read_text()
        return status.partition("NSpid:")[2].splitlines()[0].split()
    return []


def enter(namespace: str) -> None:
    """Move this thread to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace, "rb") as opened:
        if libc.setns(opened.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
