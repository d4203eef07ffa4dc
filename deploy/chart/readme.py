"""The table of values in the chart's README, from the comments in ``values.yaml``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from deploy.chart.values import CHART, VALUES, read_values

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deploy.chart.values import Value

README = CHART / "README.md"
BEGIN = "<!-- values: written by python -m deploy.chart -->"
END = "<!-- end of values -->"


def with_table(readme: str) -> str:
    """Return a README whose table is what ``values.yaml`` says now.

    Raises:
        ValueError: If the README has no place for it.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README}: expected {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{_table(read_values(VALUES.read_text('utf-8')))}{END}{after}"


def _table(values: Iterable[Value]) -> str:
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for value in values:
        meaning = value.comment.replace("|", "\\|")
        lines.append(f"| `{value.dotted}` | {_shown(value.default)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    text = json.dumps(default, ensure_ascii=False)
    return f"`{text}`".replace("|", "\\|")
