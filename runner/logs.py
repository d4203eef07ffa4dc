"""Log lines on stderr: JSON for machines, plain text on a terminal."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure(level: str) -> None:
    """Set up structlog for the whole process; ``level`` is a standard level name."""
    is_terminal = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ)
        if is_terminal
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not is_terminal),
            *([] if is_terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
