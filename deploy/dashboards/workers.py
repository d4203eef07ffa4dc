"""Workers and tiers: load, memory, what is given up, and how moving KV goes."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.board import Board
from deploy.dashboards.panels import Panel, Query, Row, Threshold
from deploy.dashboards.pulls import PULLS
from deploy.dashboards.queries import fact, fact_rate, gauge, rate
from deploy.dashboards.tiers import MOVING, TIERS

_RUNNING: Final = "warmlane_worker_running_requests"
_WAITING: Final = "warmlane_worker_waiting_requests"
_USAGE: Final = "warmlane_worker_kv_usage_ratio"
_HEADROOM: Final = "warmlane_batch_headroom_requests"
_EVICTIONS: Final = "warmlane_worker_evictions_total"
_STALLS: Final = "warmlane_worker_restore_stall_seconds_total"
_WORKER: Final = "{{pool}} {{worker}}"
_TIER: Final = "{{instance}} {{tier}}"
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
        Panel(
            title="Preemptions",
            shows="Running requests that an engine sent back to waiting since KV memory ran out; "
            "more than none means that the batch is too large already.",
            metric="vllm:num_preemptions_total",
            unit="ops",
            empty=_NO_REPORT,
            queries=(Query(rate("vllm:num_preemptions_total", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Requests that wait for KV",
            shows="Requests of bundled runners whose KV is on its way from a lower tier.",
            metric="warmlane_runner_requests_loading",
            empty=_NO_REPORT,
            queries=(
                Query(gauge("warmlane_runner_requests_loading", by="instance"), "{{instance}}"),
            ),
        ),
    ),
)

_HEALTH: Final = Row(
    "Breaker and trust",
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
        Panel(
            title="Apart from their pool",
            shows="1 for a worker that differs from its pool in weights, tokenizer or KV format; "
            "it is a last resort.",
            metric="warmlane_worker_apart",
            maximum=1.0,
            empty="No workers",
            queries=(Query(fact("warmlane_worker_apart"), _WORKER),),
        ),
        Panel(
            title="Tiers that pause",
            shows="1 while a tier of a bundled runner takes no writes, after errors or a full "
            "disk.",
            metric="warmlane_runner_tier_paused",
            maximum=1.0,
            empty=_NO_REPORT,
            queries=(Query(gauge("warmlane_runner_tier_paused", by="instance, tier"), _TIER),),
        ),
    ),
)

WORKERS: Final = Board(
    name="workers",
    title="Warmlane / Workers and tiers",
    about="Load, memory, what is given up, and how moving KV between tiers goes.",
    rows=(_NUMBERS, _LOAD, TIERS, MOVING, PULLS, _HEALTH),
)
