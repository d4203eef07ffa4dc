"""The last routing decisions, as their requests end: what was predicted beside what came of it.

No text of prompts and no keys: a record has neither.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from gateway.console.thresholds import ERROR_OUTCOMES

if TYPE_CHECKING:
    from gateway.telemetry.record import RequestRecord

# What a person scrolls through; at a thousand requests a second a fifth of a second.
MAX_DECISIONS = 200
# Of words that clients choose (request ids, models): beyond it they only take room.
MAX_CHARS = 96


class Decisions:
    """The last requests that a pool was chosen for; event loop only.

    Attributes:
        requests: Pool name -> its requests that are over.
        errors: Pool name -> those of them that failed through no fault of the client's.
    """

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self._last: deque[tuple[float, RequestRecord]] = deque(maxlen=MAX_DECISIONS)

    def add(self, at_s: float, record: RequestRecord) -> None:
        """Take note of a request that was over at ``at_s``, seconds since 1970. Below 1 us."""
        pool = record.pool
        if not pool:
            return  # refused before there was anything to decide
        self._last.append((at_s, record))
        self.requests[pool] = self.requests.get(pool, 0) + 1
        if record.outcome in ERROR_OUTCOMES:
            self.errors[pool] = self.errors.get(pool, 0) + 1

    def rows(self, after_unix_s: float = 0.0) -> list[dict[str, Any]]:
        """Return those that ended later than ``after_unix_s``, the newest first."""
        rows = []
        for at_s, record in reversed(self._last):
            if at_s <= after_unix_s:
                break
            rows.append(_row(at_s, record))
        return rows


def _row(at_s: float, record: RequestRecord) -> dict[str, Any]:
    return {
        "at_unix_s": at_s,
        "request_id": record.request_id[:MAX_CHARS],
        "pool": record.pool,
        "model": record.model[:MAX_CHARS],
        "worker": record.worker,
        "reason": record.reason,
        "source": record.source,
        "outcome": record.outcome,
        "status": record.status,
        "attempts": record.attempts,
        "prompt_tokens": record.prompt_tokens,
        "predicted_hit_tokens": record.predicted_hit_tokens if record.worker else None,
        "observed_hit_tokens": record.observed_hit_tokens,
        "predicted_ttft_s": record.predicted_ttft_s,
        "ttft_s": record.ttft_s,
        "queue_s": record.queue_s,
        "duration_s": record.duration_s,
    }
