"""Rows of text as columns of equal width, as the commands print their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def aligned(rows: Sequence[tuple[str, ...]], sides: str) -> list[str]:
    """Return one line per row, two spaces between columns and none at the end.

    Args:
        rows: At least one, all of one length; the head is a row like any other.
        sides: ``l`` or ``r`` for each column: where its cells begin or end.

    Raises:
        ValueError: If a row has another number of cells than there are sides.
    """
    if any(len(row) != len(sides) for row in rows):
        raise ValueError(f"expected {len(sides)} cells a row, got {sorted({*map(len, rows)})}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in rows
    ]
