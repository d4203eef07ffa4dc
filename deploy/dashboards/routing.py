"""Routing: what is decided, why, and how far predictions are off."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.board import Board
from deploy.dashboards.panels import Panel, Query, Row, Threshold
from deploy.dashboards.queries import (
    fact,
    gauge,
    mean,
    quantile,
    rate,
    ratio,
    share,
)

_DECISIONS: Final = "warmlane_routing_decisions_total"
_PREDICTED: Final = "warmlane_predicted_hit_tokens_total"
_OBSERVED: Final = "warmlane_observed_hit_tokens_total"
_ERROR: Final = "warmlane_hit_prediction_error_tokens_total"
_PREDICTED_TTFT: Final = "warmlane_predicted_ttft_seconds"
_TTFT: Final = "warmlane_ttft_seconds"
_REQUESTS: Final = "warmlane_requests_total"
_RETRIES: Final = "warmlane_retries_total"
_FLIGHT: Final = gauge("warmlane_in_flight_requests", by="pool, worker")
# Of each pool's workers, the busiest over the mean: 1 = even.
_SKEW: Final = ratio(f"max by (pool) ({_FLIGHT})", f"avg by (pool) ({_FLIGHT})")

_NUMBERS: Final = Row(
    "",
    (
        Panel(
            title="Decisions",
            shows="Requests that were sent to a worker.",
            metric=_DECISIONS,
            kind="stat",
            unit="reqps",
            queries=(Query(rate(_DECISIONS)),),
        ),
        Panel(
            title="Decision p99",
            shows="Time to read the prompt and choose a worker that 99 % kept.",
            metric="warmlane_route_seconds",
            kind="stat",
            unit="s",
            queries=(Query(quantile(0.99, "warmlane_route_seconds")),),
        ),
        Panel(
            title="Hit prediction error",
            shows="How far predicted hit tokens were off, either way, per prompt token.",
            metric=_ERROR,
            kind="stat",
            unit="percentunit",
            queries=(Query(ratio(rate(_ERROR), rate("warmlane_prompt_tokens_total"))),),
        ),
        Panel(
            title="TTFT, predicted by observed",
            shows="Mean predicted TTFT over mean observed TTFT; 1 is right, below 1 too hopeful.",
            metric=_PREDICTED_TTFT,
            kind="stat",
            decimals=2,
            queries=(Query(ratio(mean(_PREDICTED_TTFT), f"({mean(_TTFT)})")),),
        ),
        Panel(
            title="Retries",
            shows="Share of requests that needed another attempt.",
            metric=_RETRIES,
            kind="stat",
            unit="percentunit",
            thresholds=(Threshold(0.05, "orange"), Threshold(0.2, "red")),
            queries=(Query(share(rate(_RETRIES), rate(_REQUESTS))),),
        ),
        Panel(
            title="Event-loop lag p99",
            shows="How late the gateway's timers fire; above 5 ms something blocks its loop.",
            metric="warmlane_event_loop_lag_seconds",
            kind="stat",
            unit="s",
            empty="No gateway",
            thresholds=(Threshold(0.02, "orange"), Threshold(0.1, "red")),
            queries=(Query(quantile(0.99, "warmlane_event_loop_lag_seconds")),),
        ),
    ),
)

_REASONS: Final = Row(
    "What is decided, and why",
    (
        Panel(
            title="Decisions by reason",
            shows="Why the worker was chosen: `longest_prefix` and `least_cost` by the index, "
            "`home` and `sibling` for new prompts, `no_tokens_…` where prompts cannot be read.",
            metric=_DECISIONS,
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate(_DECISIONS, by="reason"), "{{reason}}"),),
        ),
        Panel(
            title="Where prefixes come from",
            shows="Requests by where the part of the prefix comes from that the worker does not "
            "hold on its device: own lower tiers, recomputed, a peer, a shared store.",
            metric="warmlane_sources_total",
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate("warmlane_sources_total", by="source"), "{{source}}"),),
        ),
        Panel(
            title="Time of a decision",
            shows="Reading the prompt and choosing a worker; new long prompts take longest.",
            metric="warmlane_route_seconds",
            unit="s",
            queries=(
                Query(quantile(0.5, "warmlane_route_seconds"), "p50"),
                Query(quantile(0.99, "warmlane_route_seconds"), "p99"),
                Query(mean("warmlane_route_seconds"), "mean"),
            ),
        ),
        Panel(
            title="Requests by policy",
            shows="What routed them: by cost, or another policy while the roll-out is partial.",
            metric="warmlane_routed_requests_total",
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate("warmlane_routed_requests_total", by="policy"), "{{policy}}"),),
        ),
    ),
)

_HONESTY: Final = Row(
    "Predicted and observed",
    (
        Panel(
            title="Hit tokens",
            shows="What decisions expected to find cached, and what workers found.",
            metric=_PREDICTED,
            unit="count:tok/s",
            queries=(Query(rate(_PREDICTED), "predicted"), Query(rate(_OBSERVED), "observed")),
        ),
        Panel(
            title="Hit prediction error by worker",
            shows="Hit tokens by which predictions were off, per prompt token. A worker that "
            "stands out evicts unseen, or its events do not arrive.",
            metric=_ERROR,
            unit="percentunit",
            queries=(
                Query(
                    ratio(
                        rate(_ERROR, by="worker"),
                        rate("warmlane_prompt_tokens_total", by="worker"),
                    ),
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            title="TTFT, mean",
            shows="Mean time to first token of streamed answers, as decisions expected it and as "
            "it was. Points link to traces.",
            metric=_PREDICTED_TTFT,
            unit="s",
            has_exemplars=True,
            queries=(
                Query(mean(_PREDICTED_TTFT), "predicted"),
                Query(mean(_TTFT), "observed"),
            ),
        ),
        Panel(
            title="TTFT, p95",
            shows="The tail of both. Points link to traces.",
            metric=_PREDICTED_TTFT,
            unit="s",
            has_exemplars=True,
            queries=(
                Query(quantile(0.95, _PREDICTED_TTFT), "predicted"),
                Query(quantile(0.95, _TTFT), "observed"),
            ),
        ),
    ),
)

_LOAD: Final = Row(
    "Load",
    (
        Panel(
            title="In flight by worker",
            shows="Requests sent to each worker and not finished, by all gateways.",
            metric="warmlane_in_flight_requests",
            empty="No workers",
            queries=(Query(_FLIGHT, "{{pool}} {{worker}}"),),
        ),
        Panel(
            title="Load skew",
            shows="Requests in flight at the busiest worker over the pool's mean; 1 is even, the "
            "number of workers is all on one.",
            metric="warmlane_in_flight_requests",
            minimum=1.0,
            empty="Nothing in flight",
            queries=(Query(_SKEW, "{{pool}}"),),
        ),
        Panel(
            title="Queued prompt tokens",
            shows="Uncached prompt tokens sent to each worker that have no first token yet.",
            metric="warmlane_queued_tokens",
            unit="short",
            empty="No workers",
            queries=(Query(gauge("warmlane_queued_tokens", by="worker"), "{{worker}}"),),
        ),
        Panel(
            title="Queued prefill",
            shows="Seconds of prefill that wait, in the gateway and at workers; what autoscaling "
            "goes by.",
            metric="warmlane_queued_prefill_seconds",
            unit="s",
            empty="Not known",
            queries=(Query(fact("warmlane_queued_prefill_seconds", by="pool"), "{{pool}}"),),
        ),
        Panel(
            title="Waits in the gateway",
            shows="How long requests waited for a worker, of those that had to.",
            metric="warmlane_queue_seconds",
            unit="s",
            empty="Nothing waited",
            queries=(
                Query(quantile(0.5, "warmlane_queue_seconds"), "p50"),
                Query(quantile(0.95, "warmlane_queue_seconds"), "p95"),
            ),
        ),
        Panel(
            title="Refused and retried",
            shows="Requests turned away since too many waited or none got a worker in time; other "
            "attempts after failures, and those the retry budget did not allow.",
            metric="warmlane_gate_refused_total",
            unit="reqps",
            empty="No pools",
            queries=(
                Query(rate("warmlane_gate_refused_total", by="why"), "refused: {{why}}"),
                Query(rate(_RETRIES), "retries"),
                Query(rate("warmlane_retries_refused_total"), "retries not allowed"),
            ),
        ),
        Panel(
            title="Event-loop lag",
            shows="How late timers fire in each gateway.",
            metric="warmlane_event_loop_lag_seconds",
            unit="s",
            empty="No gateway",
            queries=(
                Query(
                    quantile(0.99, "warmlane_event_loop_lag_seconds", by="instance"),
                    "{{instance}} p99",
                ),
            ),
        ),
        Panel(
            title="Prompts that were not read",
            shows="Requests routed without tokens, by why: they hit only by their ring home.",
            metric="warmlane_unread_prompts_total",
            unit="reqps",
            empty="All were read",
            queries=(Query(rate("warmlane_unread_prompts_total", by="reason"), "{{reason}}"),),
        ),
    ),
)

ROUTING: Final = Board(
    name="routing",
    title="Warmlane / Routing",
    about="What is decided and why, and how far predictions are off.",
    rows=(_NUMBERS, _REASONS, _HONESTY, _LOAD),
)
