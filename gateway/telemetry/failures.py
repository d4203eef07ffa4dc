"""Exceptions in the log: what failed and where, without their messages.

A message may quote what it failed on: a prompt, a header, a key. The type and the places in the
code are enough to find a defect; ``telemetry.log_level: debug`` has the messages as well.
"""

from __future__ import annotations

import logging
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, WrappedLogger

# The innermost calls: where it failed, and who called that with what.
MAX_FRAMES = 12
# Causes of causes; a chain can be a circle.
MAX_CAUSES = 4


def failure(error: BaseException) -> dict[str, list[str]]:
    """Describe an exception: the types of it and its causes, and the calls it came through."""
    types: list[str] = []
    each: BaseException | None = error
    while each is not None and len(types) < MAX_CAUSES:
        types.append(type(each).__qualname__)
        each = each.__cause__ or each.__context__
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    at = [f"{_shown(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": types, "at": at}


def without_messages(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Exchange ``exc_info`` for what ``failure`` says of it; a processor of structlog."""
    given = event.pop("exc_info", None)
    if given is True:
        given = sys.exc_info()[1]
    elif isinstance(given, tuple):
        given = given[1]
    if isinstance(given, BaseException):
        event.update(failure(given))
    return event


class LibraryLog(logging.Handler):
    """Gives warnings of libraries, which log in Python's own way, a line like all others."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record: whose it is, and the words that the library wrote itself."""
        # The arguments, and what a formatted message has on further lines, may be a client's.
        what = str(record.msg).partition("\n")[0]
        log = structlog.get_logger("warmlane")
        told = {"logger": record.name, "what": what, "exc_info": record.exc_info or None}
        if record.levelno >= logging.ERROR:
            log.error("library", **told)
        else:
            log.warning("library", **told)


def _shown(filename: str) -> str:
    """Return a file's name with its package's, which is enough to find it."""
    path = Path(filename)
    return f"{path.parent.name}/{path.name}"
