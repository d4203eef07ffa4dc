"""Reads ``values.yaml`` with its comments: each value has one that begins with ``# --``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

CHART = Path(__file__).resolve().parents[2] / "helm" / "warmlane"
VALUES = CHART / "values.yaml"

RULES = CHART / "rules" / "warmlane.yaml"

# Begins what is said of the value below; the form that helm-docs reads.
MARK = "# --"


@dataclass(frozen=True, slots=True)
class Value:
    """One value of the chart.

    Attributes:
        path: Its keys, from the outermost.
        default: What it is if nobody says otherwise.
        comment: What is said of it; empty = nothing, which a test refuses.
    """

    path: tuple[str, ...]
    default: Any
    comment: str

    @property
    def dotted(self) -> str:
        """The path as Helm's ``--set`` has it."""
        return ".".join(self.path)


def read_values(text: str) -> list[Value]:
    """Return the values of a ``values.yaml`` in its order.

    A mapping with a comment of its own is one value; others are gone through.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    return list(_walk(root, yaml.safe_load(text), (), text.splitlines()))


def alert_names() -> list[str]:
    """Return the names of the alerts that the chart ships, each once."""
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return list(dict.fromkeys(rule["alert"] for rule in rules if "alert" in rule))


def _walk(
    node: yaml.MappingNode, values: dict[str, Any], at: tuple[str, ...], lines: list[str]
) -> Iterator[Value]:
    for key, value in node.value:
        path = (*at, str(key.value))
        default = values[key.value]
        comment = _comment_above(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and value.value and not comment:
            yield from _walk(value, default, path, lines)
        else:
            yield Value(path, default, comment)


def _comment_above(lines: list[str], line: int) -> str:
    found: list[str] = []
    for text in reversed(lines[:line]):
        text = text.strip()
        if not text.startswith("#"):
            return ""
        if text.startswith(MARK):
            return " ".join([text.removeprefix(MARK).strip(), *reversed(found)])
        found.append(text.removeprefix("#").strip())
    return ""
