"""TTFT and goodput over load as one self-contained page: SVG in HTML, nothing else loaded."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.replay.summary import Summary

_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 30, 40
# Told apart by people who cannot tell red from green (Okabe and Ito).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
_NUM_TICKS = 5


def plot_svg(summaries: Sequence[Summary]) -> str:
    """Draw mean TTFT and goodput over load, one line a policy.

    Args:
        summaries: Runs of one trace; several loads of each policy.
    """
    policies = list(dict.fromkeys(summary.policy for summary in summaries))
    height = _HEIGHT + 18 * len(policies) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{2 * _WIDTH}" height="{height}" fill="white"/>',
        *_panel(0, "mean TTFT, s", summaries, policies, lambda s: s.ttft_mean_s, 0.0),
        *_panel(_WIDTH, "goodput", summaries, policies, lambda s: s.goodput, 1.0),
    ]
    for i, policy in enumerate(policies):
        y = _HEIGHT + 12 + 18 * i
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + 24}" y1="{y}" y2="{y}" stroke="{_color(i)}" '
            f'stroke-width="2"/><text x="{_LEFT + 32}" y="{y + 4}">{escape(policy)}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def plot_html(summaries: Sequence[Summary], title: str) -> str:
    """Return the drawing as a page."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<body style="font-family:sans-serif;max-width:960px;margin:1em auto">'
        f"<h1>{escape(title)}</h1>\n{plot_svg(summaries)}\n</body></html>\n"
    )


def _panel(
    x0: int,
    label: str,
    summaries: Sequence[Summary],
    policies: Sequence[str],
    value: Callable[[Summary], float],
    least_top: float,
) -> list[str]:
    loads = [summary.load for summary in summaries]
    low, high = min(loads), max(loads)
    top = max(least_top, *(value(summary) for summary in summaries)) or 1.0

    def x(load: float) -> float:
        share = (load - low) / (high - low) if high > low else 0.5
        return x0 + _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(number: float) -> float:
        return _TOP + (1 - number / top) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{x0 + _LEFT}" y="18">{escape(label)}</text>']
    for i in range(_NUM_TICKS + 1):
        number = top * i / _NUM_TICKS
        parts.append(
            f'<line x1="{x(low):.1f}" x2="{x0 + _WIDTH - _RIGHT}" y1="{y(number):.1f}" '
            f'y2="{y(number):.1f}" stroke="#dddddd"/>'
            f'<text x="{x0 + _LEFT - 6}" y="{y(number) + 4:.1f}" text-anchor="end">'
            f"{number:.3g}</text>"
        )
    parts += [
        f'<text x="{x(load):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
        f"{load:.3g}</text>"
        for load in sorted(set(loads))
    ]
    parts.append(
        f'<text x="{x0 + _WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">load scale</text>'
    )
    for i, policy in enumerate(policies):
        points = sorted((s.load, value(s)) for s in summaries if s.policy == policy)
        line = " ".join(f"{x(load):.1f},{y(number):.1f}" for load, number in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{_color(i)}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x(load):.1f}" cy="{y(number):.1f}" r="3" fill="{_color(i)}">'
            f"<title>{escape(policy)}: load {load:.3g}, {number:.4g}</title></circle>"
            for load, number in points
        ]
    return parts


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]
