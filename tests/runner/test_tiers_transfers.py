"""Queues and threads that move bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from runner.tiers.transfers import Acks, Job, Lane


class Lanes:
    """Lanes of one test, and what came back from them."""

    def __init__(self) -> None:
        self.wakes = threading.Semaphore(0)
        self.acks = Acks(self.wakes.release)
        self.settled: list[Job] = []
        self._lanes: list[Lane] = []

    def lane(self, num_threads: int = 1) -> Lane:
        lane = Lane("test", num_threads, self.acks, clock=time.monotonic)
        self._lanes.append(lane)
        return lane

    def job(self, run=lambda: None, num_bytes: int = 10) -> Job:
        return Job(num_bytes, run, self.settled.append)

    def settle(self, count: int) -> None:
        """Wait for so many jobs more."""
        count += len(self.settled)
        while len(self.settled) < count:
            assert self.wakes.acquire(timeout=10), "no ack"
            self.acks.settle_all()

    def close(self) -> None:
        for lane in self._lanes:
            assert lane.close(time.monotonic() + 10)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes()
    yield lanes
    lanes.close()


def test_jobs_run_in_order_on_the_lanes_thread_and_are_settled_by_the_caller(lanes: Lanes) -> None:
    lane, ran = lanes.lane(), []
    for number in range(20):
        lane.submit(lanes.job(lambda number=number: ran.append((number, threading.get_ident()))))
    lanes.settle(20)
    assert [number for number, _ in ran] == list(range(20))
    assert {thread for _, thread in ran}.isdisjoint({threading.get_ident()})
    assert all(job.error is None and job.elapsed_s >= 0 for job in lanes.settled)


def test_several_threads_work_at_once(lanes: Lanes) -> None:
    lane, meeting = lanes.lane(3), threading.Barrier(3, timeout=10)
    for _ in range(3):
        lane.submit(lanes.job(lambda: meeting.wait() and None))
    lanes.settle(3)
    assert [job.error for job in lanes.settled] == [None] * 3


def test_queued_bytes_and_age_are_those_of_what_is_not_settled(lanes: Lanes) -> None:
    lane, gate = lanes.lane(), threading.Event()
    assert lane.oldest_s(time.monotonic()) == 0
    lane.submit(lanes.job(gate.wait, 30))
    lane.submit(lanes.job(num_bytes=12))
    now_s = time.monotonic()
    assert lane.queued_bytes == 42
    assert lane.num_open == 2
    assert lane.oldest_s(now_s + 5) >= 5
    gate.set()
    lanes.settle(2)
    assert (lane.queued_bytes, lane.num_open, lane.oldest_s(now_s)) == (0, 0, 0)


@pytest.mark.parametrize("error", [ValueError("no"), OSError(5, "EIO"), MemoryError()])
def test_an_exception_ends_its_transfer_and_nothing_else(lanes: Lanes, error: Exception) -> None:
    lane = lanes.lane()

    def fail() -> None:
        raise error

    lane.submit(lanes.job(fail))
    lane.submit(lanes.job())
    lanes.settle(2)
    assert [job.error for job in lanes.settled] == [error, None]
    assert lane.revive() == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_replaced_and_counted_and_its_job_fails(lanes: Lanes) -> None:
    lane = lanes.lane()

    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    lane.submit(lanes.job(die))
    lane.submit(lanes.job())
    lanes.settle(1)
    assert isinstance(lanes.settled[0].error, Killed)
    end = time.monotonic() + 10
    while not lane.revive():
        assert time.monotonic() < end, "the thread lives"
        time.sleep(0.001)
    lanes.settle(1)
    assert lanes.settled[1].error is None
    assert lane.restarts_total == 1


def test_a_job_that_has_not_begun_can_be_taken_back(lanes: Lanes) -> None:
    lane, gate = lanes.lane(), threading.Event()
    begun = threading.Event()
    first = lanes.job(lambda: begun.set() or (gate.wait() and None))
    second = lanes.job()
    lane.submit(first)
    lane.submit(second)
    assert begun.wait(10)
    assert not lane.withdraw(first)
    assert lane.withdraw(second)
    assert not lane.withdraw(second)
    gate.set()
    lanes.settle(1)
    assert lanes.settled == [first]
    assert lane.queued_bytes == 0


def test_closing_begins_nothing_new_and_waits_for_what_runs(lanes: Lanes) -> None:
    lane, gate, begun, ran = lanes.lane(), threading.Event(), threading.Event(), []
    lane.submit(lanes.job(lambda: begun.set() or (gate.wait() and None)))
    lane.submit(lanes.job(lambda: ran.append(1)))
    assert begun.wait(10)
    assert not lane.close(time.monotonic())
    gate.set()
    assert lane.close(time.monotonic() + 10)
    assert not ran
    assert lane.revive() == 0


def test_every_ack_wakes_the_engine(lanes: Lanes) -> None:
    lane = lanes.lane()
    for _ in range(3):
        lane.submit(lanes.job())
    for _ in range(3):
        assert lanes.wakes.acquire(timeout=10)
    lanes.acks.settle_all()
    assert len(lanes.settled) == 3
