"""KV that workers fetch from each other or from a store instead of computing it."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.panels import Panel, Query, Row
from deploy.dashboards.queries import rate, ratio

_NONE: Final = "Nothing pulled"
_WORKER: Final = "{{pool}} {{worker}}"
_BYTES: Final = "warmlane_peer_pull_bytes_total"
_SECONDS: Final = "warmlane_peer_pull_seconds_total"

PULLS: Final = Row(
    "KV from peers and stores",
    (
        Panel(
            title="Requests that pull",
            shows="Requests whose worker was told to fetch KV from elsewhere, by that worker.",
            metric="warmlane_pulls_total",
            unit="reqps",
            is_stacked=True,
            empty=_NONE,
            queries=(Query(rate("warmlane_pulls_total", by="pool, worker"), _WORKER),),
        ),
        Panel(
            title="Tokens to pull",
            shows="Prompt tokens whose KV was to be fetched instead of computed.",
            metric="warmlane_pulled_tokens_total",
            unit="count:tok/s",
            is_stacked=True,
            empty=_NONE,
            queries=(Query(rate("warmlane_pulled_tokens_total", by="pool, worker"), _WORKER),),
        ),
        Panel(
            title="Bytes pulled and served",
            shows="KV that bundled runners fetched, by source, and that they handed to others.",
            metric=_BYTES,
            unit="Bps",
            empty=_NONE,
            queries=(
                Query(rate(_BYTES, by="source"), "from {{source}}"),
                Query(rate("warmlane_peer_served_bytes_total"), "served"),
            ),
        ),
        Panel(
            title="Speed of a pull",
            shows="Bytes a second while a pull runs, by source: what routing counts with.",
            metric=_BYTES,
            unit="Bps",
            empty=_NONE,
            queries=(
                Query(ratio(rate(_BYTES, by="source"), rate(_SECONDS, by="source")), "{{source}}"),
            ),
        ),
        Panel(
            title="Pulls that came to nothing",
            shows="Pulls that ended early, by source; answers to other runners cut short, and "
            "requests of theirs refused as too many.",
            metric="warmlane_peer_pulls_failed_total",
            unit="ops",
            empty=_NONE,
            queries=(
                Query(rate("warmlane_peer_pulls_failed_total", by="source"), "{{source}} failed"),
                Query(rate("warmlane_peer_cut_short_total"), "cut short"),
                Query(rate("warmlane_peer_refused_total"), "refused"),
            ),
        ),
    ),
)
