"""The dashboards as the chart ships them, and their queries as Grafana would send them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[2] / "helm" / "warmlane" / "dashboards"
NAMES: Final = ("overview", "routing", "workers", "index", "warmup", "worth")
_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")


def dashboard(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


@dataclass(frozen=True)
class Target:
    """One query of one panel."""

    dashboard: str
    panel: dict[str, Any]
    expr: str
    legend: str

    @property
    def id(self) -> str:
        return f"{self.dashboard}: {self.panel['title']}: {self.legend}"

    @property
    def is_instant(self) -> bool:
        return any(t["expr"] == self.expr and t["instant"] for t in self.panel["targets"])


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in dashboard(name)["panels"] if panel["type"] != "row"]


def targets() -> list[Target]:
    return [
        Target(name, panel, target["expr"], target["legendFormat"])
        for name in NAMES
        for panel in panels(name)
        for target in panel["targets"]
    ]


def target(name: str, title: str, legend: str = "__auto") -> Target:
    (found,) = [
        it
        for it in targets()
        if (it.dashboard, it.panel["title"], it.legend) == (name, title, legend)
    ]
    return found


def filled(expr: str, values: dict[str, str]) -> str:
    """Replace variables as Grafana does; every one must have a value."""
    return _VARIABLE.sub(lambda match: values[match[1]], expr)


def all_values(name: str) -> dict[str, str]:
    """The variables of a dashboard with nothing chosen."""
    return {
        it["name"]: it["allValue"]
        for it in dashboard(name)["templating"]["list"]
        if it["type"] == "query"
    }
