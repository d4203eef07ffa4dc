"""Captured requests: a file with the JSON body of one client request a line."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import orjson

from warmup.documents import MAX_DOCUMENT_BYTES, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from warmup.documents import Ids
    from warmup.manifest import CapturedEntry

# JSON spells one byte of text with up to six.
MAX_LINE_BYTES = 2 * MAX_DOCUMENT_BYTES


def read_captured(
    folder: Path, entry: CapturedEntry, model: str, ids: Ids
) -> Iterator[tuple[str, bytes] | Problem]:
    """Yield (id, body as it stands) of each line that is not blank, one in memory at a time.

    Args:
        folder: The manifest's; the path is relative to it.
        entry: Names the file.
        model: Bodies for another model are problems.
        ids: Those given so far; mutated.
    """
    num_found = 0
    try:
        for number, line in _lines(folder / entry.file):
            num_found += 1
            name = f"{entry.file}:{number}"
            if line is None:
                yield Problem(name, f"too large: expected at most {MAX_LINE_BYTES >> 20} MiB")
            elif reason := _fault(line, model):
                yield Problem(name, reason)
            else:
                yield ids.claim(name, f"line {number} of {entry.file}") or (name, line)
    except OSError as error:
        yield Problem(entry.file, f"cannot be read: {error.strerror or error}")
        return
    if not num_found:
        yield Problem(entry.file, "empty: expected one request body a line")


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number, line) of those with something in them; None for a line beyond the bound.

    Raises:
        OSError: If the file cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("no regular file")
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                yield number, None
            elif stripped := line.strip():
                yield number, stripped


def _fault(line: bytes, model: str) -> str | None:
    """Return what is wrong with a line, None if it is a request."""
    try:
        body = orjson.loads(line)
    except ValueError as error:
        return f"expected a JSON object: {error}"
    if not isinstance(body, dict):
        return f"expected a JSON object, got {type(body).__name__}"
    if body.get("model") != model:
        return f"expected a request for the model {model!r}, got {str(body.get('model'))[:80]!r}"
    if not body.get("messages") and not body.get("prompt"):
        return "expected messages (chat) or a prompt (completions)"
    return None
