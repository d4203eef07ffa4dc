"""The sliding window against the plain list of values it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.window import SLOT_S, WINDOW_S, Sums, Window, slot_of

seconds = st.floats(min_value=1e-4, max_value=1e4)


@given(st.lists(seconds, min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_quantile_is_within_five_percent_of_the_exact_one(values: list[float], q: float) -> None:
    window = Window()
    for value in values:
        window.add(value, 1000.0)

    rank = -(-q * len(values) // 1)  # the smallest value with at least q of all at or below it
    exact = sorted(values)[int(rank) - 1]
    assert window.quantile(q, 1000.0) == pytest.approx(exact, rel=0.05)
    assert window.mean(1000.0) == pytest.approx(sum(values) / len(values))
    assert window.total(1000.0) == pytest.approx(sum(values))


def test_values_older_than_the_window_are_gone() -> None:
    window = Window()
    window.add(1.0, 0.0)

    assert window.mean(WINDOW_S - SLOT_S) == 1.0
    assert window.mean(WINDOW_S) is None
    assert window.quantile(0.5, WINDOW_S) is None


def test_an_empty_window_has_no_mean_and_no_quantile() -> None:
    assert Window().mean(5.0) is None
    assert Window().quantile(0.99, 5.0) is None


moments = st.lists(st.tuples(seconds, st.floats(0.0, 120.0)), min_size=1, max_size=60)


@given(moments, st.floats(0.0, 400.0))
def test_at_any_time_it_holds_what_came_within_the_window(
    steps: list[tuple[float, float]], later_s: float
) -> None:
    window, sums = Window(), Sums()
    now_s, seen = 0.0, []
    for value, pause_s in steps:
        now_s += pause_s
        seen.append((slot_of(now_s), value))
        window.add(value, now_s)
        sums.put(value, slot_of(now_s))
        check(window, sums, seen, now_s)
    check(window, sums, seen, now_s + later_s)


def check(window: Window, sums: Sums, seen: list[tuple[int, float]], now_s: float) -> None:
    live = [value for number, value in seen if number > slot_of(now_s) - WINDOW_S / SLOT_S]
    summary = window.summary(now_s)
    assert summary.count == len(live) == sum(summary.buckets.values())
    assert summary.total == pytest.approx(sum(live))
    assert sums.total(now_s) == pytest.approx(sum(live))
    if live:
        assert window.quantile(1.0, now_s) == pytest.approx(max(live), rel=0.05)
