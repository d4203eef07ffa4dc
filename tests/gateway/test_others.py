"""What other gateways have in flight: sums, ages and gateways that leave."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.routing.others import GONE_S, HEARTBEAT_S, OthersLoad, WorkerLoad


def load(n: int = 1, **more: float) -> WorkerLoad:
    return WorkerLoad(n, 100 * n, 0.1 * n, 300 * n, **more)


def counts(found: WorkerLoad | None) -> tuple[float, ...]:
    assert found is not None
    return (found.in_flight, found.queued_tokens, found.queued_s, found.context_tokens)


def test_counts_add_up_over_gateways_and_times_are_the_latest() -> None:
    others = OthersLoad()
    others.report("a", {"w0": load(1, progress_at_s=50.0, restore_until_s=9.0)}, 60.0)
    others.report("b", {"w0": load(2, progress_at_s=40.0, restore_until_s=70.0)}, 60.0)

    found = others.of("w0")
    assert found is not None
    assert counts(found) == pytest.approx((3, 300, 0.3, 900), abs=1e-5)
    assert (found.progress_at_s, found.restore_until_s) == (50.0, 70.0)
    assert others.of("w1") is None


def test_a_report_replaces_the_one_before_it() -> None:
    others = OthersLoad()
    others.report("a", {"w0": load(3), "w1": load(1)}, 1.0)
    others.report("a", {"w1": load(2)}, 2.0)

    assert counts(others.of("w0")) == (0, 0, 0.0, 0)
    assert counts(others.of("w1")) == pytest.approx((2, 200, 0.2, 600), abs=1e-5)


def test_without_other_gateways_the_view_is_fresh() -> None:
    assert OthersLoad().age_s(1e9) == 0.0


def test_the_age_is_that_of_the_oldest_report_with_something_in_flight() -> None:
    others = OthersLoad()
    others.report("a", {"w0": load()}, 10.0)
    others.report("b", {"w0": load()}, 10.3)

    assert others.age_s(10.4) == pytest.approx(0.4)


def test_a_gateway_with_nothing_in_flight_ages_only_once_its_heartbeat_is_late() -> None:
    others = OthersLoad()
    others.report("a", {}, 10.0)

    assert others.age_s(10.0 + HEARTBEAT_S) == 0.0
    assert others.age_s(10.2 + HEARTBEAT_S) == pytest.approx(0.2)


def test_while_the_others_cannot_be_heard_the_age_is_infinite() -> None:
    others = OthersLoad()
    others.is_connected = False

    assert others.age_s(0.0) == inf


@pytest.mark.parametrize("how", ["goodbye", "silence"])
def test_a_gateway_that_left_counts_no_more(how: str) -> None:
    others = OthersLoad()
    others.report("a", {"w0": load(2)}, 10.0)
    others.report("b", {"w0": load(1)}, 11.0)

    if how == "goodbye":
        others.leave("a")
    else:
        assert others.expire(10.0 + GONE_S) == []
        assert others.expire(10.1 + GONE_S) == ["a"]

    assert counts(others.of("w0")) == pytest.approx((1, 100, 0.1, 300), abs=1e-5)
    assert len(others) == 1
    others.leave("b")
    assert others.of("w0") is None
    others.leave("never heard of")


loads = st.builds(
    WorkerLoad,
    st.integers(0, 1000),
    st.integers(0, 10**7),
    st.floats(0, 1e4),
    st.integers(0, 10**8),
)
reports = st.tuples(
    st.sampled_from("abcd"), st.dictionaries(st.sampled_from(["w0", "w1", "w2"]), loads)
)


@settings(deadline=None)
@given(st.lists(reports, max_size=30))
def test_the_sums_are_exact_whatever_comes_and_goes(history: list[tuple[str, dict]]) -> None:
    others = OthersLoad()
    last: dict[str, dict] = {}
    for gateway, said in history:
        others.report(gateway, said, 1.0)
        last[gateway] = said

    for worker in ("w0", "w1", "w2"):
        expected = [said[worker] for said in last.values() if worker in said]
        found = others.of(worker)
        if found is not None:
            assert found.in_flight == sum(e.in_flight for e in expected)
            assert found.queued_s == sum(e.queued_s for e in expected)
    for gateway in list(last)[1:]:
        others.leave(gateway)
    others.report(next(iter(last), "a"), {}, 2.0)
    for worker in ("w0", "w1", "w2"):
        found = others.of(worker)
        assert found is None or counts(found) == (0, 0, 0.0, 0)
