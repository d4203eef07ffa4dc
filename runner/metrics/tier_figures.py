"""Families by tier, the pool being the tier ``gpu``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

from runner.metrics.identity import fill_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from runner.metrics.identity import Identity, Rows
    from runner.tiers.types import Direction, TierStats
    from runner.types import EngineStats


def tier_families(identity: Identity, stats: EngineStats, pool_bytes: int) -> Iterator[Metric]:
    """Yield what is known of each tier; what nobody reports is absent.

    Args:
        identity: Labels.
        stats: Of the engine.
        pool_bytes: Bytes of pool blocks that hold KV.
    """
    yield from _rooms(identity, stats, pool_bytes)
    yield from _given_up(identity, stats)
    yield from _counted(identity, stats.tiers)
    yield from _moved(identity, stats.tiers)
    yield from _queues(stats.tiers)


def _rooms(identity: Identity, stats: EngineStats, pool_bytes: int) -> Iterator[Metric]:
    tiers = stats.tiers
    used: Rows = [(("gpu",), pool_bytes), *_by_tier(tiers, lambda tier: tier.used_bytes)]
    room: Rows = [
        (("gpu",), stats.pool_blocks * stats.block_bytes),
        *_by_tier(tiers, lambda tier: tier.capacity_bytes),
    ]
    name = "warmlane_runner_kv_cache"
    yield from identity.gauges(f"{name}_usage_bytes", "Bytes that hold KV.", ("tier",), used)
    yield from identity.gauges(f"{name}_capacity_bytes", "Most it may hold.", ("tier",), room)


def _given_up(identity: Identity, stats: EngineStats) -> Iterator[Metric]:
    # Remote stores and peers give up blocks by rules of their own, which nobody reports.
    bounded = [tier for tier in stats.tiers if tier.capacity_bytes is not None]
    rows: Rows = [
        (("gpu", "room"), stats.evictions_total),
        *(((tier.tier, "room"), tier.evictions_total) for tier in bounded),
        *(((tier.tier, "damaged"), tier.damaged_total) for tier in bounded),
    ]
    text = "Blocks given up, for room or since their bytes were damaged."
    name = "warmlane_runner_kv_cache_evictions"
    yield from identity.counters(name, text, ("tier", "reason"), rows)
    pins: Rows = [
        (("gpu",), stats.orphans_total),
        *_by_tier(stats.tiers, lambda tier: tier.orphans_total),
    ]
    text = "Pins freed at their deadline since their owner never did."
    yield from identity.counters("warmlane_runner_pins_orphaned", text, ("tier",), pins)


def _counted(identity: Identity, tiers: tuple[TierStats, ...]) -> Iterator[Metric]:
    stores = tuple(tier for tier in tiers if tier.tier != "peer")
    for name, text, rows in (
        (
            "stores_dropped",
            "Blocks worth storing that found the queue full.",
            _by_tier(stores, lambda tier: tier.dropped_total),
        ),
        (
            "stores_failed",
            "Blocks whose write failed.",
            _by_tier(stores, lambda tier: tier.store_failed_total),
        ),
        (
            "damaged_blocks",
            "Blocks read whose bytes were not what was stored.",
            _by_tier(tiers, lambda tier: tier.damaged_total),
        ),
        (
            "loads_failed",
            "Loads that ended early, but for the request's own end.",
            _by_tier(tiers, lambda tier: tier.load_failed_total),
        ),
        (
            "restores_gated",
            "Loads refused since recomputing was cheaper.",
            _by_tier(tiers, lambda tier: tier.gated_total),
        ),
    ):
        yield from identity.counters(f"warmlane_runner_{name}", text, ("tier",), rows)
    yield from identity.gauges(
        "warmlane_runner_tier_paused",
        "1 while writing has stopped for a while.",
        ("tier",),
        _by_tier(stores, lambda tier: tier.is_paused),
    )


def _moved(identity: Identity, tiers: tuple[TierStats, ...]) -> Iterator[Metric]:
    for unit, of in (
        ("bytes", lambda tier: tier.moved_bytes_total),
        ("blocks", lambda tier: tier.moved_blocks_total),
    ):
        yield from identity.counters(
            f"warmlane_runner_transfer_{unit}",
            f"{unit.capitalize()} moved.",
            ("tier", "direction"),
            _by_direction(tiers, of),
        )


def _queues(tiers: tuple[TierStats, ...]) -> Iterator[Metric]:
    labels = ["tier", "direction"]
    yield from fill_rows(
        GaugeMetricFamily(
            "warmlane_tier_queue_bytes", "Bytes asked for and not yet moved.", labels=labels
        ),
        [],
        _by_direction(tiers, lambda tier: tier.queue_bytes),
    )
    yield from fill_rows(
        GaugeMetricFamily(
            "warmlane_tier_oldest_seconds",
            "Age of the oldest transfer waiting or under way.",
            labels=labels,
        ),
        [],
        _by_direction(tiers, lambda tier: tier.oldest_s),
    )


def _by_tier(
    tiers: tuple[TierStats, ...], of: Callable[[TierStats], float | None]
) -> list[tuple[tuple[str, ...], float | None]]:
    return [((tier.tier,), of(tier)) for tier in tiers]


def _by_direction(
    tiers: tuple[TierStats, ...],
    of: Callable[[TierStats], dict[Direction, int] | dict[Direction, float]],
) -> list[tuple[tuple[str, ...], float | None]]:
    return [
        ((tier.tier, direction), value) for tier in tiers for direction, value in of(tier).items()
    ]
