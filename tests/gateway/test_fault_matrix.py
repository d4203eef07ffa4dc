"""The fault matrix: each cell ends as designed, on both fronts, and leaves nothing behind."""

from __future__ import annotations

import pytest

from gateway.proxy.server import Front
from tests.fakes.matrix import Cell, cells, play


@pytest.mark.parametrize("cell", list(cells()), ids=str)
async def test_a_worker_that_fails_costs_what_it_must(cell: Cell, front: Front) -> None:
    seen = await play(cell, front)

    assert (seen.alone, seen.beside, seen.attempts) == (cell.alone, cell.beside, cell.attempts)
