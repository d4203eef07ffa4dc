"""Worth: does a hit really shorten prefill, for whom, and do lower tiers pay."""

from __future__ import annotations

from typing import Final

from deploy.dashboards.board import Board, Filter
from deploy.dashboards.hits import BY_HIT, PREFILL, RANGE, TOKENS, saved
from deploy.dashboards.panels import Panel, Query, Row, Threshold
from deploy.dashboards.queries import fact, gauge, rate, ratio

_HITS: Final = "warmlane_observed_hit_tokens_total"
_COMPUTED: Final = "warmlane_computed_prompt_tokens_total"
_TENANT_SAVED: Final = "warmlane_tenant_saved_seconds_total"
_TENANT_TOKENS: Final = "warmlane_tenant_tokens_total"
_PREDICTED: Final = "warmlane_runner_reuse_gain_predicted_seconds_total"
_GAINED: Final = "warmlane_runner_reuse_gain_actual_seconds_total"
_LOST: Final = "warmlane_runner_reuse_loss_actual_seconds_total"
_VALUE: Final = "warmlane_worker_cache_value_seconds"
# Those of whole pools; tenants are parts of them.
_POOLS: Final = 'tenant=""'


_NUMBERS: Final = Row(
    "",
    (
        Panel(
            title="Prefix hit ratio",
            shows="Share of prompt tokens that workers found cached.",
            metric=_HITS,
            kind="stat",
            unit="percentunit",
            maximum=1.0,
            queries=(Query(ratio(rate(_HITS), f"({rate(_HITS)} + {rate(_COMPUTED)})")),),
        ),
        Panel(
            title="Prefill time saved",
            shows="Share of prefill time that hits leave out, against cold prompts of the same "
            "length, over the time shown. Negative: hits are slower than computing.",
            metric=PREFILL,
            kind="stat",
            unit="percentunit",
            minimum=None,
            maximum=1.0,
            empty="No cold prompts to compare with",
            queries=(
                Query(
                    ratio(
                        saved(RANGE),
                        f"({saved(RANGE)} + {rate(f'{PREFILL}_sum', window=RANGE)})",
                    ),
                    is_range_total=True,
                ),
            ),
        ),
        Panel(
            title="Workers' worth of prefill",
            shows="Seconds of prefill left out per second, over the time shown: so many workers "
            "would do nothing but compute what is cached.",
            metric=PREFILL,
            kind="stat",
            decimals=2,
            minimum=None,
            empty="No cold prompts to compare with",
            queries=(Query(saved(RANGE), is_range_total=True),),
        ),
        Panel(
            title="Prefill computed",
            shows="Prompt tokens a second that workers had to compute.",
            metric=_COMPUTED,
            kind="stat",
            unit="count:tok/s",
            queries=(Query(rate(_COMPUTED)),),
        ),
        Panel(
            title="Saved for tenants",
            shows="Seconds that hits saved all tenants' requests, per hour of now.",
            metric=_TENANT_SAVED,
            kind="stat",
            unit="s",
            minimum=None,
            queries=(Query(f"{rate(_TENANT_SAVED)} * 3600"),),
        ),
        Panel(
            title="Net gain of restores",
            shows="Seconds that restores from lower tiers saved less those they lost, per hour "
            "of now. Below 0 a tier costs time.",
            metric=_GAINED,
            kind="stat",
            unit="s",
            minimum=None,
            base="red",
            thresholds=(Threshold(0.0, "green"),),
            empty="No lower tiers",
            queries=(Query(f"({rate(_GAINED)} - {rate(_LOST)}) * 3600"),),
        ),
        Panel(
            title="Lower tiers, saved less cost",
            shows="What an hour's reuses save by restores, less what storing costs.",
            metric="warmlane_worth_saved_seconds",
            kind="stat",
            unit="s",
            minimum=None,
            empty="Not known yet",
            queries=(
                Query(
                    f"{gauge('warmlane_worth_saved_seconds', _POOLS)} - "
                    f"{gauge('warmlane_worth_cost_seconds', _POOLS)}"
                ),
            ),
        ),
        Panel(
            title="Least valuable cache",
            shows="Seconds an hour that the cache of the worker saves whose loss would cost "
            "least: the one to scale down first.",
            metric=_VALUE,
            kind="stat",
            unit="s",
            minimum=None,
            empty="Not known yet",
            queries=(Query(f"min ({gauge(_VALUE, by='pool, worker')})"),),
        ),
    ),
)

_WHO: Final = Row(
    "For whom, and where",
    (
        Panel(
            title="Seconds saved by tenant",
            shows="Seconds that hits saved each tenant's requests, per second; tenants without a "
            "name of their own are `other`.",
            metric=_TENANT_SAVED,
            unit="s",
            minimum=None,
            queries=(Query(rate(_TENANT_SAVED, by="tenant"), "{{tenant}}"),),
        ),
        Panel(
            title="Cached share by tenant",
            shows="Share of each tenant's prompt tokens that was cached.",
            metric=_TENANT_TOKENS,
            unit="percentunit",
            maximum=1.0,
            queries=(
                Query(
                    ratio(
                        rate(_TENANT_TOKENS, 'kind="cached"', by="tenant"),
                        rate(_TENANT_TOKENS, 'kind="prompt"', by="tenant"),
                    ),
                    "{{tenant}}",
                ),
            ),
        ),
        Panel(
            title="Tokens by tenant",
            shows="Prompt, cached and output tokens of each tenant.",
            metric=_TENANT_TOKENS,
            unit="count:tok/s",
            queries=(Query(rate(_TENANT_TOKENS, by="tenant, kind"), "{{tenant}} {{kind}}"),),
        ),
        Panel(
            title="Requests by tenant",
            shows="Requests that ended, by tenant.",
            metric="warmlane_tenant_requests_total",
            unit="reqps",
            is_stacked=True,
            queries=(Query(rate("warmlane_tenant_requests_total", by="tenant"), "{{tenant}}"),),
        ),
        Panel(
            title="What each worker's cache saves",
            shows="Seconds an hour. The lowest is the one to scale down first.",
            metric=_VALUE,
            unit="s",
            minimum=None,
            empty="Not known yet",
            queries=(Query(gauge(_VALUE, by="pool, worker"), "{{pool}} {{worker}}"),),
        ),
    ),
)

_TIERS: Final = Row(
    "Do lower tiers pay?",
    (
        Panel(
            title="Restores: predicted and actual gain, and loss",
            shows="Seconds per second that restores were expected to save, those saved by restores "
            "quicker than computing, and those lost by slower ones.",
            metric=_GAINED,
            unit="s",
            empty="No lower tiers",
            queries=(
                Query(rate(_PREDICTED), "predicted"),
                Query(rate(_GAINED), "gained"),
                Query(rate(_LOST), "lost"),
            ),
        ),
        Panel(
            title="Saved and spent in an hour",
            shows="What an hour's reuses save by restores and what storing costs, by tenant; "
            "without a tenant it is the whole pool.",
            metric="warmlane_worth_saved_seconds",
            unit="s",
            minimum=None,
            empty="Not known yet",
            queries=(
                Query(
                    gauge("warmlane_worth_saved_seconds", by="pool, tenant"),
                    "{{pool}} {{tenant}} saved",
                ),
                Query(
                    gauge("warmlane_worth_cost_seconds", by="pool, tenant"),
                    "{{pool}} {{tenant}} cost",
                ),
            ),
        ),
        Panel(
            title="Is a lower tier worth it?",
            shows="1 for the verdict that holds, by tenant: `yes`, `no`, or `unknown` while too "
            "little was seen; without a tenant it is the whole pool.",
            metric="warmlane_worth_verdict",
            maximum=1.0,
            empty="Not known yet",
            queries=(
                Query(
                    f"{fact('warmlane_worth_verdict', by='pool, tenant, verdict')} == 1",
                    "{{pool}} {{tenant}} {{verdict}}",
                ),
            ),
        ),
        Panel(
            title="Gain of one restore",
            shows="What one restore gains over computing, at the gateway that sees it worst; "
            "negative where it loses time.",
            metric="warmlane_worth_reuse_gain_seconds",
            unit="s",
            minimum=None,
            empty="Not known yet",
            queries=(
                Query(
                    f"min by (pool, tenant) "
                    f"({fact('warmlane_worth_reuse_gain_seconds', by='instance, pool, tenant')})",
                    "{{pool}} {{tenant}}",
                ),
            ),
        ),
        Panel(
            title="Reuses that nobody held any more",
            shows="Tokens an hour that were to be reused and had been given up: what a larger "
            "cache, or a tier below it, could save.",
            metric="warmlane_worth_lost_tokens",
            empty="Not known yet",
            queries=(
                Query(
                    gauge("warmlane_worth_lost_tokens", by="pool, tenant"), "{{pool}} {{tenant}}"
                ),
            ),
        ),
    ),
)

WORTH: Final = Board(
    name="worth",
    title="Warmlane / Worth",
    about="Does a hit really shorten prefill, for whom, and do lower tiers pay.",
    rows=(_NUMBERS, BY_HIT, _WHO, _TIERS),
    filters=(Filter("prompt_length", TOKENS),),
)
