"""Tiers of KV: how full they are, what is given up, and how moving goes."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.panels import Panel, Query, Row, Threshold
from deploy.dashboards.queries import fact, fact_rate, gauge, quantile, rate, ratio

_EVICTIONS: Final = "warmlane_worker_evictions_total"
_STALLS: Final = "warmlane_worker_restore_stall_seconds_total"
_USED: Final = "warmlane_runner_kv_cache_usage_bytes"
_ROOM: Final = "warmlane_runner_kv_cache_capacity_bytes"
_GIVEN_UP: Final = "warmlane_runner_kv_cache_evictions_total"
_TRANSFER: Final = "warmlane_runner_transfer_seconds"
_MOVED: Final = "warmlane_runner_transfer_bytes_total"
_WORKER: Final = "{{pool}} {{worker}}"
_TIER: Final = "{{instance}} {{tier}}"
_WAY: Final = "{{tier}} {{direction}}"
_NO_REPORT: Final = "Not reported"

TIERS: Final = Row(
    "Tiers: how full, what is given up",
    (
        Panel(
            title="KV watermark by tier",
            shows="Share of each tier's room that holds KV. A full lower tier evicts with every "
            "write.",
            metric=_USED,
            unit="percentunit",
            maximum=1.0,
            empty=_NO_REPORT,
            thresholds=(Threshold(0.95, "orange"),),
            queries=(
                Query(
                    ratio(gauge(_USED, by="instance, tier"), gauge(_ROOM, by="instance, tier")),
                    _TIER,
                ),
            ),
        ),
        Panel(
            title="KV pool filled, by worker",
            shows="Share of each worker's device pool that holds something, cached prefixes "
            "included, by what its events say. A cache in use is full; that alone is no fault.",
            metric="warmlane_worker_kv_filled_ratio",
            unit="percentunit",
            maximum=1.0,
            empty=_NO_REPORT,
            queries=(Query(fact("warmlane_worker_kv_filled_ratio"), _WORKER),),
        ),
        Panel(
            title="KV held by worker and tier",
            shows="Bytes of KV as workers report them, whatever their engine.",
            metric="warmlane_worker_kv_bytes",
            unit="bytes",
            empty=_NO_REPORT,
            queries=(
                Query(
                    fact("warmlane_worker_kv_bytes", by="pool, worker, tier"),
                    "{{pool}} {{worker}} {{tier}}",
                ),
            ),
        ),
        Panel(
            title="Evictions by worker",
            shows="Cached blocks given up for room or since they were damaged.",
            metric=_EVICTIONS,
            unit="ops",
            empty=_NO_REPORT,
            queries=(Query(fact_rate(_EVICTIONS), _WORKER),),
        ),
        Panel(
            title="Evictions by tier and reason",
            shows="Blocks given up by bundled runners: for `room`, or `damaged`.",
            metric=_GIVEN_UP,
            unit="ops",
            empty=_NO_REPORT,
            queries=(Query(rate(_GIVEN_UP, by="tier, reason"), "{{tier}} {{reason}}"),),
        ),
        Panel(
            title="Where hits were found",
            shows="Prompt tokens found cached, by tier; below `gpu` they were restored.",
            metric="warmlane_runner_prefix_cache_hit_tokens_total",
            unit="count:tok/s",
            is_stacked=True,
            empty=_NO_REPORT,
            queries=(
                Query(rate("warmlane_runner_prefix_cache_hit_tokens_total", by="tier"), "{{tier}}"),
            ),
        ),
        Panel(
            title="Why tokens were computed",
            shows="`cold` nobody had seen; `evicted` a larger cache would have kept; `gated` was "
            "quicker to compute than to restore; `below_block` is the rest of a block.",
            metric="warmlane_runner_prefix_cache_miss_tokens_total",
            unit="count:tok/s",
            is_stacked=True,
            empty=_NO_REPORT,
            queries=(
                Query(
                    rate("warmlane_runner_prefix_cache_miss_tokens_total", by="reason"),
                    "{{reason}}",
                ),
            ),
        ),
    ),
)

MOVING: Final = Row(
    "Moving KV between tiers",
    (
        Panel(
            title="Transfer times, p95",
            shows="Time of one transfer between the pool and a tier.",
            metric=_TRANSFER,
            unit="s",
            empty="Nothing moved",
            queries=(Query(quantile(0.95, _TRANSFER, by="tier, direction"), _WAY),),
        ),
        Panel(
            title="Bytes moved",
            shows="What goes to a tier (`write`) and comes back (`read`).",
            metric=_MOVED,
            unit="Bps",
            empty=_NO_REPORT,
            queries=(Query(rate(_MOVED, by="tier, direction"), _WAY),),
        ),
        Panel(
            title="I/O queues",
            shows="Bytes asked for and not yet moved. A queue that stays is a tier too slow.",
            metric="warmlane_tier_queue_bytes",
            unit="bytes",
            empty=_NO_REPORT,
            queries=(Query(gauge("warmlane_tier_queue_bytes", by="tier, direction"), _WAY),),
        ),
        Panel(
            title="Oldest transfer",
            shows="Age of the oldest transfer that waits or is under way, on the worst worker.",
            metric="warmlane_tier_oldest_seconds",
            unit="s",
            empty=_NO_REPORT,
            queries=(Query(fact("warmlane_tier_oldest_seconds", by="tier, direction"), _WAY),),
        ),
        Panel(
            title="Engine standing still for KV",
            shows="Share of time that each engine waited for KV on its way.",
            metric=_STALLS,
            unit="percentunit",
            empty=_NO_REPORT,
            queries=(Query(fact_rate(_STALLS), _WORKER),),
        ),
        Panel(
            title="Offload latency",
            shows="Mean time of a read and of a write of a lower tier, last five minutes, as "
            "workers report it.",
            metric="warmlane_worker_offload_seconds",
            unit="s",
            empty=_NO_REPORT,
            queries=(
                Query(
                    fact("warmlane_worker_offload_seconds", by="pool, worker, direction"),
                    "{{pool}} {{worker}} {{direction}}",
                ),
            ),
        ),
        Panel(
            title="TTFT by source of KV, p95",
            shows="Time to first token inside bundled runners, by the farthest place that KV came "
            "from; `cold` had none. A tier above `cold` costs time.",
            metric="warmlane_runner_ttft_seconds",
            unit="s",
            empty=_NO_REPORT,
            queries=(
                Query(quantile(0.95, "warmlane_runner_ttft_seconds", by="source"), "{{source}}"),
            ),
        ),
        Panel(
            title="Loads and stores that came to nothing",
            shows="Loads refused since computing was cheaper, loads that failed, blocks not "
            "stored since the queue was full or the write failed, blocks found damaged.",
            metric="warmlane_runner_restores_gated_total",
            unit="ops",
            empty=_NO_REPORT,
            queries=tuple(
                Query(rate(f"warmlane_runner_{name}_total", by="tier"), f"{{{{tier}}}} {legend}")
                for name, legend in (
                    ("restores_gated", "gated"),
                    ("loads_failed", "load failed"),
                    ("stores_dropped", "store dropped"),
                    ("stores_failed", "store failed"),
                    ("damaged_blocks", "damaged"),
                )
            ),
        ),
    ),
)
