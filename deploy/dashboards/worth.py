"""Worth: does a hit really shorten prefill, for whom, and do lower tiers pay."""

from __future__ import annotations

from functools import reduce
from typing import Final

from deploy.dashboards.board import Board, Filter
from deploy.dashboards.panels import Matrix, Panel, Query, Row, Threshold
from deploy.dashboards.queries import fact, gauge, mean, quantile, rate, ratio

_HITS: Final = "warmlane_observed_hit_tokens_total"
_COMPUTED: Final = "warmlane_computed_prompt_tokens_total"
_PREFILL: Final = "warmlane_prefill_by_hit_seconds"
_TTFT: Final = "warmlane_ttft_by_hit_seconds"
_TOKENS: Final = "warmlane_prompt_tokens_by_hit_total"
_TENANT_SAVED: Final = "warmlane_tenant_saved_seconds_total"
_TENANT_TOKENS: Final = "warmlane_tenant_tokens_total"
_PREDICTED: Final = "warmlane_runner_reuse_gain_predicted_seconds_total"
_GAINED: Final = "warmlane_runner_reuse_gain_actual_seconds_total"
_LOST: Final = "warmlane_runner_reuse_loss_actual_seconds_total"
_VALUE: Final = "warmlane_worker_cache_value_seconds"
# A table covers what the dashboard shows; only there are cold prompts of each length sure to be.
_RANGE: Final = "$__range"
_WITHIN: Final = "prompt_length, hit_share"
_CELL: Final = "{{prompt_length}} hit {{hit_share}}"
# Those of whole pools; tenants are parts of them.
_POOLS: Final = 'tenant=""'
_LENGTHS: Final = 'prompt_length=~"$prompt_length"'
# Label values of the two groupings, and what they mean, in words that sort by size.
_SHARES: Final = {"0": "0 %", "lt_50": "1 to 49 %", "lt_90": "50 to 89 %", "ge_90": "90 to 100 %"}
_LENGTH_NAMES: Final = {
    "lt_512": "below 512",
    "lt_2k": "below 2k",
    "lt_8k": "below 8k",
    "lt_32k": "below 32k",
    "ge_32k": "32k and more",
}


def _saved(window: str) -> str:
    """Return the seconds of prefill a second that hits leave out.

    Each prompt with a hit is compared with cold ones of its pool and its own length: what its
    tokens would have taken at their pace, less what it took.
    """
    group = "pool, prompt_length"
    hits, cold = 'hit_share!="0"', 'hit_share="0"'
    tokens = rate(_TOKENS, hits, by=f"{group}, hit_share", window=window)
    spent = rate(f"{_PREFILL}_sum", hits, by=f"{group}, hit_share", window=window)
    pace = ratio(
        rate(f"{_PREFILL}_sum", cold, by=group, window=window),
        rate(_TOKENS, cold, by=group, window=window),
    )
    return f"sum ({tokens} * on ({group}) group_left () ({pace}) - {spent})"


def _named(expr: str) -> str:
    """Return the query with hit shares in words."""
    return reduce(
        lambda inner, pair: (
            f'label_replace({inner}, "hit_share", "{pair[1]}", "hit_share", "{pair[0]}")'
        ),
        _SHARES.items(),
        expr,
    )


def _table(title: str, shows: str, metric: str, expr: str) -> Panel:
    return Panel(
        title=title,
        shows=shows,
        metric=metric,
        kind="table",
        unit="s",
        width=8,
        matrix=Matrix("hit_share", "prompt_length", _LENGTH_NAMES),
        queries=(Query(_named(expr), is_range_total=True),),
    )


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
            metric=_PREFILL,
            kind="stat",
            unit="percentunit",
            minimum=None,
            maximum=1.0,
            empty="No cold prompts to compare with",
            queries=(
                Query(
                    ratio(
                        _saved(_RANGE),
                        f"({_saved(_RANGE)} + {rate(f'{_PREFILL}_sum', window=_RANGE)})",
                    ),
                    is_range_total=True,
                ),
            ),
        ),
        Panel(
            title="Workers' worth of prefill",
            shows="Seconds of prefill left out per second, over the time shown: so many workers "
            "would do nothing but compute what is cached.",
            metric=_PREFILL,
            kind="stat",
            decimals=2,
            minimum=None,
            empty="No cold prompts to compare with",
            queries=(Query(_saved(_RANGE), is_range_total=True),),
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

_DOES_IT: Final = Row(
    "Does a hit really shorten prefill? Compared within prompts of one length",
    (
        _table(
            "Prefill per 1,000 prompt tokens, mean",
            "TTFT less the wait in the gateway, per 1,000 tokens of the prompt, by prompt length "
            "and share found cached. Each column should fall from top to bottom.",
            _PREFILL,
            "1000 * "
            + ratio(
                rate(f"{_PREFILL}_sum", by=_WITHIN, window=_RANGE),
                rate(_TOKENS, by=_WITHIN, window=_RANGE),
            ),
        ),
        _table(
            "TTFT, mean",
            "Mean time to first token, by prompt length and share found cached.",
            _TTFT,
            mean(_TTFT, by=_WITHIN, window=_RANGE),
        ),
        _table(
            "TTFT, p99",
            "The tail beside the mean: a mean that falls while this stays is restores or queues "
            "that eat what hits save.",
            _TTFT,
            quantile(0.99, _TTFT, by=_WITHIN, window=_RANGE),
        ),
        Panel(
            title="Prefill per 1,000 prompt tokens",
            shows="As above, over time.",
            metric=_PREFILL,
            unit="s",
            width=8,
            queries=(
                Query(
                    "1000 * "
                    + ratio(
                        rate(f"{_PREFILL}_sum", _LENGTHS, by=_WITHIN),
                        rate(_TOKENS, _LENGTHS, by=_WITHIN),
                    ),
                    _CELL,
                ),
            ),
        ),
        Panel(
            title="TTFT, mean over time",
            shows="Mean time to first token by prompt length and share found cached. Points link "
            "to traces.",
            metric=_TTFT,
            unit="s",
            width=8,
            has_exemplars=True,
            queries=(Query(mean(_TTFT, _LENGTHS, by=_WITHIN), _CELL),),
        ),
        Panel(
            title="TTFT, p99 over time",
            shows="The tail of the same. Points link to traces.",
            metric=_TTFT,
            unit="s",
            width=8,
            has_exemplars=True,
            queries=(Query(quantile(0.99, _TTFT, _LENGTHS, by=_WITHIN), _CELL),),
        ),
        Panel(
            title="Prompt tokens by share cached",
            shows="How the traffic divides: the comparison says little about a line with no "
            "traffic.",
            metric=_TOKENS,
            unit="count:tok/s",
            is_stacked=True,
            queries=(Query(rate(_TOKENS, _LENGTHS, by="hit_share"), "hit {{hit_share}}"),),
        ),
        Panel(
            title="Prompt tokens, cached and computed",
            shows="Prefill tokens a second that workers computed, and those left out.",
            metric=_COMPUTED,
            unit="count:tok/s",
            is_stacked=True,
            queries=(Query(rate(_COMPUTED), "computed"), Query(rate(_HITS), "cached")),
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
    rows=(_NUMBERS, _DOES_IT, _WHO, _TIERS),
    filters=(Filter("prompt_length", f"{_TOKENS}"),),
)
