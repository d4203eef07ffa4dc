"""Threads that move bytes: a queue per tier and direction, and the acks that come back.

The engine thread submits jobs and settles them; transfer threads only run them. Loads never wait
behind stores, since each direction has threads of its own.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class Job:
    """One transfer: what a thread does, and what the engine does about it afterwards.

    Attributes:
        num_bytes: What it moves at most.
        error: The exception that ended it, if one did.
        submitted_s: When it was queued.
        started_s: When a thread took it; None before.
        ended_s: When it ended; None before.
    """

    __slots__ = ("_run", "_settle", "ended_s", "error", "num_bytes", "started_s", "submitted_s")

    def __init__(
        self, num_bytes: int, run: Callable[[], None], settle: Callable[[Job], None]
    ) -> None:
        """Describe a transfer.

        Args:
            num_bytes: See there.
            run: Moves the bytes, on a transfer thread; an exception is the transfer's failure.
            settle: Takes note of the end, on the engine thread.
        """
        self.num_bytes = num_bytes
        self.error: BaseException | None = None
        self.submitted_s = 0.0
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self._run = run
        self._settle = settle

    @property
    def elapsed_s(self) -> float:
        """Seconds a thread worked on it."""
        if self.started_s is None or self.ended_s is None:
            return 0.0
        return self.ended_s - self.started_s

    def run(self) -> None:
        """Move the bytes; transfer threads only."""
        self._run()

    def settle(self) -> None:
        """Take note of the end; engine thread only."""
        self._settle(self)


class Acks:
    """Jobs that have ended, on their way back to the engine thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._ended: deque[tuple[Lane, Job]] = deque()
        self._wake = wake

    def put(self, lane: Lane, job: Job) -> None:
        """Hand an ended job over; any thread."""
        self._ended.append((lane, job))
        self._wake()

    def settle_all(self) -> None:
        """Settle what has ended so far; engine thread only."""
        for _ in range(len(self._ended)):
            lane, job = self._ended.popleft()
            lane.forget(job)
            job.settle()


class Lane:
    """One queue of transfers and the threads that work it off in order.

    Attributes:
        name: Of its threads.
        num_threads: How many.
        queued_bytes: Of the jobs submitted and not settled (engine thread's books).
        restarts_total: Threads that died and were replaced.
    """

    def __init__(
        self, name: str, num_threads: int, acks: Acks, *, clock: Callable[[], float]
    ) -> None:
        """Start the threads."""
        self.name = name
        self.num_threads = num_threads
        self.queued_bytes = 0
        self.restarts_total = 0
        self._acks = acks
        self._clock = clock
        self._ready = threading.Condition()
        self._queue: deque[Job] = deque()
        self._is_closing = False
        # In order of submission, so that the first is the oldest.
        self._open: dict[Job, None] = {}
        self._threads = [self._new_thread() for _ in range(num_threads)]

    @property
    def num_open(self) -> int:
        """Jobs submitted and not settled."""
        return len(self._open)

    def oldest_s(self, now_s: float) -> float:
        """Return the age of the oldest job not settled; 0 for none."""
        return max(0.0, now_s - next(iter(self._open)).submitted_s) if self._open else 0.0

    def submit(self, job: Job) -> None:
        """Queue a job; engine thread only."""
        job.submitted_s = self._clock()
        self._open[job] = None
        self.queued_bytes += job.num_bytes
        with self._ready:
            self._queue.append(job)
            self._ready.notify()

    def withdraw(self, job: Job) -> bool:
        """Take a job back that no thread has begun; it is never settled. Engine thread only."""
        with self._ready:
            try:
                self._queue.remove(job)
            except ValueError:
                return False
        self.forget(job)
        return True

    def forget(self, job: Job) -> None:
        """Take a job out of the books; engine thread only."""
        if job in self._open:
            del self._open[job]
            self.queued_bytes -= job.num_bytes

    def revive(self) -> int:
        """Replace threads that have died; returns how many. Engine thread only."""
        dead = [at for at, thread in enumerate(self._threads) if not thread.is_alive()]
        if self._is_closing:
            return 0
        for at in dead:
            self._threads[at] = self._new_thread()
        if dead:
            self.restarts_total += len(dead)
            _log.error("%d threads of %s had died and were replaced", len(dead), self.name)
        return len(dead)

    def close(self, deadline_s: float) -> bool:
        """Begin no further job and join the threads; False if one still works at the deadline."""
        with self._ready:
            self._is_closing = True
            self._queue.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - self._clock()))
        return not any(thread.is_alive() for thread in self._threads)

    def _new_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._is_closing:
                    self._ready.wait()
                if self._is_closing:
                    return
                job = self._queue.popleft()
            self._run(job)

    def _run(self, job: Job) -> None:
        job.started_s = self._clock()
        try:
            job.run()
        except Exception as error:
            job.error = error
        except BaseException as error:
            job.error = error
            raise
        finally:
            job.ended_s = self._clock()
            self._acks.put(self, job)
