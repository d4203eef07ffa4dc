"""Warm-up and documents: what was computed ahead, and what came of it."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.board import Board
from deploy.dashboards.panels import Panel, Query, Row, Threshold
from deploy.dashboards.queries import fact, gauge, rate, ratio

_COMPUTED: Final = "warmlane_warm_computed_tokens_total"
_CACHED: Final = "warmlane_warm_cached_tokens_total"
_HIT: Final = "warmlane_warm_hit_tokens_total"
_FAILED: Final = "warmlane_warm_failed_total"
_DOCUMENTS: Final = "warmlane_warm_documents"
_MISSES: Final = "warmlane_miss_tokens_total"
_NO_WARMUP: Final = "No warm-up"
# Since the gateway's start: warm-up pays back over hours, not within one rate interval.
_RETURN: Final = ratio(gauge(_HIT), gauge(_COMPUTED))

_NUMBERS: Final = Row(
    "",
    (
        Panel(
            title="Warm documents",
            shows="Documents and prefixes warmed and still held; a copy on two workers counts "
            "twice.",
            metric=_DOCUMENTS,
            kind="stat",
            empty=_NO_WARMUP,
            queries=(Query(f"sum ({fact(_DOCUMENTS, by='worker')})"),),
        ),
        Panel(
            title="Computed ahead",
            shows="Tokens a second that workers compute for warm-up.",
            metric=_COMPUTED,
            kind="stat",
            unit="count:tok/s",
            empty=_NO_WARMUP,
            queries=(Query(rate(_COMPUTED)),),
        ),
        Panel(
            title="Hit after warm-up",
            shows="Tokens a second of clients' prompts found in what was warmed.",
            metric=_HIT,
            kind="stat",
            unit="count:tok/s",
            empty="No hits yet",
            queries=(Query(rate(_HIT)),),
        ),
        Panel(
            title="Return",
            shows="Tokens hit per token computed ahead, since the gateways started; below 1 "
            "warm-up has cost more prefill than it saved.",
            metric=_HIT,
            kind="stat",
            empty="No hits yet",
            decimals=2,
            queries=(Query(_RETURN),),
        ),
        Panel(
            title="Failed",
            shows="Warm-up requests a second that came to nothing.",
            metric=_FAILED,
            kind="stat",
            unit="reqps",
            empty="None failed",
            thresholds=(Threshold(0.01, "orange"),),
            queries=(Query(rate(_FAILED)),),
        ),
        Panel(
            title="Broken prefixes",
            shows="Prompt tokens a second computed again since something changed early in a "
            "prompt that was there before.",
            metric=_MISSES,
            kind="stat",
            unit="count:tok/s",
            empty="None found",
            queries=(Query(rate(_MISSES)),),
        ),
    ),
)

_WARM: Final = Row(
    "Warm-up",
    (
        Panel(
            title="Warm-up tokens",
            shows="Computed ahead, and already there when warm-up asked.",
            metric=_COMPUTED,
            unit="count:tok/s",
            empty=_NO_WARMUP,
            queries=(
                Query(rate(_COMPUTED, by="worker"), "{{worker}} computed"),
                Query(rate(_CACHED, by="worker"), "{{worker}} already there"),
            ),
        ),
        Panel(
            title="Hits after warm-up",
            shows="Tokens of clients' prompts found in what was warmed, by worker.",
            metric=_HIT,
            unit="count:tok/s",
            empty="No hits yet",
            queries=(Query(rate(_HIT, by="worker"), "{{worker}}"),),
        ),
        Panel(
            title="Warm documents by worker",
            shows="Copies of documents and prefixes that each worker still holds. A fall without "
            "warm-up is eviction.",
            metric=_DOCUMENTS,
            is_stacked=True,
            empty=_NO_WARMUP,
            queries=(Query(fact(_DOCUMENTS, by="worker"), "{{worker}}"),),
        ),
        Panel(
            title="Caches filled again by themselves",
            shows="Times that `keep_warm` filled the cache of a worker that had lost it, by why.",
            metric="warmlane_warm_keep_runs_total",
            unit="ops",
            empty="None was",
            queries=(Query(rate("warmlane_warm_keep_runs_total", by="why"), "{{why}}"),),
        ),
        Panel(
            title="Prompts kept to be warmed",
            shows="Prompts that gateways keep for `keep_warm`, and their memory.",
            metric="warmlane_warm_stored_prompts",
            empty="No gateway",
            queries=(Query(gauge("warmlane_warm_stored_prompts", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Memory of kept prompts",
            shows="Bytes of the prompts kept for `keep_warm`.",
            metric="warmlane_warm_stored_bytes",
            unit="bytes",
            empty="No gateway",
            queries=(Query(gauge("warmlane_warm_stored_bytes", by="instance"), "{{instance}}"),),
        ),
    ),
)

_BROKEN: Final = Row(
    "What breaks prefixes",
    (
        Panel(
            title="Tokens computed again, by cause",
            shows="Prompts that hit less than a near-duplicate before them, by the first thing "
            "that differs: a date, an id, tools in another order.",
            metric=_MISSES,
            unit="count:tok/s",
            is_stacked=True,
            width=24,
            empty="None found",
            queries=(Query(rate(_MISSES, by="cause"), "{{cause}}"),),
        ),
    ),
)

WARMUP: Final = Board(
    name="warmup",
    title="Warmlane / Warm-up and documents",
    about="What was computed ahead, what came of it, and what breaks prefixes.",
    rows=(_NUMBERS, _WARM, _BROKEN),
)
