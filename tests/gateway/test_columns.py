"""How the commands align their tables."""

from __future__ import annotations

import pytest

from gateway.columns import aligned


def test_cells_begin_or_end_at_the_same_place_and_no_line_ends_with_spaces() -> None:
    rows = [("worker", "tokens", "note"), ("w1", "7", ""), ("a-long-one", "12,345", "x")]
    assert aligned(rows, "lrl") == [
        "worker      tokens  note",
        "w1               7",
        "a-long-one  12,345  x",
    ]


@pytest.mark.parametrize("sides", ["", "l", "lrr"])
def test_a_row_that_does_not_fit_is_an_error(sides: str) -> None:
    with pytest.raises(ValueError, match="cells a row"):
        aligned([("a", "b")], sides)
