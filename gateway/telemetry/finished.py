"""Finished requests on their way to their onlookers, who are told of many at a time.

One after the other, each onlooker's code and numbers would have to come back into the processor's
caches for every request. Whoever reads what onlookers count has what waits told first
(``settle``), so that nothing shows the wait.
"""

from __future__ import annotations

import asyncio
from time import time
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.telemetry.record import RequestRecord

    Batch: TypeAlias = Sequence[tuple[float, RequestRecord]]

# A person who watches the log or the console does not notice.
WAIT_S = 0.2
# All onlookers together take about 10 us a request: less than 2 ms of the event loop at once.
MAX_WAITING = 128


class Finished:
    """Collects finished requests; event loop only.

    Args:
        tell: Told of several at once, with the times they ended, seconds since 1970, in order;
            must not raise.
        clock_unix: Seconds since 1970.
    """

    def __init__(
        self, tell: Callable[[Batch], None], clock_unix: Callable[[], float] = time
    ) -> None:
        self._tell = tell
        self._clock_unix = clock_unix
        self._waiting: list[tuple[float, RequestRecord]] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: RequestRecord) -> None:
        """Take a request that is over, which must not change any more; told within ``WAIT_S``."""
        waiting = self._waiting
        waiting.append((self._clock_unix(), record))
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
            self._tell(waiting)
