"""Log lines on stderr: JSON for machines, plain text on a terminal."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure(level: str) -> None:
    """Set up structlog for the whole process; ``level`` is a standard level name."""
    is_terminal = sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not is_terminal),
    ]
    renderer: structlog.typing.Processor
    if is_terminal:
        renderer = structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ)
    else:
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # Libraries and the engine log through the standard library: same form, same place.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
