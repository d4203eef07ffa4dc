"""What the gateway sees of the fleet and of each worker, under the contract's bare names.

Means and quantiles are of a window and cannot be added up: what several processes saw is
added up first (``gateway/supervisor/windows.py``) and read here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gateway.telemetry.parts import gauge, untyped
from gateway.telemetry.window import Summary, Sums, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from gateway.telemetry.record import RequestRecord

_Seen = TypeVar("_Seen")

SCOPE = ("scope", "worker")
FLEET = ("fleet", "")


@dataclass(slots=True)
class Observed:
    """What one worker (or the fleet) did: cumulative tokens and the last minutes' TTFT."""

    hit_tokens: int = 0
    miss_tokens: int = 0
    saw_cached_tokens: bool = False
    ttft_s: Window = field(default_factory=Window)
    hits: Sums = field(default_factory=Sums)
    misses: Sums = field(default_factory=Sums)

    def add(self, record: RequestRecord, number: int, bucket: int) -> None:
        """Take over one finished request.

        Args:
            record: Its account.
            number: Of the slot of now.
            bucket: Of its TTFT; anything where there is none.
        """
        if record.ttft_s is not None:
            self.ttft_s.put(record.ttft_s, bucket, number)
        if record.observed_hit_tokens is not None and record.prompt_tokens:
            self.saw_cached_tokens = True
            missed = max(0, record.prompt_tokens - record.observed_hit_tokens)
            self.hit_tokens += record.observed_hit_tokens
            self.miss_tokens += missed
            self.hits.put(record.observed_hit_tokens, number)
            self.misses.put(missed, number)

    def recent(self, now_s: float) -> Recent:
        """Return what the last minutes saw."""
        return Recent(self.ttft_s.summary(now_s), self.hits.total(now_s), self.misses.total(now_s))

    def hit_rate(self, now_s: float) -> float | None:
        """Share of prompt tokens served from cache in the window; None if nobody reported any."""
        return self.recent(now_s).hit_rate


class Recent(msgspec.Struct, array_like=True):
    """What one scope saw in the last minutes; those of several processes add up."""

    ttft_s: Summary
    hit_tokens: float = 0.0
    miss_tokens: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens served from cache; None if nobody reported any."""
        tokens = self.hit_tokens + self.miss_tokens
        return self.hit_tokens / tokens if tokens else None

    def add(self, other: Recent) -> None:
        """Add what another process saw."""
        self.ttft_s.add(other.ttft_s)
        self.hit_tokens += other.hit_tokens
        self.miss_tokens += other.miss_tokens


def gauges(scopes: Mapping[tuple[str, str], Recent]) -> Iterator[Metric]:
    """Yield the gauges of the window; what nobody reported is absent."""
    reads: dict[str, tuple[str, Callable[[Recent], float | None]]] = {
        "prefix_cache_hit_rate": (
            "Share of prompt tokens found cached, last 5 minutes",
            lambda recent: recent.hit_rate,
        ),
        "ttft_avg": ("Mean TTFT, seconds, last 5 minutes", lambda recent: recent.ttft_s.mean),
        "ttft_p95": (
            "95th percentile of TTFT, seconds, last 5 minutes",
            lambda recent: recent.ttft_s.quantile(0.95),
        ),
        "ttft_p99": (
            "99th percentile of TTFT, seconds, last 5 minutes",
            lambda recent: recent.ttft_s.quantile(0.99),
        ),
    }
    for name, (text, read) in reads.items():
        yield from gauge(name, text, SCOPE, _rows(scopes, read))


def counts(scopes: Mapping[tuple[str, str], Observed]) -> Iterator[Metric]:
    """Yield what only grows; absent as long as nobody reported cached tokens."""
    reads: dict[str, tuple[str, Callable[[Observed], float | None]]] = {
        "prefix_cache_hit_tokens": (
            "Prompt tokens that workers reported as cached",
            lambda o: o.hit_tokens if o.saw_cached_tokens else None,
        ),
        "prefix_cache_miss_tokens": (
            "Prompt tokens that workers reported as not cached",
            lambda o: o.miss_tokens if o.saw_cached_tokens else None,
        ),
    }
    for name, (text, read) in reads.items():
        yield from untyped(name, text, SCOPE, _rows(scopes, read))


def _rows(
    scopes: Mapping[tuple[str, str], _Seen], read: Callable[[_Seen], float | None]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for scope, seen in scopes.items():
        value = read(seen)
        if value is not None:
            yield scope, value
