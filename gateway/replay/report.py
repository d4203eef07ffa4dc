"""Say what replay found: as a table, as JSON, as a drawing."""

from __future__ import annotations

import json
import sys
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.replay.summary import mean_summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from gateway.replay.runs import Setup
    from gateway.replay.summary import Summary
    from gateway.replay.traces import Trace


def merged(runs: Iterable[Summary]) -> list[Summary]:
    """Return the mean over the draws of each policy and load, in the order of the runs."""
    same: dict[tuple[str, float], list[Summary]] = {}
    for summary in runs:
        same.setdefault((summary.policy, summary.load), []).append(summary)
    return [mean_summary(summaries) for summaries in same.values()]


def document(trace: Trace, setup: Setup, draws: int, summaries: list[Summary]) -> dict[str, Any]:
    """Return one JSON document: what was assumed, and every run."""
    every_s = setup.load.share_every_s
    return {
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "requests": len(trace.requests),
            "notes": trace.notes,
        },
        "workers": setup.num_workers,
        "replicas": setup.load.num_gateways,
        "load_delay_s": None if every_s == inf else every_s,
        "draws": draws,
        "slo": msgspec.to_builtins(setup.slo),
        "engine_model": msgspec.to_builtins(setup.model),
        "runs": [msgspec.to_builtins(summary) for summary in summaries],
    }


def print_table(summaries: list[Summary]) -> None:
    """Print one row for each policy and load."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for name in ("policy", "load", "TTFT mean s", "p50", "p95", "p99"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for name in ("TPOT ms", "goodput", "hit rate", "GB moved", "lost"):
        table.add_column(name, justify="right")
    for s in summaries:
        table.add_row(
            *(s.policy, f"{s.load:g}", f"{s.ttft_mean_s:.3f}", f"{s.ttft_p50_s:.3f}"),
            *(f"{s.ttft_p95_s:.3f}", f"{s.ttft_p99_s:.3f}", f"{1e3 * s.tpot_mean_s:.1f}"),
            *(f"{s.goodput:.3f}", f"{s.hit_rate:.3f}", f"{s.pulled_gb:.1f}", str(s.num_lost)),
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def print_capacity(found: Mapping[str, float | None], *, as_json: bool) -> None:
    """Print the largest load scale that each policy carries."""
    if as_json:
        print(json.dumps({"capacity": found}, indent=2))
        return
    for name, scale in found.items():
        print(f"{name}: {'no load meets the objective' if scale is None else f'{scale:.3g}'}")


def draw(path: Path, summaries: list[Summary], name: str) -> None:
    """Write the plot."""
    from gateway.replay.plot import plot_html, plot_svg

    title = f"{name}: TTFT and goodput over load"
    svg = path.suffix == ".svg"
    path.write_text(plot_svg(summaries) if svg else plot_html(summaries, title), "utf-8")
