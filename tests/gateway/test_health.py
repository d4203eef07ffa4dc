"""Bias first, ejection later, and back again by single trials."""

from __future__ import annotations

import pytest

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
    health.check_succeeded()
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
