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
        "deadline",  # where all workers hang, nothing else is seen of it
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
# Share of a worker's KV memory that holds something. A cache in use is full: by itself no reason to
# do anything, but the first link of the chain that ends in late answers.
CACHE_FULL = Threshold(0.9, 600, 0, "info")
# Times that missing events could not be had, where a gap went before: who joins late has no gap.
INDEX_GAP = Threshold(0, 0, 600)
# Seconds that the shared view is behind. Events that are not believed count as well: they are given
# up within ten seconds, and two minutes outlast a worker's restart.
INDEX_STALE = Threshold(30, 120)
# State words: they are, or they are not. A check is made anew every few minutes.
PARITY_DIVERGED = Threshold(0, 60)
# Out after failures, or failing its checks; a breaker's trial comes every 30 s at the latest.
WORKER_EJECTED = Threshold(0, 120)
REDIS_AWAY = Threshold(0, 60)
CONFIG_RELOAD_FAILED = Threshold(0, 0)
# Requests refused because too many wait, or too long.
QUEUE_REFUSING = Threshold(0, 60, 300)
# Seconds that a timer fires late, the 99th percentile: streams of all clients stand still as long.
EVENT_LOOP_LAG = Threshold(0.05, 300, 300)
# Whether a pool's discovery fails. What it found holds meanwhile, so that minutes do no harm.
DISCOVERY_STALE = Threshold(0, 300)
# Spans that were made and not delivered.
TRACES_LOST = Threshold(0, 600, 300)
