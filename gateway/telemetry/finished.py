"""What is over, on its way to its onlookers, who are told of many attempts or requests at a time.

One after the other, each onlooker's code and numbers would have to come back into the processor's
caches for every request. Whoever reads what onlookers count has what waits told first
(``settle``), so that nothing shows the wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")

# A person who watches the log or the console does not notice.
WAIT_S = 0.2
# All onlookers together take about 10 us a request: less than 2 ms of the event loop at once. It
# bounds the bodies, too, that are kept a moment longer.
MAX_WAITING = 128

log = structlog.get_logger("warmlane")


class Finished(Generic[_T]):
    """Collects what is over; event loop only.

    Args:
        onlookers: Each is told of several at once, in the order in which they ended. What one
            cannot take is logged, and kept neither from the others nor in the way of the rest.
    """

    def __init__(self, *onlookers: Callable[[Iterator[_T]], object]) -> None:
        self._onlookers = onlookers
        self._waiting: list[_T] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, one: _T) -> None:
        """Take what is over and must not change any more; told within ``WAIT_S``."""
        waiting = self._waiting
        waiting.append(one)
        if len(waiting) >= MAX_WAITING:
            self.settle()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_S, self.settle)

    def settle(self) -> None:
        """Tell of what waits now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            # One after the other: that is what they are told of many at a time for.
            for onlooker in self._onlookers:
                _tell(onlooker, waiting)


def _tell(onlooker: Callable[[Iterator[_T]], object], waiting: list[_T]) -> None:
    left = iter(waiting)
    # Once for all of it, unless it fails: then once more for what is behind.
    for _ in waiting:
        try:
            onlooker(left)
        except Exception as error:
            log.error("onlooker_failed", exc_info=error)
        else:
            return
