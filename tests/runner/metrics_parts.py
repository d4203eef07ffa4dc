"""Figures of an engine with every tier there is."""

from __future__ import annotations

from runner.tiers.types import TierStats
from runner.types import EngineStats

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    pool_blocks=100,
    free_blocks=45,
    cached_blocks=25,
    active_blocks=20,
    block_size=16,
    block_bytes=1000,
    hit_tokens_total=96,
    query_tokens_total=296,
    evictions_total=5,
    preemptions_total=1,
    prompt_tokens_total=301,
    generation_tokens_total=77,
    num_loading=2,
    loading_blocks=6,
    pinned_blocks=4,
    stall_s_total=1.5,
    hit_tokens={"gpu": 32, "cpu": 48, "disk": 16},
    miss_tokens={"cold": 120, "evicted": 40, "below_block": 20, "gated": 16, "failed": 4},
    orphans_total=1,
    tiers=(
        TierStats(
            "cpu",
            capacity_bytes=64_000,
            used_bytes=48_000,
            num_blocks=48,
            queue_bytes={"read": 2000, "write": 3000},
            oldest_s={"read": 0.25, "write": 0.0},
            moved_bytes_total={"read": 9000, "write": 60_000},
            moved_blocks_total={"read": 9, "write": 60},
            hit_tokens_total=48,
            evictions_total=7,
            dropped_total=2,
            orphans_total=3,
        ),
        TierStats(
            "disk",
            capacity_bytes=640_000,
            used_bytes=100_000,
            store_failed_total=4,
            damaged_total=6,
            load_failed_total=8,
            gated_total=9,
            is_paused=True,
        ),
        TierStats("remote", moved_bytes_total={"read": 5}),
        TierStats("peer", load_failed_total=2),
    ),
)
