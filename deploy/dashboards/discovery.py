"""Discovery: where workers come from, and whether who names them answers."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.panels import Panel, Query, Row
from deploy.dashboards.queries import fact, rate

_NO_DISCOVERY: Final = "Listed in the configuration"

DISCOVERY: Final = Row(
    "Where workers come from",
    (
        Panel(
            title="Workers found",
            shows="Workers that each pool's discovery names: those that serve, those that are not "
            "ready yet, and entries that were refused.",
            metric="warmlane_discovery_workers",
            empty=_NO_DISCOVERY,
            queries=(
                Query(fact("warmlane_discovery_workers", by="pool, state"), "{{pool}} {{state}}"),
            ),
        ),
        Panel(
            title="Discovery answers",
            shows="1 while every gateway gets usable answers; else what was found last holds.",
            metric="warmlane_discovery_up",
            maximum=1.0,
            empty=_NO_DISCOVERY,
            queries=(
                Query(
                    f"min by (pool) ({fact('warmlane_discovery_up', by='instance, pool')})",
                    "{{pool}}",
                ),
            ),
        ),
        Panel(
            title="Discovery failures",
            shows="Times that a pool's discovery had no usable answer, at all gateways.",
            metric="warmlane_discovery_failures_total",
            unit="ops",
            empty=_NO_DISCOVERY,
            queries=(Query(rate("warmlane_discovery_failures_total", by="pool"), "{{pool}}"),),
        ),
    ),
)
