"""Bias first, ejection later, and back again by single trials."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.health import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    MAX_FAILED_CHECKS,
    MAX_FAILURES,
    Breaker,
    Health,
)


def opened(at_s: float = 0.0) -> Health:
    health = Health()
    for _ in range(MAX_FAILURES):
        health.failed(at_s)
    return health


def test_a_new_worker_is_healthy() -> None:
    health = Health()

    assert (health.ready, health.breaker(0.0), health.bias(0.0)) == (True, Breaker.CLOSED, 1.0)
    assert health.may_route(0.0)


def test_one_failure_makes_a_worker_dearer_for_a_while_but_keeps_it() -> None:
    health = Health()
    health.failed(10.0)

    assert health.may_route(10.0)
    assert health.bias(10.0) == 4.0
    assert 1.0 < health.bias(15.0) < 4.0
    assert health.bias(100.0) == pytest.approx(1.0, abs=1e-3)
    health.succeeded(11.0)
    assert health.bias(11.0) == 1.0


def test_failures_in_a_row_open_the_breaker_and_an_answer_between_does_not() -> None:
    health = Health()
    for _ in range(MAX_FAILURES - 1):
        health.failed(0.0)
    health.succeeded(0.0)
    health.failed(0.0)
    assert health.breaker(0.0) is Breaker.CLOSED

    assert opened().breaker(0.0) is Breaker.OPEN
    assert not opened().may_route(0.5 * FIRST_PAUSE_S)


def test_after_the_pause_one_request_at_a_time_may_try() -> None:
    health = opened()
    now_s = FIRST_PAUSE_S
    assert health.breaker(now_s) is Breaker.HALF_OPEN
    assert health.may_route(now_s)
    assert health.routed()
    assert not health.may_route(now_s)
    assert not health.routed()

    health.succeeded(now_s)
    assert health.breaker(now_s) is Breaker.CLOSED
    assert health.may_route(now_s)


def test_a_trial_without_a_verdict_lets_the_next_one_try() -> None:
    health = opened()
    assert health.routed()
    health.trial_ended()

    assert health.may_route(FIRST_PAUSE_S)


def test_pauses_double_up_to_a_limit() -> None:
    health, now_s, pauses = opened(), 0.0, []
    for _ in range(8):
        pause = 0.0
        while not health.may_route(now_s + pause):
            pause += 0.5
        pauses.append(pause)
        now_s += pause
        health.routed()
        health.failed(now_s)

    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert pauses[-1] == LAST_PAUSE_S


def test_failures_of_requests_sent_before_it_opened_do_not_lengthen_the_pause() -> None:
    health = opened()
    for _ in range(20):
        health.failed(0.1)

    assert health.may_route(FIRST_PAUSE_S)


def test_failed_checks_in_a_row_make_a_worker_not_ready() -> None:
    health = Health()
    for check in range(MAX_FAILED_CHECKS):
        assert health.ready, check
        health.check_failed(100.0, timed_out=False, is_streaming=False)
    assert not health.ready
    health.check_succeeded(100.0)
    assert health.ready


def test_a_slow_check_on_a_streaming_worker_is_no_reason() -> None:
    health = Health()
    for _ in range(10):
        health.check_failed(100.0, timed_out=True, is_streaming=True)
    health.alive(100.0)
    for _ in range(10):
        health.check_failed(101.0, timed_out=True, is_streaming=False)
    assert health.ready


def test_a_refused_check_counts_even_while_streaming() -> None:
    health = Health()
    for _ in range(MAX_FAILED_CHECKS):
        health.check_failed(100.0, timed_out=False, is_streaming=True)

    assert not health.ready


def test_an_answer_makes_a_worker_ready_again() -> None:
    health = Health()
    for _ in range(MAX_FAILED_CHECKS):
        health.check_failed(100.0, timed_out=True, is_streaming=False)
    assert not health.ready
    health.succeeded(101.0)
    assert health.ready


# Who asks for time itself


@pytest.mark.parametrize("asked_s", [0.5, 5.0, LAST_PAUSE_S, 3600.0])
def test_a_worker_that_asks_for_time_gets_it_within_bounds(asked_s: float) -> None:
    health, given_s = Health(), min(asked_s, LAST_PAUSE_S)
    health.asked_to_wait(10.0, asked_s)
    assert (health.breaker(10.0), health.num_ejections) == (Breaker.OPEN, 1)
    # What it has begun before may end well meanwhile.
    health.succeeded(10.0 + given_s / 2)
    assert not health.may_route(10.0 + 0.99 * given_s)

    assert health.may_route(10.0 + given_s)
    assert health.routed()
    assert not health.may_route(10.0 + given_s)
    health.succeeded(10.0 + given_s)
    assert health.breaker(10.0 + given_s) is Breaker.CLOSED


def test_a_shorter_wait_never_cuts_a_longer_one() -> None:
    health = Health()
    health.asked_to_wait(0.0, 20.0)
    health.asked_to_wait(1.0, 2.0)
    health.failed(1.0)

    assert not health.may_route(19.0)
    assert health.num_ejections == 1


def test_who_refuses_one_client_is_dearer_for_that_time_and_stays_in() -> None:
    health = Health()
    health.asked_for_less(0.0, 5.0)
    health.succeeded(0.0)

    assert health.is_dear
    assert health.may_route(0.0)
    assert (health.bias(4.9), health.bias(5.0)) == (4.0, 1.0)
    health.succeeded(5.0)
    assert not health.is_dear


# Health checks stand before the first client's request


def test_a_worker_that_is_checked_is_tried_after_a_good_check_only() -> None:
    health = Health()
    health.check_succeeded(0.0)
    for _ in range(MAX_FAILURES):
        health.failed(1.0)
    assert health.breaker(100.0) is Breaker.OPEN
    assert not health.may_route(100.0)
    health.check_succeeded(100.0)
    assert health.breaker(100.0) is Breaker.HALF_OPEN

    assert health.routed()
    health.failed(101.0)
    # The trial failed, so the check that came before it proves nothing.
    assert not health.may_route(200.0)
    health.check_succeeded(201.0)
    assert health.may_route(201.0)


# Outliers


def failing(share_percent: int, requests: int = 200) -> Health:
    """A worker where that share of requests failed, evenly spread, the last of them not."""
    health = Health()
    for k in range(requests):
        if (k + 1) * share_percent // 100 > k * share_percent // 100:
            health.failed(0.0)
        else:
            health.succeeded(0.0)
    health.succeeded(0.0)
    return health


def test_a_share_of_failures_makes_dearer_though_none_follow_each_other() -> None:
    biases = [failing(share).bias(0.0) for share in (0, 2, 20, 30, 45)]

    assert biases[:2] == [1.0, 1.0]
    assert biases == sorted(biases)
    assert biases[2] > 2.0
    assert failing(30).may_route(0.0)
    assert failing(30).bias(300.0) == pytest.approx(1.0, abs=1e-3)


def test_good_requests_make_a_worker_cheap_again() -> None:
    health = failing(30)
    for _ in range(60):
        health.succeeded(0.0)

    assert (health.bias(0.0), health.is_dear) == (1.0, False)


@given(st.lists(st.sampled_from(["ok", "fail", "wait", "less", "check", "no check", "later"])))
def test_whatever_happens_the_cheap_flags_tell_the_truth_and_health_comes_back(
    events: list[str],
) -> None:
    health, now_s = Health(), 0.0
    for event in events:
        match event:
            case "ok":
                health.routed()
                health.succeeded(now_s)
            case "fail":
                health.routed()
                health.failed(now_s)
            case "wait":
                health.asked_to_wait(now_s, 7.0)
            case "less":
                health.asked_for_less(now_s, 7.0)
            case "check":
                health.check_succeeded(now_s)
            case "no check":
                health.check_failed(now_s, timed_out=False, is_streaming=False)
            case _:
                now_s += 1.0
        if not health.is_dear:
            assert health.bias(now_s) == 1.0
        if not health.is_suspect:
            assert health.ready
            assert health.may_route(now_s)
        assert 1.0 <= health.bias(now_s) < 5.0 + 3.0 * len(events) + 16.0
    now_s += LAST_PAUSE_S
    health.check_succeeded(now_s)
    assert health.may_route(now_s)
    health.routed()
    health.succeeded(now_s)

    assert (health.breaker(now_s), health.is_suspect) == (Breaker.CLOSED, False)
