"""Which files a pattern names: every match once, in order, and what could not be looked into.

``*`` and ``?`` stay inside one path component, ``**`` spans any number of them. Names that begin
with a dot are matched only by patterns that say so, as in a shell: the hidden ``..data`` folders
of a mounted ConfigMap hold every file a second time.
"""

from __future__ import annotations

import os
import re
from fnmatch import translate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WILD = re.compile(r"[*?\[]")


class LookError(Exception):
    """Part of a tree could not be looked into; the message says where and why."""


def matches(folder: Path, pattern: str) -> Iterator[Path | LookError]:
    """Yield the files that ``pattern`` names below ``folder``, sorted, and what failed.

    Args:
        folder: What relative patterns are relative to.
        pattern: A path with wildcards; an absolute one ignores ``folder``.
    """
    parts = [part for part in (folder / pattern).parts if part != "."]
    wild = next((i for i, part in enumerate(parts) if _WILD.search(part)), len(parts) - 1)
    components = [_component(part) for part in parts[wild:]]
    yield from _walk(type(folder)(*parts[:wild]), components, {0}, ())


_Component = re.Pattern[str] | None


def _component(part: str) -> _Component:
    """Return what one component matches; None is ``**``."""
    if part == "**":
        return None
    hidden = "" if part.startswith(".") else r"(?!\.)"
    return re.compile(hidden + translate(part))


def _walk(
    folder: Path, pattern: list[_Component], starts: set[int], above: tuple[tuple[int, int], ...]
) -> Iterator[Path | LookError]:
    """Match names in ``folder`` with the components of ``pattern`` from any of ``starts`` on.

    All of them in one visit, so that no file is found twice. ``above`` are the folders on the way
    here.
    """
    try:
        at = folder.stat()
        if (me := (at.st_dev, at.st_ino)) in above:
            yield LookError(f"{folder}: a link back to a folder that it is in")
            return
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        yield LookError(f"{folder}: cannot be looked into: {error.strerror}")
        return
    for name in names:
        rests = {rest for start in starts for rest in _rests(name, pattern, start)}
        path = folder / name
        if rests and os.path.isdir(path):
            if below := rests - {len(pattern)}:
                yield from _walk(path, pattern, below, (*above, me))
        elif len(pattern) in rests:
            yield path


def _rests(name: str, pattern: list[_Component], start: int) -> Iterator[int]:
    """Yield where in ``pattern`` to go on behind a component of this name; its end is a match."""
    if start == len(pattern):
        return
    component = pattern[start]
    if component is not None:
        if component.match(name):
            yield start + 1
        return
    if not name.startswith("."):
        yield start
        if start + 1 == len(pattern):  # as the last component it means everything below
            yield start + 1
    yield from _rests(name, pattern, start + 1)
