"""Prometheus text of one runner, in three families of names.

``vllm:`` names are what dashboards and routers scrape. The bare names are fixed by the project's
contract for gateways and runners alike; a bare sample whose value nobody knows is absent, never 0,
so a runner without lower tiers has no offload latency and no restore stall. ``warmlane_runner_*``
are their typed twins, which is what alerts should use.

Source: vLLM 0.32 ``/metrics`` (names, types, labels, buckets).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from runner.types import EngineStats, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# vLLM's buckets, so that its dashboards show the runner without change.
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)

# The contract's window of the averaged gauges.
WINDOW_S = 300.0

# Bounds the window's memory; a CPU runner finishes far fewer prompts in five minutes.
MAX_WINDOW_SAMPLES = 20_000

# One runner process is one engine.
ENGINE = "0"


@dataclass(frozen=True, slots=True)
class _First:
    """The first token of one prompt."""

    at_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


class RunnerMetrics:
    """Owns the registry; all methods are called from the event loop.

    Args:
        model: Served model name.
        worker: How this runner is told from others, ``host:port``.
        stats: Reads the engine's figures.
        clock: Monotonic seconds.
        wall_clock: Unix seconds; read once, for the start time that marks an epoch.
    """

    def __init__(
        self,
        *,
        model: str,
        worker: str,
        stats: Callable[[], EngineStats],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._window: deque[_First] = deque(maxlen=MAX_WINDOW_SAMPLES)
        self._registry = CollectorRegistry()
        labels = {"model_name": model, "engine": ENGINE}
        finished = Counter(
            "vllm:request_success",
            "Finished samples by reason.",
            [*labels, "finished_reason"],
            registry=self._registry,
        )
        self._finished = {
            reason: finished.labels(**labels, finished_reason=reason)
            for reason in get_args(FinishReason)
        }
        self._ttft = [
            Histogram(
                name,
                "Time to first token.",
                [*labels],
                buckets=TTFT_BUCKETS_S,
                registry=self._registry,
            ).labels(**labels)
            for name in ("vllm:time_to_first_token_seconds", "warmlane_runner_ttft_seconds")
        ]
        identity = _Identity(labels, {"scope": "worker", "worker": worker})
        self._registry.register(_EngineFigures(identity, stats, wall_clock()))
        self._registry.register(_WindowFigures(identity, self.recent))

    def first_token(self, ttft_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Note the first token of a prompt."""
        for histogram in self._ttft:
            histogram.observe(ttft_s)
        self._window.append(_First(self._clock(), ttft_s, prompt_tokens, cached_tokens))

    def finished(self, reason: FinishReason) -> None:
        """Note the end of one sample."""
        self._finished[reason].inc()

    def recent(self) -> list[_First]:
        """Return what happened within the window."""
        horizon = self._clock() - WINDOW_S
        while self._window and self._window[0].at_s < horizon:
            self._window.popleft()
        return list(self._window)

    def render(self) -> bytes:
        """Return the exposition text (format 0.0.4)."""
        return generate_latest(self._registry)


@dataclass(frozen=True, slots=True)
class _Identity:
    """The two label sets, and how each kind of sample is written."""

    vllm: dict[str, str]
    worker: dict[str, str]

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return _filled(GaugeMetricFamily(name, text, labels=[*self.vllm]), self.vllm, value)

    def counter(self, name: str, text: str, value: float) -> Metric:
        return _filled(CounterMetricFamily(name, text, labels=[*self.vllm]), self.vllm, value)

    def bare_gauge(self, name: str, text: str, value: float) -> Metric:
        return _filled(GaugeMetricFamily(name, text, labels=[*self.worker]), self.worker, value)

    def bare_total(self, name: str, text: str, value: float) -> Metric:
        # Untyped: the client library renames a counter to `_total`.
        return _filled(UnknownMetricFamily(name, text, labels=[*self.worker]), self.worker, value)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily | UnknownMetricFamily,
    labels: dict[str, str],
    value: float,
) -> Metric:
    family.add_metric([*labels.values()], value)
    return family


class _EngineFigures(Collector):
    """Everything that is read from the engine at scrape time."""

    def __init__(
        self, identity: _Identity, stats: Callable[[], EngineStats], start_s: float
    ) -> None:
        self._identity = identity
        self._stats = stats
        self._start_s = start_s

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not ask an engine that may not run yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        stats = self._stats()
        start = GaugeMetricFamily("process_start_time_seconds", "Start of this runner, Unix time.")
        start.add_metric([], self._start_s)
        yield start
        yield from self._vllm(stats)
        yield from self._bare(stats)
        yield from self._twins(stats)

    def _vllm(self, stats: EngineStats) -> Iterator[Metric]:
        gauge, counter = self._identity.gauge, self._identity.counter
        usage = stats.active_blocks / stats.pool_blocks if stats.pool_blocks else 0.0
        yield gauge("vllm:num_requests_running", "Samples being computed.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests not yet admitted.", stats.num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of blocks requests use (0..1).", usage)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.query_tokens_total),
            ("prefix_cache_hits", "Prompt tokens found cached.", stats.hit_tokens_total),
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens_total),
            ("generation_tokens", "Tokens sampled.", stats.generation_tokens_total),
            ("num_preemptions", "Requests sent back to waiting.", stats.preemptions_total),
        ):
            yield counter(f"vllm:{name}", text, value)
        config = {
            **self._identity.vllm,
            "block_size": str(stats.block_size),
            "num_gpu_blocks": str(stats.pool_blocks),
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Shape of the KV pool.", labels=[*config]
        )
        yield _filled(info, config, 1)

    def _bare(self, stats: EngineStats) -> Iterator[Metric]:
        total = self._identity.bare_total
        yield total(
            "prefix_cache_hit_tokens", "Prompt tokens found cached.", stats.hit_tokens_total
        )
        yield total("prefix_cache_miss_tokens", "Prompt tokens not found cached.", _misses(stats))
        yield total("kv_cache_eviction_count", "Cached blocks given up.", stats.evictions_total)
        yield self._identity.bare_gauge(
            "kv_cache_gpu_usage_bytes", "Bytes of pool blocks that hold KV.", _used_bytes(stats)
        )

    def _twins(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, value in (
            ("prefix_cache_hit_tokens", "Prompt tokens found cached.", stats.hit_tokens_total),
            ("prefix_cache_miss_tokens", "Prompt tokens not found cached.", _misses(stats)),
            ("kv_cache_evictions", "Cached blocks given up for room.", stats.evictions_total),
        ):
            yield self._identity.counter(f"warmlane_runner_{name}", text, value)
        yield self._identity.gauge(
            "warmlane_runner_kv_cache_usage_bytes",
            "Bytes of pool blocks that hold KV.",
            _used_bytes(stats),
        )


class _WindowFigures(Collector):
    """The bare gauges over the last minutes; absent while nothing happened."""

    def __init__(self, identity: _Identity, recent: Callable[[], list[_First]]) -> None:
        self._gauge = identity.bare_gauge
        self._recent = recent

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have a value."""
        recent = self._recent()
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


def _misses(stats: EngineStats) -> int:
    return stats.query_tokens_total - stats.hit_tokens_total


def _used_bytes(stats: EngineStats) -> int:
    return (stats.active_blocks + stats.cached_blocks) * stats.block_bytes


def _nearest_rank(ordered: list[float], percent: int) -> float:
    """Return the smallest value that at least ``percent`` of all are not above."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
