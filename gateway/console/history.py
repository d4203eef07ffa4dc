"""Samples of counters over the last minutes: increases are known without Prometheus."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# As often as Prometheus commonly scrapes; an increase is as fine as that.
SAMPLE_EVERY_S = 15.0
# The longest window that any threshold has.
KEPT_S = 600.0


class History:
    """Counters by name, pool and worker; event loop only, not thread safe."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[tuple[str, str, str], float]]] = deque()

    def is_due(self, now_s: float) -> bool:
        """Whether it is time for the next sample; ``now_s`` is monotonic."""
        return not self._samples or now_s - self._samples[-1][0] >= SAMPLE_EVERY_S

    def add(self, now_s: float, counts: Mapping[tuple[str, str, str], float]) -> None:
        """Keep what all counters say at ``now_s``; forgets what is older than ``KEPT_S``."""
        self._samples.append((now_s, dict(counts)))
        while now_s - self._samples[0][0] > KEPT_S + SAMPLE_EVERY_S:
            self._samples.popleft()

    def increase(
        self, key: tuple[str, str, str], value: float, window_s: float, now_s: float
    ) -> float:
        """Return by how much a counter grew within the window; a new one began at 0.

        Args:
            key: Name, pool, worker.
            value: What it says now.
            window_s: How far to look back; less where samples do not reach so far.
            now_s: Monotonic seconds.
        """
        before = 0.0
        for at_s, counts in self._samples:
            # The last sample that is not within the window, or the first one there is.
            if at_s > now_s - window_s and at_s != self._samples[0][0]:
                break
            before = counts.get(key, 0.0)
        # One that went down began anew: a worker of the same name.
        return value - before if value >= before else value
