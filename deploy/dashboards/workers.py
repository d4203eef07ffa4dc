"""Workers and tiers: load, memory, what is given up, and how moving KV goes."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.board import Board
from deploy.dashboards.panels import Panel, Query, Row, Threshold
from deploy.dashboards.queries import fact, fact_rate, gauge, quantile, rate, ratio

_RUNNING: Final = "warmlane_worker_running_requests"
_WAITING: Final = "warmlane_worker_waiting_requests"
_USAGE: Final = "warmlane_worker_kv_usage_ratio"
_HEADROOM: Final = "warmlane_batch_headroom_requests"
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

_NUMBERS: Final = Row(
    "",
    (
        Panel(
            title="Workers ready",
            shows="Workers whose checks pass.",
            metric="warmlane_worker_ready",
            kind="stat",
            empty="No workers",
            base="red",
            thresholds=(Threshold(1.0, "green"),),
            queries=(Query(f"sum ({fact('warmlane_worker_ready')})"),),
        ),
        Panel(
            title="Running",
            shows="Requests being computed, as the engines say.",
            metric=_RUNNING,
            kind="stat",
            empty=_NO_REPORT,
            queries=(Query(f"sum ({fact(_RUNNING)})"),),
        ),
        Panel(
            title="Waiting",
            shows="Requests queued inside the engines.",
            metric=_WAITING,
            kind="stat",
            empty=_NO_REPORT,
            queries=(Query(f"sum ({fact(_WAITING)})"),),
        ),
        Panel(
            title="Fullest KV pool",
            shows="Share of its KV memory that running requests use, at the fullest worker. Cached "
            "prefixes do not count: they give way.",
            metric=_USAGE,
            kind="stat",
            unit="percentunit",
            empty=_NO_REPORT,
            maximum=1.0,
            thresholds=(Threshold(0.9, "orange"), Threshold(0.97, "red")),
            queries=(Query(f"max ({fact(_USAGE)})"),),
        ),
        Panel(
            title="Least batch headroom",
            shows="Mean requests that still fit into the tightest worker's KV memory, cached "
            "prefixes given up. 0: a larger batch would only preempt.",
            metric=_HEADROOM,
            kind="stat",
            empty="Not known",
            base="red",
            thresholds=(Threshold(1.0, "orange"), Threshold(4.0, "green")),
            decimals=1,
            queries=(Query(f"min ({fact(_HEADROOM)})"),),
        ),
        Panel(
            title="Evictions",
            shows="Cached blocks a second that workers gave up, on all tiers.",
            metric=_EVICTIONS,
            kind="stat",
            unit="ops",
            empty=_NO_REPORT,
            queries=(Query(f"sum ({fact_rate(_EVICTIONS)})"),),
        ),
        Panel(
            title="Engine standing still",
            shows="Share of time that the worst engine waited for KV on its way.",
            metric=_STALLS,
            kind="stat",
            unit="percentunit",
            empty=_NO_REPORT,
            thresholds=(Threshold(0.02, "orange"), Threshold(0.1, "red")),
            queries=(Query(f"max ({fact_rate(_STALLS)})"),),
        ),
        Panel(
            title="Workers out",
            shows="Workers that the breaker keeps out, or tries again.",
            metric="warmlane_worker_ejected",
            kind="stat",
            empty="No workers",
            thresholds=(Threshold(1.0, "red"),),
            queries=(Query(f"sum ({fact('warmlane_worker_ejected')})"),),
        ),
    ),
)

_LOAD: Final = Row(
    "Load and memory: does it support a larger batch?",
    (
        Panel(
            title="Running and waiting",
            shows="Requests in each engine.",
            metric=_RUNNING,
            empty=_NO_REPORT,
            queries=(
                Query(fact(_RUNNING), f"{_WORKER} running"),
                Query(fact(_WAITING), f"{_WORKER} waiting"),
            ),
        ),
        Panel(
            title="KV memory in use",
            shows="Share of each worker's KV memory that running requests use.",
            metric=_USAGE,
            unit="percentunit",
            maximum=1.0,
            empty=_NO_REPORT,
            queries=(Query(fact(_USAGE), _WORKER),),
        ),
        Panel(
            title="Batch headroom",
            shows="Free and evictable KV over the tokens of a mean request: how many more would "
            "fit. A batch limit is raised only while this stays above it.",
            metric=_HEADROOM,
            empty="Not known",
            queries=(Query(fact(_HEADROOM), _WORKER),),
        ),
        Panel(
            title="Blocks of the pool",
            shows="What bundled runners' pools hold: `active` and `pinned` cannot give way, "
            "`cached` can.",
            metric="warmlane_runner_kv_blocks",
            is_stacked=True,
            empty=_NO_REPORT,
            queries=(Query(gauge("warmlane_runner_kv_blocks", by="state"), "{{state}}"),),
        ),
    ),
)

_TIERS: Final = Row(
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

_MOVING: Final = Row(
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
            has_exemplars=True,
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

_HEALTH: Final = Row(
    "Breaker",
    (
        Panel(
            title="Taken out",
            shows="1 while the breaker keeps a worker out or has it on trial; the highest of all "
            "gateways.",
            metric="warmlane_worker_ejected",
            maximum=1.0,
            empty="No workers",
            queries=(Query(fact("warmlane_worker_ejected"), _WORKER),),
        ),
        Panel(
            title="Factor on cost after failures",
            shows="1 is none; a worker that failed lately is dearer until it has proved itself.",
            metric="warmlane_worker_bias",
            minimum=1.0,
            empty="No workers",
            queries=(Query(fact("warmlane_worker_bias"), _WORKER),),
        ),
    ),
)

WORKERS: Final = Board(
    name="workers",
    title="Warmlane / Workers and tiers",
    about="Load, memory, what is given up, and how moving KV between tiers goes.",
    rows=(_NUMBERS, _LOAD, _TIERS, _MOVING, _HEALTH),
)
