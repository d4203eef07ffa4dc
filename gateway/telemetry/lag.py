"""How late the event loop is: a timer that notes by how much it missed its time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from gateway.telemetry.window import Window

if TYPE_CHECKING:
    from gateway.telemetry.factory import Factory

# Often enough to see a stall of some milliseconds now and then, and 0.1 % of a core.
EVERY_S = 0.1
# From what any timer is late by, over what the gateway allows itself (5 ms), to a loop that stands.
BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Yields ``warmlane_event_loop_lag_seconds`` while ``run`` runs; of the loop it runs on.

    Attributes:
        recent: The last minutes' lags, in seconds, for whoever cannot ask Prometheus.
    """

    def __init__(self, make: Factory) -> None:
        self._lag = make.histogram(
            "warmlane_event_loop_lag_seconds",
            "How late a timer of the event loop fires",
            BUCKETS_S,
        ).labels()
        self.recent = Window()

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            lag_s = max(0.0, loop.time() - due_s)
            self._lag.observe(lag_s)
            self.recent.add(lag_s, time.monotonic())
