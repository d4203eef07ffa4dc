"""What happened within the last minutes: the contract's averaged gauges."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from runner.metrics.identity import Identity
    from runner.tiers.types import Direction

# The contract's window of the averaged gauges.
WINDOW_S = 300.0

# Bounds a window's memory; a CPU runner finishes far fewer prompts in five minutes.
MAX_WINDOW_SAMPLES = 20_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class First:
    """The first token of one prompt."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


class Window(Generic[T]):
    """The newest samples of one kind; any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, T]] = deque(maxlen=MAX_WINDOW_SAMPLES)

    def add(self, sample: T) -> None:
        """Note a sample of now."""
        with self._lock:
            self._samples.append((self._clock(), sample))

    def recent(self) -> list[T]:
        """Return what is not older than the window."""
        with self._lock:
            horizon_s = self._clock() - WINDOW_S
            while self._samples and self._samples[0][0] < horizon_s:
                self._samples.popleft()
            return [sample for _, sample in self._samples]


class WindowFigures(Collector):
    """The bare gauges over the last minutes; absent while nothing happened."""

    def __init__(
        self,
        identity: Identity,
        firsts: Window[First],
        transfers: Mapping[Direction, Window[float]],
    ) -> None:
        self._gauge = identity.bare_gauge
        self._firsts = firsts
        self._transfers = transfers

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is depends on what happens."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have a value."""
        yield from self._prompts(self._firsts.recent())
        for direction, window in self._transfers.items():
            times_s = window.recent()
            if times_s:
                yield self._gauge(
                    f"kv_cache_offload_{direction}_latency",
                    f"Mean seconds of a {direction} of a lower tier, 5 min.",
                    sum(times_s) / len(times_s),
                )

    def _prompts(self, recent: list[First]) -> Iterator[Metric]:
        if not recent:
            return
        prompt_tokens = sum(first.prompt_tokens for first in recent)
        rate = sum(first.cached_tokens for first in recent) / prompt_tokens
        yield self._gauge("prefix_cache_hit_rate", "Share of prompt tokens cached, 5 min.", rate)
        ttfts_s = sorted(first.ttft_s for first in recent)
        mean_s = sum(ttfts_s) / len(ttfts_s)
        yield self._gauge("ttft_avg", "Mean time to first token, seconds, 5 min.", mean_s)
        for percent in (95, 99):
            text = f"{percent}th percentile of time to first token, seconds, 5 min."
            yield self._gauge(f"ttft_p{percent}", text, _nearest_rank(ttfts_s, percent))


def _nearest_rank(ordered: list[float], percent: int) -> float:
    """Return the smallest value that at least ``percent`` of all are not above."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
