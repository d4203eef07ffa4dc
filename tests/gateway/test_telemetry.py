"""Metrics and the request log, from finished requests."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.decision_log import DecisionLog
from gateway.telemetry.finished import MAX_WAITING, WAIT_S, Finished
from gateway.telemetry.log_metrics import DecisionLogCollector
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.requests import Telemetry
from tests.gateway.decision_parts import a_line


def record(**more) -> RequestRecord:
    values = {
        "pool": "chat",
        "worker": "w0",
        "reason": "longest_prefix",
        "outcome": "ok",
        "status": 200,
        "attempts": 1,
        "prompt_tokens": 100,
        "predicted_hit_tokens": 64,
        "observed_hit_tokens": 48,
        "completion_tokens": 7,
        "predicted_ttft_s": 0.2,
        "ttft_s": 0.25,
        "duration_s": 1.0,
    }
    return RequestRecord("id", "chat", **(values | more))


def samples(telemetry: Telemetry) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(telemetry.render().decode())
    return {
        (sample.name, sample.labels.get("worker", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_predictions_are_counted_beside_observations() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(record())
    telemetry.observe(record(observed_hit_tokens=80, attempts=2))

    found = samples(telemetry)

    assert found["warmlane_prompt_tokens_total", "w0"] == 200
    assert found["warmlane_predicted_hit_tokens_total", "w0"] == 128
    assert found["warmlane_observed_hit_tokens_total", "w0"] == 128
    assert found["warmlane_hit_prediction_error_tokens_total", "w0"] == 32
    assert found["warmlane_retries_total", "w0"] == 1
    assert found["warmlane_ttft_seconds_count", "w0"] == 2
    assert telemetry.fleet.hit_rate(5.0) == 128 / 200


def test_the_time_between_tokens_is_counted_where_there_are_two() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(record(ttft_s=0.25, duration_s=1.0, completion_tokens=7))
    telemetry.observe(record(completion_tokens=None, counted_tokens=2))
    telemetry.observe(record(completion_tokens=1))
    telemetry.observe(record(ttft_s=None))  # not streamed: nobody saw its first token

    found = samples(telemetry)

    assert found["warmlane_output_token_seconds_count", "w0"] == 2
    assert found["warmlane_output_token_seconds_sum", "w0"] == pytest.approx(0.75 / 6 + 0.75)
    telemetry.forget_worker("w0")
    assert ("warmlane_output_token_seconds_count", "w0") not in samples(telemetry)


def test_what_nobody_reported_is_not_counted_as_zero() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(record(observed_hit_tokens=None, ttft_s=None))

    assert telemetry.fleet.hit_rate(5.0) is None
    assert telemetry.fleet.ttft_s.mean(5.0) is None
    assert samples(telemetry)["warmlane_ttft_seconds_count", "w0"] == 0
    assert not telemetry.fleet.saw_cached_tokens


def test_a_request_that_reached_no_worker_counts_as_a_request_only() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(record(worker="", pool="", outcome="refused", prompt_tokens=0))

    found = samples(telemetry)
    assert found["warmlane_requests_total", ""] == 1
    assert telemetry.workers == {}


def test_the_series_of_a_worker_leave_with_it() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(record())
    telemetry.observe(record(worker="w1"))
    telemetry.forget_worker("w0")

    workers = {worker for _, worker in samples(telemetry)}
    assert workers == {"", "w1"}


def labelled(telemetry: Telemetry, name: str) -> dict[tuple[str, ...], float]:
    """Values of one metric by its labels' values, in the order of their names."""
    families = text_string_to_metric_families(telemetry.render().decode())
    return {
        tuple(v for _, v in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_choices_are_counted_with_bounded_labels() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    for peer in range(40):
        telemetry.observe(record(source=f"peer:w{peer}", pull_tokens=4096, route="batch"))
    telemetry.observe(record(source="own", queue_s=0.3, offload_tokens=0))
    telemetry.observe(record(source="recompute", offload_tokens=2048))
    telemetry.observe(record(worker="", source="own", route="batch", queue_s=30.0))

    assert labelled(telemetry, "warmlane_sources_total") == {
        ("chat", "peer"): 40,
        ("chat", "own"): 1,
        ("chat", "recompute"): 1,
    }
    assert labelled(telemetry, "warmlane_pulls_total") == {("chat", "w0"): 40}
    assert labelled(telemetry, "warmlane_pulled_tokens_total") == {("chat", "w0"): 40 * 4096}
    assert labelled(telemetry, "warmlane_route_requests_total") == {("chat", "batch"): 40}
    # Who never got to a worker did not wait for one that came.
    assert labelled(telemetry, "warmlane_queue_seconds_count") == {("chat",): 1}
    assert labelled(telemetry, "warmlane_offload_caps_total") == {
        ("none", "chat"): 1,
        ("some", "chat"): 1,
    }


def test_the_pulls_of_a_worker_leave_with_it() -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    telemetry.observe(record(source="store", pull_tokens=4096))
    telemetry.forget_worker("w0")

    assert labelled(telemetry, "warmlane_pulls_total") == {}
    telemetry.observe(record(source="store", pull_tokens=4096))
    assert labelled(telemetry, "warmlane_pulls_total") == {("chat", "w0"): 1}


def test_the_decision_log_says_what_became_of_its_lines(tmp_path: Path) -> None:
    telemetry = Telemetry(clock=lambda: 5.0)
    decisions = DecisionLog(str(tmp_path / "log"), max_waiting=1)
    telemetry.register(DecisionLogCollector(decisions))
    for _ in range(3):
        decisions.add(a_line(), 1)
    decisions.close()

    assert labelled(telemetry, "warmlane_decision_log_lines_total") == {
        ("written",): 1,
        ("dropped",): 2,
        ("failed",): 0,
    }


def test_a_line_says_when_its_request_ended_and_what_is_known() -> None:
    stream = io.BytesIO()
    RequestLog(stream).write([(0.25, record()), (1.5, record(worker="w1", ttft_s=None))])

    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["worker"], first["ttft_s"]) == ("request_finished", "w0", 0.25)
    assert second["ttft_s"] is None
    assert datetime.fromisoformat(second["timestamp"]) == datetime.fromtimestamp(1.5, UTC)


async def test_what_is_over_is_told_of_together_and_none_is_lost() -> None:
    told: list[list[int]] = []
    finished: Finished[int] = Finished(lambda batch: told.append(list(batch)))
    numbers = list(range(MAX_WAITING + 3))
    for each in numbers[:2]:
        finished.add(each)
    assert told == []
    finished.settle()
    assert told == [[0, 1]]
    for each in numbers[2:]:
        finished.add(each)
    assert len(told) == 2
    # One is left, and told of without anybody asking.
    deadline_s = time.monotonic() + 20.0
    while len(told) < 3:
        assert time.monotonic() < deadline_s
        await asyncio.sleep(WAIT_S / 4)
    assert [each for batch in told for each in batch] == numbers
    finished.settle()
    assert len(told) == 3


async def test_an_onlooker_that_fails_misses_what_it_failed_on_and_nobody_else_does() -> None:
    seen: list[int] = []
    others: list[int] = []

    def picky(batch: Iterator[int]) -> None:
        for each in batch:
            if each % 3 == 0:
                raise ValueError("odd")
            seen.append(each)

    finished: Finished[int] = Finished(picky, others.extend)
    for each in range(7):
        finished.add(each)
    with structlog.testing.capture_logs() as logs:
        finished.settle()
    assert seen == [1, 2, 4, 5]
    assert others == list(range(7))
    assert [line["event"] for line in logs] == ["onlooker_failed"] * 3


async def test_an_onlooker_that_fails_whatever_it_is_told_of_is_left_at_last() -> None:
    def broken(_batch: Iterator[int]) -> None:
        raise ValueError("always")

    finished: Finished[int] = Finished(broken)
    finished.add(1)
    with structlog.testing.capture_logs() as logs:
        finished.settle()
    assert len(logs) == 1


async def test_what_ends_while_onlookers_are_told_is_told_of_later() -> None:
    told: list[list[int]] = []

    def tell(batch: Iterator[int]) -> None:
        numbers = list(batch)
        told.append(numbers)
        if numbers == [1]:
            finished.add(2)
            finished.settle()

    finished: Finished[int] = Finished(tell)
    finished.add(1)
    finished.settle()
    assert told == [[1], [2]]


def test_lines_before_one_that_cannot_be_written_are_kept() -> None:
    stream = io.BytesIO()
    log = RequestLog(stream)
    batch = iter([(0.0, record()), (1.0, record(model="\ud800")), (2.0, record(worker="w1"))])
    with pytest.raises(UnicodeEncodeError):
        log.write(batch)
    log.write(batch)
    assert [json.loads(line)["worker"] for line in stream.getvalue().splitlines()] == ["w0", "w1"]


@pytest.mark.parametrize("secret", ["prompt", "messages", "authorization", "api_key"])
async def test_a_line_has_no_place_for_what_must_not_be_logged(secret: str) -> None:
    assert secret not in {field.name for field in fields(RequestRecord)}
