"""Which pages there are."""

from __future__ import annotations

from pathlib import Path

from deploy.reference import cli, config, metrics

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


def rendered() -> dict[str, str]:
    """Return the text of every page, by its file's name."""
    return {"cli.md": cli.page(), "config.md": config.page(), "metrics.md": metrics.page()}
