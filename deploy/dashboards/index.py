"""Index and replicas: is what gateways believe about workers true and young."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.board import Board
from deploy.dashboards.discovery import DISCOVERY
from deploy.dashboards.panels import Panel, Query, Row, Threshold
from deploy.dashboards.queries import fact, gauge, rate, total

_BLOCKS: Final = "warmlane_index_blocks"
_EVENT: Final = "warmlane_kv_event"
_LAG: Final = f"{_EVENT}_lag_seconds"
_HEALTH_STATE: Final = f"{_EVENT}_health"
_NO_EVENTS: Final = "No events"
_NO_REDIS: Final = "No shared index"
_WORKER: Final = "{{pool}} {{worker}}"

_NUMBERS: Final = Row(
    "",
    (
        Panel(
            title="Blocks known",
            shows="Block copies that the gateways believe workers hold.",
            metric=_BLOCKS,
            kind="stat",
            empty="No index",
            queries=(Query(f"sum ({fact(_BLOCKS, by='pool, worker, tier')})"),),
        ),
        Panel(
            title="Exact workers",
            shows="Share of workers whose blocks are known from their own events.",
            metric="warmlane_worker_exact",
            kind="stat",
            unit="percentunit",
            empty="No workers",
            maximum=1.0,
            base="orange",
            thresholds=(Threshold(1.0, "green"),),
            queries=(Query(f"avg ({fact('warmlane_worker_exact')})"),),
        ),
        Panel(
            title="Worst event lag",
            shows="How long events have been due that did not come.",
            metric=_LAG,
            kind="stat",
            unit="s",
            empty=_NO_EVENTS,
            thresholds=(Threshold(5.0, "orange"), Threshold(30.0, "red")),
            queries=(Query(f"max ({fact(_LAG)})"),),
        ),
        Panel(
            title="Event gaps",
            shows="Times a second that KV events were missing and had to be asked for.",
            metric=f"{_EVENT}_gaps_total",
            kind="stat",
            unit="ops",
            empty=_NO_EVENTS,
            queries=(Query(rate(f"{_EVENT}_gaps_total")),),
        ),
        Panel(
            title="Prompt parity",
            shows="Lowest of all workers: 1 their prompt tokens equal ours, 0 they diverged, -1 "
            "not known yet.",
            metric="warmlane_worker_parity",
            kind="stat",
            empty="No workers",
            minimum=None,
            base="orange",
            thresholds=(Threshold(0.0, "red"), Threshold(1.0, "green")),
            queries=(Query(f"min ({fact('warmlane_worker_parity', by='pool, worker')})"),),
        ),
        Panel(
            title="Shared index age",
            shows="How long ago the oldest view of a worker was known to be the truth, at the "
            "worst gateway.",
            metric="warmlane_index_age_seconds",
            kind="stat",
            unit="s",
            empty=_NO_REDIS,
            thresholds=(Threshold(3.0, "orange"), Threshold(10.0, "red")),
            queries=(Query(fact("warmlane_index_age_seconds", by="")),),
        ),
        Panel(
            title="Redis",
            shows="1 while it answers every gateway.",
            metric="warmlane_redis_up",
            kind="stat",
            empty=_NO_REDIS,
            base="red",
            thresholds=(Threshold(1.0, "green"),),
            queries=(Query(f"min ({gauge('warmlane_redis_up', by='instance')})"),),
        ),
        Panel(
            title="Other gateways heard",
            shows="The fewest that any gateway hears.",
            metric="warmlane_other_gateways",
            kind="stat",
            empty="One gateway",
            queries=(Query(f"min ({gauge('warmlane_other_gateways', by='instance, pool')})"),),
        ),
    ),
)

_INDEX: Final = Row(
    "What is known",
    (
        Panel(
            title="Blocks by worker and tier",
            shows="Block copies that each worker is believed to hold.",
            metric=_BLOCKS,
            empty="No index",
            queries=(
                Query(fact(_BLOCKS, by="pool, worker, tier"), "{{pool}} {{worker}} {{tier}}"),
            ),
        ),
        Panel(
            title="Blocks that came and went",
            shows="Block copies stored and removed by events.",
            metric=f"{_EVENT}_stored_blocks_total",
            unit="ops",
            empty=_NO_EVENTS,
            queries=(
                Query(rate(f"{_EVENT}_stored_blocks_total"), "stored"),
                Query(rate(f"{_EVENT}_removed_blocks_total"), "removed"),
            ),
        ),
    ),
)

_EVENTS: Final = Row(
    "KV events",
    (
        Panel(
            title="Event lag",
            shows="How long events have been due that did not come, by worker.",
            metric=_LAG,
            unit="s",
            empty=_NO_EVENTS,
            queries=(Query(fact(_LAG), _WORKER),),
        ),
        Panel(
            title="Time since the last event",
            shows="Long for idle workers too; it means something only beside the lag.",
            metric="warmlane_worker_event_age_seconds",
            unit="s",
            empty=_NO_EVENTS,
            # Of several gateways the one that follows the events knows best.
            queries=(
                Query(
                    f"min by (pool, worker) "
                    f"({fact('warmlane_worker_event_age_seconds', by='instance, pool, worker')})",
                    _WORKER,
                ),
            ),
        ),
        Panel(
            title="Gaps and how they were closed",
            shows="Missing events, those got from a worker's buffer, those that could not be "
            "had, and workers whose cache was new.",
            metric=f"{_EVENT}_gaps_total",
            unit="ops",
            empty=_NO_EVENTS,
            queries=tuple(
                Query(rate(f"{_EVENT}_{name}_total"), name)
                for name in ("gaps", "replays", "losses", "restarts")
            ),
        ),
        Panel(
            title="Events not used",
            shows="Messages that were no events, of unknown types, contradicting themselves, "
            "waiting for their parent, or unusable.",
            metric=f"{_EVENT}_rejected_total",
            unit="ops",
            empty=_NO_EVENTS,
            queries=tuple(
                Query(rate(f"{_EVENT}_{name}_total"), name.replace("_", " "))
                for name in ("decode_errors", "unknown", "implausible", "orphans", "rejected")
            ),
        ),
        Panel(
            title="State of each worker's events",
            shows="Workers by the state that their events are in; anything but `ok` and "
            "`waiting` has a reason to be looked at.",
            metric=_HEALTH_STATE,
            is_stacked=True,
            empty=_NO_EVENTS,
            queries=(
                Query(
                    f"{total('state')} ({fact(_HEALTH_STATE, by='pool, worker, state')})",
                    "{{state}}",
                ),
            ),
        ),
        Panel(
            title="Prompt parity by worker",
            shows="1 its prompt tokens equal ours, 0 they diverged, -1 not known yet.",
            metric="warmlane_worker_parity",
            minimum=-1.0,
            maximum=1.0,
            empty="No workers",
            queries=(
                Query(
                    f"min by (pool, worker) "
                    f"({fact('warmlane_worker_parity', by='instance, pool, worker')})",
                    _WORKER,
                ),
            ),
        ),
    ),
)

_REPLICAS: Final = Row(
    "Several gateways",
    (
        Panel(
            title="Age of the shared view",
            shows="How long ago the oldest view of a worker was known to be the truth.",
            metric="warmlane_index_pool_age_seconds",
            unit="s",
            empty=_NO_REDIS,
            queries=(
                Query(
                    fact("warmlane_index_pool_age_seconds", by="instance, pool"),
                    "{{instance}} {{pool}}",
                ),
            ),
        ),
        Panel(
            title="Age of other gateways' load",
            shows="How old the knowledge of what others have in flight is; above 150 ms fewer "
            "workers are compared.",
            metric="warmlane_load_age_seconds",
            unit="s",
            empty="One gateway",
            queries=(
                Query(
                    fact("warmlane_load_age_seconds", by="instance, pool"),
                    "{{instance}} {{pool}}",
                ),
            ),
        ),
        Panel(
            title="Leases",
            shows="Workers whose events each gateway reads for all; together every worker once.",
            metric="warmlane_index_leases",
            is_stacked=True,
            empty=_NO_REDIS,
            queries=(Query(gauge("warmlane_index_leases", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Published and pending blocks",
            shows="Block states published per second, and blocks still to be published.",
            metric="warmlane_index_published_blocks_total",
            empty=_NO_REDIS,
            queries=(
                Query(rate("warmlane_index_published_blocks_total"), "published/s"),
                Query(gauge("warmlane_index_pending_blocks"), "pending"),
            ),
        ),
        Panel(
            title="Redis outages and errors",
            shows="Times that Redis went away, and calls that failed.",
            metric="warmlane_redis_outages_total",
            unit="ops",
            empty=_NO_REDIS,
            queries=(
                Query(rate("warmlane_redis_outages_total"), "outages"),
                Query(rate("warmlane_redis_errors_total"), "errors"),
            ),
        ),
        Panel(
            title="Load reports",
            shows="Reports of load sent to other gateways and heard from them.",
            metric="warmlane_load_reports_total",
            unit="ops",
            empty="One gateway",
            queries=(Query(rate("warmlane_load_reports_total", by="direction"), "{{direction}}"),),
        ),
    ),
)

INDEX: Final = Board(
    name="index",
    title="Warmlane / Index and replicas",
    about="Is what the gateways believe about workers true and young.",
    rows=(_NUMBERS, _INDEX, _EVENTS, DISCOVERY, _REPLICAS),
)
