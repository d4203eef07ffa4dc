"""Families that are read from the engine at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from runner.metrics.identity import filled
from runner.metrics.tier_figures import tier_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from runner.metrics.identity import Identity
    from runner.metrics.transfers import TransferMeter
    from runner.types import EngineStats


class EngineFigures(Collector):
    """Everything the engine counts itself.

    Args:
        identity: Labels.
        stats: Reads the engine's figures.
        transfers: What transfers and restores report themselves.
        start_s: Unix time that marks this runner's epoch.
    """

    def __init__(
        self,
        identity: Identity,
        stats: Callable[[], EngineStats],
        transfers: TransferMeter,
        start_s: float,
    ) -> None:
        self._identity = identity
        self._stats = stats
        self._transfers = transfers
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
        if stats.tiers:
            yield from self._lower_tiers(stats)

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
        yield filled(info, config, 1)

    def _bare(self, stats: EngineStats) -> Iterator[Metric]:
        total, gauge = self._identity.bare_total, self._identity.bare_gauge
        yield total(
            "prefix_cache_hit_tokens", "Prompt tokens found cached.", stats.hit_tokens_total
        )
        yield total("prefix_cache_miss_tokens", "Prompt tokens not found cached.", _misses(stats))
        evictions = stats.evictions_total + sum(tier.evictions_total for tier in stats.tiers)
        yield total("kv_cache_eviction_count", "Cached blocks given up for room.", evictions)
        yield gauge(
            "kv_cache_gpu_usage_bytes", "Bytes of pool blocks that hold KV.", _used_bytes(stats)
        )
        for tier in stats.tiers:
            if tier.tier == "cpu" and tier.used_bytes is not None:
                text = "Bytes of host memory that hold KV."
                yield gauge("kv_cache_cpu_usage_bytes", text, tier.used_bytes)
        if stats.tiers:
            yield total(
                "gpu_stall_due_to_kv_restore",
                "Seconds the engine stood still for KV on its way.",
                stats.stall_s_total,
            )

    def _twins(self, stats: EngineStats) -> Iterator[Metric]:
        counters, gauges = self._identity.counters, self._identity.gauges
        name = "warmlane_runner_prefix_cache"
        hits = _completed(stats.hit_tokens.items(), "gpu", stats.hit_tokens_total)
        yield from counters(f"{name}_hit_tokens", "Prompt tokens cached, by tier.", ("tier",), hits)
        misses = _completed(stats.miss_tokens.items(), "unknown", _misses(stats))
        text = "Prompt tokens that had to be computed, by reason."
        yield from counters(f"{name}_miss_tokens", text, ("reason",), misses)
        states = {
            "free": stats.free_blocks,
            "cached": stats.cached_blocks,
            "active": stats.active_blocks,
            "loading": stats.loading_blocks,
            "pinned": stats.pinned_blocks,
        }
        rows = [((state,), num_blocks) for state, num_blocks in states.items()]
        yield from gauges("warmlane_runner_kv_blocks", "Blocks of the pool.", ("state",), rows)
        yield from tier_families(self._identity, stats, _used_bytes(stats))

    def _lower_tiers(self, stats: EngineStats) -> Iterator[Metric]:
        text = "Requests whose KV is on its way."
        yield self._identity.gauge("warmlane_runner_requests_loading", text, stats.num_loading)
        transfers = self._transfers
        for name, text, value in (
            (
                "restore_stall_seconds",
                "Time the engine stood still for KV on its way.",
                stats.stall_s_total,
            ),
            (
                "reuse_gain_predicted_seconds",
                "Time that finished restores were expected to save.",
                transfers.predicted_s,
            ),
            (
                "reuse_gain_actual_seconds",
                "Time that restores quicker than computing saved.",
                transfers.gained_s,
            ),
            (
                "reuse_loss_actual_seconds",
                "Time that restores slower than computing lost.",
                transfers.lost_s,
            ),
        ):
            yield self._identity.counter(f"warmlane_runner_{name}", text, value)


def _misses(stats: EngineStats) -> int:
    return stats.query_tokens_total - stats.hit_tokens_total


def _used_bytes(stats: EngineStats) -> int:
    # What a load is writing into is not KV yet.
    return (stats.active_blocks + stats.cached_blocks + stats.pinned_blocks) * stats.block_bytes


def _completed(
    counts: Iterable[tuple[str, int]], rest: str, total: int
) -> list[tuple[tuple[str, ...], float | None]]:
    """Return the counts with ``rest`` making up what they lack, so that they add up to a total."""
    named = dict(counts)
    missing = total - sum(named.values())
    if missing > 0 or not named:
        named[rest] = named.get(rest, 0) + missing
    return [((name,), count) for name, count in named.items()]
