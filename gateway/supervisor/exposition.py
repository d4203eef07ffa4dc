"""Merge the metrics of several processes into those of one gateway.

Counters and histograms add up, and what a process counted before it died stays counted, so that no
counter ever goes back. Gauges are added, or the highest or lowest of the living is taken, as their
meaning asks. All processes run the same code, so equal series are equal text up to the value.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

# What each process has for itself.
SUMMED_GAUGES = frozenset(
    {"warmlane_in_flight_requests", "warmlane_queued_tokens"}
    | {"warmlane_queued_prefill_seconds", "warmlane_worker_cache_value_seconds"}
)
# One process that sees a fault is enough to show it.
LOWEST_GAUGES = frozenset(
    ("warmlane_worker_ready", "warmlane_worker_exact", "warmlane_worker_parity")
)
# Counted by each process. The other bare cumulative names are the workers' own counts, which every
# process reads from the same place.
SUMMED_UNTYPED = frozenset(("prefix_cache_hit_tokens", "prefix_cache_miss_tokens"))
# Means and quantiles of a window: made from the merged windows, see ``windows.py``.
WINDOWED = frozenset(("prefix_cache_hit_rate", "ttft_avg", "ttft_p95", "ttft_p99"))

_ADDS_UP = frozenset(("counter", "histogram", "summary"))


class Family:
    """One metric: its head lines and its series, ``name{labels}`` -> value."""

    __slots__ = ("head", "kind", "series")

    def __init__(self) -> None:
        self.head: list[str] = []
        self.kind = "untyped"
        self.series: dict[str, float] = {}


Snapshot = dict[str, Family]
"""Family name -> family, in the order of the text."""


def parse(text: str) -> Snapshot:
    """Read an exposition text as this gateway's own processes write it.

    Raises:
        ValueError: If a sample has no number.
    """
    families: Snapshot = {}
    family = Family()
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, name, rest = [*line.split(" ", 3), "", ""][:4]
            family = families.setdefault(name, Family())
            if line not in family.head:
                family.head.append(line)
            if what == "TYPE":
                family.kind = rest
        elif line:
            series, _, value = line.rpartition(" ")
            family.series[series] = float(value)
    return families


def adds_up(name: str, family: Family) -> bool:
    """Say whether a family counts per process, so that its values add up, dead processes' too."""
    return family.kind in _ADDS_UP or (family.kind == "untyped" and name in SUMMED_UNTYPED)


def accumulate(total: Snapshot, ended: Snapshot) -> None:
    """Add what a process that is gone had counted to ``total``."""
    for name, family in ended.items():
        if adds_up(name, family):
            kept = total.setdefault(name, Family())
            kept.head, kept.kind = family.head, family.kind
            for series, value in family.series.items():
                kept.series[series] = kept.series.get(series, 0.0) + value


def merge(living: Iterable[Snapshot], ended: Snapshot) -> Snapshot:
    """Return the metrics of all processes as those of one.

    Args:
        living: Of each living process, as it said last.
        ended: What dead processes had counted, from ``accumulate``.
    """
    merged: Snapshot = {}
    for snapshot in (*living, ended):
        for name, family in snapshot.items():
            if name in WINDOWED:
                continue
            into = merged.setdefault(name, Family())
            if not into.head:
                into.head, into.kind = family.head, family.kind
            combine = _combine(name, family)
            for series, value in family.series.items():
                before = into.series.get(series)
                into.series[series] = value if before is None else combine(before, value)
    return merged


def render(merged: Snapshot, extra: Iterable[str] = ()) -> bytes:
    """Return the exposition text, with ``extra`` lines behind it."""
    return "".join(f"{line}\n" for line in (*_lines(merged), *extra)).encode()


def _lines(merged: Mapping[str, Family]) -> Iterator[str]:
    for family in merged.values():
        yield from family.head
        for series, value in family.series.items():
            yield f"{series} {_number(value)}"


def _combine(name: str, family: Family) -> Callable[[float, float], float]:
    if adds_up(name, family) or name in SUMMED_GAUGES:
        return lambda a, b: a + b
    if name in LOWEST_GAUGES or name.endswith("_created"):
        return min
    return max


def _number(value: float) -> str:
    return repr(value) if isfinite(value) else {inf: "+Inf", -inf: "-Inf"}.get(value, "NaN")
