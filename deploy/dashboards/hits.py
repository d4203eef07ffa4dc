"""Does a hit shorten prefill: prompts with and without hits, compared within one length."""

from __future__ import annotations

from functools import reduce
from typing import Final

from deploy.dashboards.panels import Matrix, Panel, Query, Row
from deploy.dashboards.queries import mean, quantile, rate, ratio

_HITS: Final = "warmlane_observed_hit_tokens_total"
_COMPUTED: Final = "warmlane_computed_prompt_tokens_total"
PREFILL: Final = "warmlane_prefill_by_hit_seconds"
_TTFT: Final = "warmlane_ttft_by_hit_seconds"
TOKENS: Final = "warmlane_prompt_tokens_by_hit_total"
# A table covers what the dashboard shows; only there are cold prompts of each length sure to be.
RANGE: Final = "$__range"
_WITHIN: Final = "prompt_length, hit_share"
_CELL: Final = "{{prompt_length}} hit {{hit_share}}"
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


def saved(window: str) -> str:
    """Return the seconds of prefill a second that hits leave out.

    Each prompt with a hit is compared with cold ones of its pool and its own length: what its
    tokens would have taken at their pace, less what it took.
    """
    group = "pool, prompt_length"
    hits, cold = 'hit_share!="0"', 'hit_share="0"'
    tokens = rate(TOKENS, hits, by=f"{group}, hit_share", window=window)
    spent = rate(f"{PREFILL}_sum", hits, by=f"{group}, hit_share", window=window)
    pace = ratio(
        rate(f"{PREFILL}_sum", cold, by=group, window=window),
        rate(TOKENS, cold, by=group, window=window),
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


BY_HIT: Final = Row(
    "Does a hit really shorten prefill? Compared within prompts of one length",
    (
        _table(
            "Prefill per 1,000 prompt tokens, mean",
            "TTFT less the wait in the gateway, per 1,000 tokens of the prompt, by prompt length "
            "and share found cached. Each column should fall from top to bottom.",
            PREFILL,
            "1000 * "
            + ratio(
                rate(f"{PREFILL}_sum", by=_WITHIN, window=RANGE),
                rate(TOKENS, by=_WITHIN, window=RANGE),
            ),
        ),
        _table(
            "TTFT, mean",
            "Mean time to first token, by prompt length and share found cached.",
            _TTFT,
            mean(_TTFT, by=_WITHIN, window=RANGE),
        ),
        _table(
            "TTFT, p99",
            "The tail beside the mean: a mean that falls while this stays is restores or queues "
            "that eat what hits save.",
            _TTFT,
            quantile(0.99, _TTFT, by=_WITHIN, window=RANGE),
        ),
        Panel(
            title="Prefill per 1,000 prompt tokens",
            shows="The first table over time, for the prompt lengths chosen above.",
            metric=PREFILL,
            unit="s",
            width=8,
            queries=(
                Query(
                    "1000 * "
                    + ratio(
                        rate(f"{PREFILL}_sum", _LENGTHS, by=_WITHIN),
                        rate(TOKENS, _LENGTHS, by=_WITHIN),
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
            metric=TOKENS,
            unit="count:tok/s",
            is_stacked=True,
            queries=(Query(rate(TOKENS, _LENGTHS, by="hit_share"), "hit {{hit_share}}"),),
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
