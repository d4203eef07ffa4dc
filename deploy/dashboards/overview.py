"""Overview: is it well, how much does it do, and what does the cache do for it."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.board import Board
from deploy.dashboards.panels import Panel, Query, Row, Threshold
from deploy.dashboards.queries import FAILED, fact, gauge, mean, quantile, rate, ratio, share

_REQUESTS: Final = "warmlane_requests_total"
_HITS: Final = "warmlane_observed_hit_tokens_total"
_MISSES: Final = "warmlane_computed_prompt_tokens_total"
# Both count the answers whose worker said how much it had cached, and no others.
_ANSWERED_TOKENS: Final = f"({rate(_HITS)} + {rate(_MISSES)})"
_ERROR_RATIO: Final = share(rate(_REQUESTS, f'outcome!~"{FAILED}"'), rate(_REQUESTS))

_NUMBERS: Final = Row(
    "",
    (
        Panel(
            title="Requests",
            shows="Requests that ended, whatever became of them.",
            metric=_REQUESTS,
            kind="stat",
            unit="reqps",
            queries=(Query(rate(_REQUESTS)),),
        ),
        Panel(
            title="Input tokens",
            shows="Prompt tokens of the requests that reached a worker, cached ones included.",
            metric="warmlane_prompt_tokens_total",
            kind="stat",
            unit="count:tok/s",
            queries=(Query(rate("warmlane_prompt_tokens_total")),),
        ),
        Panel(
            title="Output tokens",
            shows="Tokens that workers said they generated.",
            metric="warmlane_completion_tokens_total",
            kind="stat",
            unit="count:tok/s",
            queries=(Query(rate("warmlane_completion_tokens_total")),),
        ),
        Panel(
            title="Error ratio",
            shows="Share of requests that failed on our side: no worker, a worker that broke, a "
            "deadline. Refused and malformed requests and clients that left are no errors.",
            metric=_REQUESTS,
            kind="stat",
            unit="percentunit",
            thresholds=(Threshold(0.01, "orange"), Threshold(0.05, "red")),
            maximum=1.0,
            queries=(Query(_ERROR_RATIO),),
        ),
        Panel(
            title="TTFT p95",
            shows="Time to first token that 95 % of streamed answers kept.",
            metric="warmlane_ttft_seconds",
            kind="stat",
            unit="s",
            queries=(Query(quantile(0.95, "warmlane_ttft_seconds")),),
        ),
        Panel(
            title="Inter-token p95",
            shows="Mean time between two tokens that 95 % of streamed answers kept.",
            metric="warmlane_output_token_seconds",
            kind="stat",
            unit="s",
            queries=(Query(quantile(0.95, "warmlane_output_token_seconds")),),
        ),
        Panel(
            title="E2E p95",
            shows="Time from a request's head to the last byte of its answer that 95 % kept.",
            metric="warmlane_request_duration_seconds",
            kind="stat",
            unit="s",
            queries=(Query(quantile(0.95, "warmlane_request_duration_seconds")),),
        ),
        Panel(
            title="Workers ready",
            shows="Share of the known workers whose checks pass, as a gateway sees them.",
            metric="warmlane_worker_ready",
            kind="stat",
            unit="percentunit",
            empty="No workers",
            base="red",
            thresholds=(Threshold(0.5, "orange"), Threshold(1.0, "green")),
            maximum=1.0,
            queries=(Query(f"avg ({fact('warmlane_worker_ready')})"),),
        ),
    ),
)

_CACHE: Final = Row(
    "What the cache does",
    (
        Panel(
            title="Prefix hit ratio",
            shows="Share of prompt tokens that workers found cached.",
            metric=_HITS,
            kind="stat",
            width=6,
            unit="percentunit",
            maximum=1.0,
            queries=(Query(ratio(rate(_HITS), _ANSWERED_TOKENS)),),
        ),
        Panel(
            title="Prefill saved",
            shows="Prompt tokens a second that nobody had to compute.",
            metric=_HITS,
            kind="stat",
            width=6,
            unit="count:tok/s",
            queries=(Query(rate(_HITS)),),
        ),
        Panel(
            title="Prefill computed",
            shows="Prompt tokens a second that workers had to compute.",
            metric=_MISSES,
            kind="stat",
            width=6,
            unit="count:tok/s",
            queries=(Query(rate(_MISSES)),),
        ),
        Panel(
            title="Waiting in the gateway",
            shows="Requests held back since every worker has enough to do.",
            metric="warmlane_gate_waiting",
            kind="stat",
            width=6,
            empty="No pools",
            queries=(Query(gauge("warmlane_gate_waiting")),),
        ),
        Panel(
            title="Prompt tokens, cached and computed",
            shows="Where prompt tokens came from; the upper part is work that was left out.",
            metric=_HITS,
            unit="count:tok/s",
            is_stacked=True,
            queries=(Query(rate(_MISSES), "computed"), Query(rate(_HITS), "cached")),
        ),
        Panel(
            title="Hit ratio by worker",
            shows="Share of each worker's prompt tokens that it had cached.",
            metric=_HITS,
            unit="percentunit",
            maximum=1.0,
            queries=(
                Query(
                    ratio(
                        rate(_HITS, by="worker"),
                        f"({rate(_HITS, by='worker')} + {rate(_MISSES, by='worker')})",
                    ),
                    "{{worker}}",
                ),
            ),
        ),
    ),
)

_TRAFFIC: Final = Row(
    "How it goes",
    (
        Panel(
            title="Time to first token",
            shows="Median, tail and mean of streamed answers. Points link to traces.",
            metric="warmlane_ttft_seconds",
            unit="s",
            has_exemplars=True,
            queries=(
                Query(quantile(0.5, "warmlane_ttft_seconds"), "p50"),
                Query(quantile(0.95, "warmlane_ttft_seconds"), "p95"),
                Query(quantile(0.99, "warmlane_ttft_seconds"), "p99"),
                Query(mean("warmlane_ttft_seconds"), "mean"),
            ),
        ),
        Panel(
            title="Requests by outcome",
            shows="What became of them; `refused` and `rejected` are the client's own.",
            metric=_REQUESTS,
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate(_REQUESTS, by="outcome"), "{{outcome}}"),),
        ),
        Panel(
            title="Requests by worker",
            shows="How traffic is spread.",
            metric=_REQUESTS,
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate(_REQUESTS, 'worker!=""', by="worker"), "{{worker}}"),),
        ),
        Panel(
            title="Time between tokens",
            shows="Mean time between two tokens of one answer: median and tail over answers.",
            metric="warmlane_output_token_seconds",
            unit="s",
            queries=(
                Query(quantile(0.5, "warmlane_output_token_seconds"), "p50"),
                Query(quantile(0.95, "warmlane_output_token_seconds"), "p95"),
                Query(quantile(0.99, "warmlane_output_token_seconds"), "p99"),
            ),
        ),
        Panel(
            title="CPU of the processes",
            shows="Cores that each gateway and runner uses.",
            metric="process_cpu_seconds_total",
            unit="short",
            queries=(Query(rate("process_cpu_seconds_total", by="instance"), "{{instance}}"),),
        ),
        Panel(
            title="Memory of the processes",
            shows="Resident memory of each gateway.",
            metric="process_resident_memory_bytes",
            unit="bytes",
            queries=(Query(gauge("process_resident_memory_bytes", by="instance"), "{{instance}}"),),
        ),
    ),
)

_SELF: Final = Row(
    "Watching the watchers",
    (
        Panel(
            title="Spans by result",
            shows="Trace spans exported, dropped since too many waited, and failed at the "
            "collector.",
            metric="warmlane_spans_total",
            unit="ops",
            empty="Tracing is off",
            queries=(Query(rate("warmlane_spans_total", by="result"), "{{result}}"),),
        ),
        Panel(
            title="Counted as other",
            shows="Label values beyond the bound, counted under `other`; a client makes up names.",
            metric="warmlane_label_overflows_total",
            unit="ops",
            empty="None",
            queries=(Query(rate("warmlane_label_overflows_total", by="label"), "{{label}}"),),
        ),
    ),
)

OVERVIEW: Final = Board(
    name="overview",
    title="Warmlane / Overview",
    about="Is it well, how much does it do, and what does the cache do for it.",
    rows=(_NUMBERS, _CACHE, _TRAFFIC, _SELF),
)
