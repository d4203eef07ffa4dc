from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from warmup.bars import Bars
from warmup.documents import Problem
from warmup.events import Event, Placement, Plan, Step, Verified


@pytest.fixture
def bars() -> Iterator[Bars]:
    bars = Bars(io.StringIO(), no_color=True)
    yield bars
    bars.close()


def plan(**tokens: int) -> Plan:
    placements = [
        Placement(name, "warm", worker=f"w{name[1]}", tokens=count)
        for name, count in tokens.items()
    ]
    return Plan([*placements, Placement("held", "skip_held", worker="w0", tokens=9)])


def tell(bars: Bars, *events: Event) -> None:
    for event in events:
        bars.event(event, b"")


def test_each_worker_has_a_bar_that_moves_with_its_documents(bars: Bars) -> None:
    tell(bars, plan(a0=100, b0=50, c1=70))
    assert bars.totals() == {"w0": (0, 150), "w1": (0, 70)}

    tell(bars, Step("start", "a0", "w0"), Step("progress", "a0", "w0", tokens=40))
    assert bars.totals() == {"w0": (40, 150), "w1": (0, 70)}

    tell(bars, Step("done", "a0", "w0", tokens=100), Step("failed", "c1", "w1", reason="died"))
    tell(bars, Step("failed", "x", None, reason="no"), Verified("a0", "w0", warm=True))
    assert bars.totals() == {"w0": (100, 150), "w1": (70, 70)}


def test_a_second_plan_takes_the_place_of_what_the_first_did_not_finish(bars: Bars) -> None:
    tell(bars, plan(a0=100, b0=50), Step("done", "a0", "w0"))
    tell(bars, Step("progress", "b0", "w0", tokens=20), plan(b0=50))
    assert bars.totals() == {"w0": (100, 150)}

    tell(bars, Step("done", "b0", "w0"), Step("done", "b0", "w0"), Step("done", "z", "w9"))
    assert bars.totals() == {"w0": (150, 150)}


def test_words_from_outside_are_no_markup() -> None:
    out = io.StringIO()
    bars = Bars(out, no_color=True)

    bars.problem(Problem("[red]x[/red]", "\x1b[2J"))
    bars.away("gone", 1.5)
    bars.close()

    assert "cannot warm [red]x[/red]: \\x1b[2J" in out.getvalue()
    assert "gone; trying again in 1.5 s" in out.getvalue()
