"""A whole bundled runner with the real weights, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any, Self

    from runner.config import RunnerConfig
    from runner.serve import Runner

T = TypeVar("T")

# Loading the weights and one answer take a few seconds on a busy machine.
DEADLINE_S = 60.0


@dataclass(slots=True)
class LiveRunner:
    """Serves from ``start`` to ``stop``; usable as a context manager.

    Attributes:
        url: Base URL without ``/v1``.
        runner: The parts, for looking inside.
    """

    url: str
    runner: Runner
    _loop: asyncio.AbstractEventLoop
    _thread: threading.Thread

    @classmethod
    def start(cls, config: RunnerConfig) -> LiveRunner:
        """Load and serve; returns when requests are taken."""
        from runner.serve import load  # torch is slow to import and most tests need none

        runner = load(config)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="live-runner", daemon=True)
        thread.start()
        live = cls(runner.url, runner, loop, thread)
        live.run(runner.start())
        return live

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_S)

    def stop(self) -> None:
        """Stop serving and free everything."""
        self.run(self.runner.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
