"""Merge the metrics of several processes into those of one gateway.

Counters and histograms add up, and what a process counted before it died stays counted, so that no
counter ever goes back. Gauges are added, or the highest or lowest of the living is taken, as their
meaning asks. All processes run the same code, so equal series are equal text up to the value.

Everything is done in steps, so that the supervisor can do other things in between.
"""

from __future__ import annotations

import re
from operator import add
from typing import TYPE_CHECKING

from gateway.telemetry.exposition import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

# What each process has for itself.
SUMMED_GAUGES = frozenset(
    {"warmlane_in_flight_requests", "warmlane_queued_tokens"}
    | {"warmlane_queued_prefill_seconds", "warmlane_worker_cache_value_seconds"}
    | {"process_virtual_memory_bytes", "process_resident_memory_bytes", "process_open_fds"}
)
# One process that sees a fault, or has less room, is enough to show it.
LOWEST_GAUGES = frozenset(
    {"warmlane_worker_ready", "warmlane_worker_exact", "warmlane_worker_parity"}
    | {"warmlane_discovery_up", "warmlane_redis_up", "warmlane_config_last_reload_success"}
    | {"warmlane_batch_headroom_requests", "process_start_time_seconds", "process_max_fds"}
)
# Counted by each process. The other bare cumulative names are the workers' own counts, which every
# process reads from the same place.
SUMMED_UNTYPED = frozenset(("prefix_cache_hit_tokens", "prefix_cache_miss_tokens"))
# The workers' own counts as well.
SHARED_COUNTERS = frozenset(
    ("warmlane_worker_evictions_total", "warmlane_worker_restore_stall_seconds_total")
)
# Means and quantiles of a window: made from the merged windows, see ``windows.py``.
WINDOWED = frozenset(("prefix_cache_hit_rate", "ttft_avg", "ttft_p95", "ttft_p99"))

_ADDS_UP = frozenset(("counter", "histogram", "summary"))
# Series, value and exemplar; a quoted label value may hold anything but an end of line.
_WITH_EXEMPLAR = re.compile(r'([^{ ]+(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\})?) ([^ ]+)(?: # (.+))?')
# Lines read in one step, some hundred microseconds.
_STEP_LINES = 100


class Family:
    """One metric.

    Attributes:
        text: What it means.
        kind: Its type, as the Prometheus format has it.
        series: ``name{labels}`` -> value.
        exemplars: ``name{labels}`` -> the exemplar behind it, as OpenMetrics has it.
    """

    __slots__ = ("exemplars", "kind", "series", "text")

    def __init__(self, text: str = "", kind: str = "untyped") -> None:
        self.text = text
        self.kind = kind
        self.series: dict[str, float] = {}
        self.exemplars: dict[str, str] = {}


Snapshot = dict[str, Family]
"""Family name, of counters with ``_total`` -> family, in the order of the text."""


def parse(text: str) -> Snapshot:
    """Read an exposition text as this gateway's own processes write it, in either format.

    Raises:
        ValueError: If a sample has no number.
    """
    families: Snapshot = {}
    for _ in reading(text, families):
        pass
    return families


def reading(text: str, families: Snapshot) -> Iterator[None]:
    """Do the same in steps, into ``families``.

    Raises:
        ValueError: If a sample has no number.
    """
    family, name, said = Family(), "", ""
    for count, line in enumerate(text.split("\n")):
        if count % _STEP_LINES == _STEP_LINES - 1:
            yield
        if line.startswith("# "):
            _, what, name, rest = [*line.split(" ", 3), "", ""][:4]
            if what == "HELP":
                said = rest
            elif what == "TYPE":
                if rest == "counter" and not name.endswith("_total"):
                    name, said = f"{name}_total", said.replace(r"\"", '"')
                kind = "untyped" if rest == "unknown" else rest
                family = families.setdefault(name, Family(said, kind))
        elif " # " in line:
            match = _WITH_EXEMPLAR.fullmatch(line)
            if match is None:
                raise ValueError(f"no sample: {line[:100]!r}")
            series, value, exemplar = match.groups()
            family.series[series] = float(value)
            if exemplar:
                family.exemplars[series] = exemplar
        elif line:
            series, _, value = line.rpartition(" ")
            family.series[series] = float(value)


def adds_up(name: str, family: Family) -> bool:
    """Say whether a family counts per process, so that its values add up, dead processes' too."""
    if family.kind == "untyped":
        return name in SUMMED_UNTYPED
    return family.kind in _ADDS_UP and name not in SHARED_COUNTERS


def accumulate(total: Snapshot, ended: Snapshot) -> None:
    """Add what a process that is gone had counted to ``total``; its families are new ones then."""
    for name, family in ended.items():
        if adds_up(name, family):
            before = total.get(name, Family())
            kept = total[name] = Family(family.text, family.kind)
            kept.series = dict(before.series)
            for series, value in family.series.items():
                kept.series[series] = kept.series.get(series, 0.0) + value


def merge(living: Iterable[Snapshot], ended: Snapshot) -> Snapshot:
    """Return the metrics of all processes as those of one.

    Args:
        living: Of each living process, as it said last.
        ended: What dead processes had counted, from ``accumulate``.
    """
    merged: Snapshot = {}
    for _ in merging(living, ended, merged):
        pass
    return merged


def merging(living: Iterable[Snapshot], ended: Snapshot, merged: Snapshot) -> Iterator[None]:
    """Do the same in steps, into ``merged``."""
    for snapshot in (*living, dict(ended)):
        for name, family in snapshot.items():
            if name in WINDOWED:
                continue
            into = merged.setdefault(name, Family(family.text, family.kind))
            combine = _combine(name, family)
            for series, value in family.series.items():
                before = into.series.get(series)
                into.series[series] = value if before is None else combine(before, value)
            into.exemplars.update(family.exemplars)
            yield


def render(merged: Snapshot) -> bytes:
    """Return the exposition text, in Prometheus' format."""
    return "".join(rendering(merged, open_metrics=False)).encode()


def rendering(merged: Mapping[str, Family], *, open_metrics: bool) -> Iterator[str]:
    """Yield the exposition text of a family at a time, without an end."""
    for name, family in merged.items():
        kind, text = family.kind, family.text
        if open_metrics:
            name = name.removesuffix("_total") if kind == "counter" else name
            kind = "unknown" if kind == "untyped" else kind
            text = text.replace('"', r"\"")
        lines = [f"# HELP {name} {text}\n# TYPE {name} {kind}\n"]
        if open_metrics and family.exemplars:
            for series, value in family.series.items():
                exemplar = family.exemplars.get(series)
                behind = "" if exemplar is None else f" # {exemplar}"
                lines.append(f"{series} {number(value)}{behind}\n")
        else:
            lines += [f"{series} {number(value)}\n" for series, value in family.series.items()]
        yield "".join(lines)


def _combine(name: str, family: Family) -> Callable[[float, float], float]:
    if adds_up(name, family) or name in SUMMED_GAUGES:
        return add
    if name in LOWEST_GAUGES or name.endswith("_created"):
        return min
    return max
