"""Tokenize prompts behind their requests, in a few threads of its own.

An executor would do it too, for 70 us of the event loop per prompt instead of 25: this queue makes
no futures, and tells the loop once.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from prefix_index.draft import Draft, Prompt

# The event loop keeps a core.
MAX_THREADS = 4
# A thread that found nothing to do for so long ends.
IDLE_S = 5.0


@dataclass(slots=True)
class Job:
    """A draft to complete, and who is told on the event loop: its prompt, or the error."""

    draft: Draft
    loop: asyncio.AbstractEventLoop
    tell: Callable[[Prompt | None, Exception | None], None]


class TokenThreads:
    """A queue of drafts and the threads that complete them. ``start`` on the event loop only."""

    def __init__(self) -> None:
        self._max_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 2) - 1))
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_jobs = 0

    def start(self, job: Job) -> None:
        """Queue a job; returns at once."""
        with self._lock:
            self._num_jobs += 1
            is_short = self._num_threads < min(self._num_jobs, self._max_threads)
            self._num_threads += is_short
        self._jobs.put(job)
        if is_short:
            # Daemons: what nobody waits for any more must not hold up the process's end.
            threading.Thread(target=self._work, name="tokens", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except Empty:
                with self._lock:
                    if self._num_jobs < self._num_threads:
                        self._num_threads -= 1
                        return
                continue
            self._run(job)
            with self._lock:
                self._num_jobs -= 1

    def _run(self, job: Job) -> None:
        prompt, failure = None, None
        try:
            prompt = job.draft.complete()
        except Exception as error:  # tokenizers raise what they like
            failure = error
        try:
            job.loop.call_soon_threadsafe(job.tell, prompt, failure)
        except RuntimeError:  # the loop is closed: nobody is there to be told
            return
