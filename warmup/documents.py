"""Reading documents: each one as the text it is, or by name why it cannot be used."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmup.manifest import MAX_ID_CHARS
from warmup.walk import LookError, matches

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from warmup.manifest import DocumentEntry

# Four million tokens and more than any context; half of the body a gateway takes by default.
MAX_DOCUMENT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Document:
    """One document that can be sent.

    Attributes:
        id: Its name in the gateway, in reports and on the ring.
        text: All of it, unchanged.
        entry: Where the manifest names it.
    """

    id: str
    text: str
    entry: DocumentEntry


@dataclass(frozen=True, slots=True)
class Problem:
    """Something the manifest names that cannot be warmed.

    Attributes:
        id: The document, pattern or captured line.
        reason: What is wrong and what was expected.
    """

    id: str
    reason: str


class Ids:
    """The ids given so far: reports and the gateway know documents by nothing else."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}

    def claim(self, name: str, source: str) -> Problem | None:
        """Give ``name`` to ``source``; the problem if it is given already, or is no id."""
        if len(name) > MAX_ID_CHARS:
            return Problem(
                name,
                f"{len(name)} characters are no id, expected at most {MAX_ID_CHARS}: give it one",
            )
        if (first := self._sources.get(name)) is not None:
            reason = f"the id stands twice, in {first} and {source}; the first one counts"
            return Problem(name, reason)
        self._sources[name] = source
        return None


def read_documents(folder: Path, entry: DocumentEntry, ids: Ids) -> Iterator[Document | Problem]:
    """Yield all documents of ``entry``, one at a time in memory.

    Args:
        folder: The manifest's; paths in it are relative to this.
        entry: Of the manifest.
        ids: Those given so far; mutated.
    """
    for name, source in _sources(folder, entry):
        if isinstance(source, Problem):
            yield source
        elif problem := ids.claim(name, printable(source or f"the text {name}")):
            yield problem
        else:
            yield _read(name, source, entry)


def printable(path: Path | str) -> str:
    """Return a path as text that JSON and a terminal can take, whatever bytes the name has."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _sources(folder: Path, entry: DocumentEntry) -> Iterator[tuple[str, Path | Problem | None]]:
    """Yield (id, file or problem) of one entry; None where the text stands in the manifest."""
    if entry.text is not None:
        assert entry.id is not None, "the manifest requires it"
        yield entry.id, None
    elif entry.file is not None:
        yield entry.id or entry.file, folder / entry.file
    elif entry.glob is not None:
        yield from _globbed(folder, entry.glob)


def _globbed(folder: Path, pattern: str) -> Iterator[tuple[str, Path | Problem]]:
    num_found = 0
    for found in matches(folder, pattern):
        num_found += 1
        if isinstance(found, LookError):
            text = printable(str(found))
            yield pattern, Problem(pattern, text)
        else:
            name = printable(os.path.relpath(found, folder))
            yield name, found
    if not num_found:
        yield pattern, Problem(pattern, "no file matches this pattern")


def _read(name: str, source: Path | None, entry: DocumentEntry) -> Document | Problem:
    if source is None:
        text = entry.text or ""
    else:
        try:
            text = read_text(source, MAX_DOCUMENT_BYTES)
        except UnusableFileError as error:
            return Problem(name, str(error))
    if not text.strip():
        return Problem(name, "empty")
    if "\x00" in text:
        return Problem(name, "binary: it holds NUL bytes; expected text in UTF-8")
    return Document(name, text, entry)


class UnusableFileError(Exception):
    """A file cannot be read as text; the message says why."""


def read_text(path: Path, max_bytes: int) -> str:
    """Return a regular file's text, byte for byte.

    Raises:
        UnusableFileError: If it is missing, unreadable, no regular file, too large or not UTF-8.
    """
    try:
        # Without blocking: opening a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise UnusableFileError("no regular file")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise UnusableFileError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise UnusableFileError(f"cannot be read: {error}") from error
    if len(data) > max_bytes:
        raise UnusableFileError(f"too large: expected at most {max_bytes >> 20} MiB")
    if b"\x00" in data:
        raise UnusableFileError("binary: it holds NUL bytes; expected text in UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableFileError(
            f"not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
        ) from error
