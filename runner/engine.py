"""The engine as other threads see it: submit, abort, reset, figures.

Everything that decides or touches KV runs on the engine thread. Other threads only put commands
into its inbox and read the figures it last published.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

from runner.core import EngineCore

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefix_index.events import Event
    from runner.model import Model
    from runner.types import EngineConfig, EngineRequest, EngineStats

# A reset waits for the step in progress; a prefill chunk on a slow CPU takes seconds.
_RESET_TIMEOUT_S = 60.0


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
    ) -> None:
        """Allocate the pool.

        Args:
            model: Computes; used by the engine thread only.
            config: Sizes.
            on_events: Gets the KV events of each step in order, from the engine thread.

        Raises:
            ValueError: If the sizes contradict each other or the model.
        """
        self._core = EngineCore(model, config, on_events)
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        # Guards the stop flag against commands that would arrive after the last look.
        self._gate = threading.Lock()
        self._is_stopping = False
        self._num_submitted = 0
        self._num_accepted = 0
        self._published = (self._core.stats(), 0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion."""
        return self._core.limits.max_model_len

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Abort everything and end the thread; False if it still runs after ``timeout_s``."""
        with self._gate:
            self._is_stopping = True
            self._inbox.put(lambda: None)
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

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while requests hold blocks, and after ``stop``."""
        answer: Future[bool] = Future()
        with self._gate:
            if self._is_stopping:
                return False
            self._inbox.put(lambda: answer.set_result(self._core.reset_prefix_cache()))
        return answer.result(_RESET_TIMEOUT_S)

    def stats(self) -> EngineStats:
        """Return the figures after the last step; waiting requests up to this moment."""
        submitted = self._num_submitted
        stats, accepted = self._published
        return replace(stats, num_waiting=stats.num_waiting + max(0, submitted - accepted))

    def _accept(self, request: EngineRequest) -> None:
        self._core.accept(request)
        self._num_accepted += 1

    def _run(self) -> None:
        while not self._is_stopping:
            self._read_inbox()
            self._publish()
            if self._core.has_work:
                self._core.step()
                self._publish()
        # Only aborts are put after the flag, so what is read here is the rest.
        while not self._inbox.empty():
            self._inbox.get()()
        self._core.abort_all()
        self._publish()

    def _read_inbox(self) -> None:
        """Run the commands that have arrived; without work, wait for one."""
        if not self._core.has_work:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _publish(self) -> None:
        self._published = (self._core.stats(), self._num_accepted)
