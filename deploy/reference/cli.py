"""docs/reference/cli.md: what every command says of itself under ``--help``."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import warmlane
from gateway.__main__ import all_commands
from runner.config import make_parser
from warmup.__main__ import app as warmup_app

if TYPE_CHECKING:
    from collections.abc import Iterator

# Wide enough for most sentences, narrow enough for a browser.
WIDTH = 100

HEAD = """# Command line

Written by `python -m deploy.reference` from the commands themselves. Order of precedence: flag, \
environment (`WARMLANE_`, `__` between levels, lists as a whole; `WARMLANE_RUNNER__` for the \
runner), file, default. \
Data goes to stdout, talk and progress to stderr. Exit codes: 0 done, 1 failed, 2 usage, \
3 partial, 130 interrupted.
"""


def page() -> str:
    """Return the page."""
    sections = [
        ("warmlane", warmlane.USAGE),
        *_helps(all_commands(), "warmlane"),
        *_helps(warmup_app, "warmlane warmup"),
        ("warmlane runner", _runner()),
    ]
    return "\n".join(
        [HEAD, *(f"## {name}\n\n```\n{text.strip()}\n```\n" for name, text in sections)]
    )


def _helps(app: typer.Typer, name: str) -> Iterator[tuple[str, str]]:
    command = get_command(app)
    yield from _walk(command, typer.Context(command, info_name=name))


def _walk(command: object, context: typer.Context) -> Iterator[tuple[str, str]]:
    """Yield (name, help) of a command, or of all commands in a group."""
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            yield from _walk(child, typer.Context(child, info_name=name, parent=context))
    elif isinstance(command, TyperCommand):
        # Plain text: what typer draws otherwise is as wide as the terminal of the moment.
        command.rich_markup_mode = None
        context.terminal_width = context.max_content_width = WIDTH
        yield context.command_path, command.get_help(context)


def _runner() -> str:
    parser = make_parser()
    parser.formatter_class = partial(argparse.HelpFormatter, width=WIDTH)
    return parser.format_help()
