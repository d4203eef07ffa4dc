"""The event loop and the logs of a gateway's processes."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

import structlog

from gateway.telemetry.failures import LibraryLog, without_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any, TypeVar

    T = TypeVar("T")


# How long a thread that tokenizes or compares may keep the interpreter while the event loop waits
# for it: five milliseconds, Python's own choice, would be added to requests several times.
SWITCH_S = 0.001


def run_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` on a fresh event loop.

    Raises:
        ConnectionError: If an address cannot be listened on.
    """
    sys.setswitchinterval(SWITCH_S)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(coroutine)
    except ConnectionError:
        raise
    except OSError as error:
        raise ConnectionError(f"cannot listen: {error}") from error


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's, or None for asyncio's own, which serves as well with more CPU."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def configure_logs(level: str) -> None:
    """One JSON line per event on stderr, also of libraries, and never an access log.

    Args:
        level: The least that is written; ``debug`` has the messages of exceptions as well, which
            may quote what clients sent.
    """
    told = structlog.processors.format_exc_info if level == "debug" else without_messages
    logging.basicConfig(handlers=[LibraryLog(logging.WARNING)], force=True)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            told,
            # As the lines of requests, which are written by hand: one text finds both.
            structlog.processors.JSONRenderer(separators=(",", ":")),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
