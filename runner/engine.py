"""The engine as other threads see it: submit, abort, reset, figures.

Everything that decides or touches KV runs on the engine thread. Other threads only put commands
into its inbox and read the figures it last published. Loans to other runners alone do not wait for
a step's end: while the engine thread computes, or sleeps, its books lie still, and the lending
thread may have them.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from runner.core import EngineCore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prefix_index.events import Event
    from runner.kvkeys import KvKey
    from runner.leases import Loan
    from runner.model import Model
    from runner.tiers.interface import BuildTiers
    from runner.tiers.peer import PeerStore
    from runner.types import EngineConfig, EngineRequest, EngineStats

# An answer waits for the step in progress; a prefill chunk on a slow CPU takes seconds.
_ANSWER_TIMEOUT_S = 60.0

# A turn that takes longer will not end: the longest are a prefill chunk of a large model on a slow
# CPU, and the first step of a GPU, whose kernels are compiled then.
_MAX_TURN_S = 180.0

# Turns in a row that fail outside of a step before the engine is given up: what fails so often
# would fail for ever, as fast as the thread can turn.
_MAX_FAILED_TURNS = 3

_log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineStoppedError(RuntimeError):
    """The engine takes no more requests."""


class Engine:
    """A paged-KV engine over one model, on a thread of its own.

    All methods may be called from any thread; ``start`` and ``stop`` once each.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        on_events: Callable[[list[Event]], None] | None = None,
        build_tiers: BuildTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate the pool and open the tiers beneath it.

        Args:
            model: Computes; used by the engine thread only.
            config: Sizes.
            on_events: Gets the KV events of each step in order, from the engine thread.
            build_tiers: Opens the tiers; what it raises passes through. None for none.
            clock: Monotonic seconds.

        Raises:
            ValueError: If the sizes contradict each other or the model.
        """
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._clock = clock
        # The books: the engine thread's, except while it computes or sleeps.
        self._books = threading.Lock()
        self._lending = ThreadPoolExecutor(1, thread_name_prefix="lending")
        self._core = EngineCore(
            model, config, on_events, build_tiers, self._wake, clock, self._leaving_books
        )
        self._core.calibrate()
        # Guards the stop flag against commands that would arrive after the last look.
        self._gate = threading.Lock()
        self._is_stopping = False
        self._num_submitted = 0
        self._num_accepted = 0
        self._num_failed_turns = 0
        # When the turn under way began to compute or decide; None while the thread sleeps.
        self._turn_s: float | None = None
        self._published = (self._core.stats(), 0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion."""
        return self._core.limits.max_model_len

    @property
    def namespace(self) -> KvKey:
        """Root of all keys of the base model: equal only where KV bytes mean the same."""
        return self._core.namespace

    @property
    def puller(self) -> PeerStore | None:
        """What pulls KV from other runners; None where no peer is allowed."""
        return self._core.puller

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Abort everything, close the tiers and end the thread, started or not.

        Returns:
            False if it still runs after ``timeout_s``.
        """
        with self._gate:
            self._is_stopping = True
            self._wake()
        self._lending.shutdown(wait=False)
        if self._thread.ident is None:
            self._core.close()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; every outcome, a refusal too, arrives at its sink.

        Raises:
            EngineStoppedError: After ``stop``.
        """
        with self._gate:
            if self._is_stopping:
                raise EngineStoppedError("the engine is stopping")
            self._num_submitted += 1
            self._inbox.put(lambda: self._accept(request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one sample of it, before the next step; unknown ids are ignored."""
        self._inbox.put(lambda: self._core.abort(request_id, index))

    def fault(self) -> str | None:
        """Return why no request can be answered any more; None while the engine is well."""
        if self._thread.ident is not None and not self._thread.is_alive():
            return "the engine has ended"
        begun_s = self._turn_s
        if begun_s is not None and self._clock() - begun_s > _MAX_TURN_S:
            return f"the engine has not come back from a step for more than {_MAX_TURN_S:g} s"
        return None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while requests hold blocks, and after ``stop``."""
        try:
            return self._ask(self._core.reset_prefix_cache).result(_ANSWER_TIMEOUT_S)
        except EngineStoppedError:
            return False

    def lend(self, keys: Sequence[KvKey], owner: str, deadline_s: float) -> Future[Loan]:
        """Lend the leading ones of some blocks, those that the pool or host memory holds.

        Args:
            keys: Blocks that follow each other, first block first.
            owner: Who gives them back; several loans of one owner end together.
            deadline_s: On the monotonic clock; the blocks are taken back then.

        Returns:
            The loan; ``EngineStoppedError`` after ``stop``.
        """
        return self._on_lending(lambda: self._core.lend(keys, owner, deadline_s))

    def give_back(self, owner: str) -> None:
        """End all loans of an owner; unknown ones are ignored."""
        self._on_lending(lambda: self._core.give_back(owner))

    def decisions(self) -> list[dict[str, object]]:
        """Return the last decisions about loads, oldest first; none after ``stop``."""
        try:
            return self._ask(self._core.decisions).result(_ANSWER_TIMEOUT_S)
        except EngineStoppedError:
            return []

    def _ask(self, command: Callable[[], T]) -> Future[T]:
        """Run a command on the engine thread."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(command())
            except Exception as error:
                answer.set_exception(error)

        with self._gate:
            if self._is_stopping:
                answer.set_exception(EngineStoppedError("the engine is stopping"))
            else:
                self._inbox.put(run)
        return answer

    def _on_lending(self, command: Callable[[], T]) -> Future[T]:
        """Run a command on the lending thread, with the books."""

        def run() -> T:
            with self._books:
                if self._is_stopping:
                    raise EngineStoppedError("the engine is stopping")
                answer = command()
            # How long the engine thread may sleep depends on the loans.
            self._wake()
            return answer

        try:
            return self._lending.submit(run)
        except RuntimeError:
            refused: Future[T] = Future()
            refused.set_exception(EngineStoppedError("the engine is stopping"))
            return refused

    @contextmanager
    def _leaving_books(self) -> Iterator[None]:
        """Let the lending thread have the books meanwhile."""
        self._books.release()
        try:
            yield
        finally:
            self._books.acquire()

    def _wake(self) -> None:
        """Make a sleeping engine thread look around; from any thread."""
        self._inbox.put(_look_around)

    def stats(self) -> EngineStats:
        """Return the figures after the last step; waiting requests up to this moment."""
        submitted = self._num_submitted
        stats, accepted = self._published
        return replace(stats, num_waiting=stats.num_waiting + max(0, submitted - accepted))

    def _accept(self, request: EngineRequest) -> None:
        self._core.accept(request)
        self._num_accepted += 1

    def _run(self) -> None:
        with self._books:
            try:
                while not self._is_stopping:
                    self._turn()
            finally:
                self._is_stopping = True
                self._turn_s = None
            # Only aborts are put after the flag: what is read here is the rest.
            while not self._inbox.empty():
                self._inbox.get()()
            self._core.close()
            self._publish()

    def _turn(self) -> None:
        """Read the inbox and compute a step; what fails outside of the step ends all requests."""
        try:
            self._read_inbox()
            self._publish()
            if self._core.has_work or self._core.needs_turns:
                self._core.step()
                self._publish()
        except Exception as error:
            self._num_failed_turns += 1
            _log.exception("a turn of the engine failed, all requests end")
            self._core.start_over(error)
            if self._num_failed_turns == _MAX_FAILED_TURNS:
                _log.critical("the engine ends: %d turns in a row failed", _MAX_FAILED_TURNS)
                self._is_stopping = True
        else:
            self._num_failed_turns = 0

    def _read_inbox(self) -> None:
        """Run the commands that have arrived; with nothing to compute, wait for one."""
        sleep_s = self._core.sleep_s()
        if sleep_s != 0:
            begun_s = self._clock()
            self._turn_s = None
            try:
                with self._leaving_books():
                    command = self._inbox.get(timeout=sleep_s)
            except Empty:
                command = _look_around
            self._turn_s = self._clock()
            self._core.note_sleep(self._turn_s - begun_s)
            command()
        else:
            self._turn_s = self._clock()
        while not self._inbox.empty():
            self._inbox.get()()

    def _publish(self) -> None:
        self._published = (self._core.stats(), self._num_accepted)


def _look_around() -> None:
    """Do nothing: the turn that follows is what was wanted."""
