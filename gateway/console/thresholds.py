"""When a state is worth an alert: the very numbers that the Prometheus rules use.

Who changes one here changes it in the rules, too; a test compares them.
"""

from __future__ import annotations

from typing import NamedTuple

# Outcomes of requests that failed through no fault of the client's: what an error ratio counts.
ERROR_OUTCOMES = frozenset(
    {
        *("connect_failed", "upstream_reset", "first_byte_timeout", "upstream_error"),
        *("truncated", "unavailable", "failed"),
    }
)


class Threshold(NamedTuple):
    """A bound and how long it must be passed.

    Attributes:
        limit: Fires above this; what it counts is said where it is named.
        for_s: How long without a break, in seconds.
        window_s: Over how long rates and increases are taken; 0 = the state of now.
        severity: ``critical`` wakes somebody, ``warning`` waits for the morning.
    """

    limit: float
    for_s: float
    window_s: float = 0.0
    severity: str = "warning"


# One in twenty is more than restarts and bad luck explain; two minutes outlast a roll-out.
ERROR_RATIO_HIGH = Threshold(0.05, 120, 300, "critical")
# Requests a window needs before a ratio says anything: one failure of ten is no alert at night.
ERROR_RATIO_MIN_REQUESTS = 20
# Workers that may take requests; a pool without any refuses all of them.
POOL_UNAVAILABLE = Threshold(0, 60, 0, "critical")
# Share of a worker's KV memory in use.
CACHE_FULL = Threshold(0.95, 600)
# Times that missing events could not be had.
INDEX_GAP = Threshold(0, 0, 600)
# Seconds that events are overdue, or the shared view is behind.
INDEX_STALE = Threshold(30, 60)
# State words: they are, or they are not.
PARITY_DIVERGED = Threshold(0, 0)
WORKER_EJECTED = Threshold(0, 60)
REDIS_AWAY = Threshold(0, 60)
CONFIG_RELOAD_FAILED = Threshold(0, 0)
# Requests refused because too many wait, or too long.
QUEUE_REFUSING = Threshold(0, 60, 300)
# Seconds that a timer fires late, the 99th percentile: streams of all clients stand still as long.
EVENT_LOOP_LAG = Threshold(0.05, 300, 300)
# Seconds without an answer from a pool's discovery.
DISCOVERY_STALE = Threshold(300, 60)
# Spans that were made and not delivered.
TRACES_LOST = Threshold(0, 600, 300)
