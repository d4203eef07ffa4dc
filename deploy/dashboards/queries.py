"""The PromQL of all panels, in the few forms that are right.

Rates go over ``$__rate_interval``. Divisors are guarded, so that no traffic is an empty answer and
not a division by zero. Quantiles come from buckets added up before, never from other quantiles.
Where several gateways export the same fact about a worker, its highest value is taken: adding would
count it once per gateway.
"""

from __future__ import annotations

from deploy.dashboards.series import FILTERS, family_of

# What went wrong on our side of the wire: not the client's own mistakes, budgets or impatience.
FAILED = "ok|client_closed|rejected|refused"
WINDOW = "$__rate_interval"


def select(series: str, *matchers: str) -> str:
    """Return a selector with the dashboard's filters that the series has.

    Args:
        series: Full name, with ``_total`` or ``_bucket``.
        matchers: More, as ``outcome="ok"``.
    """
    names = ("job", "instance", *FILTERS[family_of(series)])
    chosen = [f'{name}=~"${name}"' for name in names]
    return f"{series}{{{','.join([*chosen, *matchers])}}}"


def rate(series: str, *matchers: str, by: str = "", window: str = WINDOW) -> str:
    """Return what a counter grew by per second, added up over everything but ``by``."""
    return f"{total(by)} (rate({select(series, *matchers)}[{window}]))"


def total(by: str) -> str:
    """Return the head of a sum, to be followed by a space and parentheses."""
    return _head("sum", by)


def gauge(series: str, *matchers: str, by: str = "") -> str:
    """Return a gauge of which every process has a part of its own, added up."""
    return f"{total(by)} ({select(series, *matchers)})"


def fact(series: str, *matchers: str, by: str = "pool, worker") -> str:
    """Return a gauge about a worker that every gateway exports: once per worker."""
    return f"{_head('max', by)} ({select(series, *matchers)})"


def fact_rate(series: str, *matchers: str, by: str = "pool, worker") -> str:
    """Return the growth of a worker's counter that every gateway exports: once per worker."""
    return f"{_head('max', by)} (rate({select(series, *matchers)}[{WINDOW}]))"


def quantile(
    share: float, histogram: str, *matchers: str, by: str = "", window: str = WINDOW
) -> str:
    """Return a quantile of a histogram's buckets, added up over everything but ``by``."""
    labels = f"le, {by}" if by else "le"
    buckets = rate(f"{histogram}_bucket", *matchers, by=labels, window=window)
    return f"histogram_quantile({share:g}, {buckets})"


def mean(histogram: str, *matchers: str, by: str = "", window: str = WINDOW) -> str:
    """Return the mean of what a histogram saw."""
    return ratio(
        rate(f"{histogram}_sum", *matchers, by=by, window=window),
        rate(f"{histogram}_count", *matchers, by=by, window=window),
    )


def ratio(part: str, whole: str) -> str:
    """Return a quotient that is empty where nothing was counted."""
    return f"{part} / ({whole} > 0)"


def share(part: str, whole: str) -> str:
    """Return the share of a kind that may never have been counted: then 0 of what there was."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def _head(operator: str, by: str) -> str:
    return f"{operator} by ({by})" if by else operator
