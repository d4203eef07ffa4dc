"""Panels as plain data, and the JSON that Grafana reads (11.x; older ones from 10.4 on too).

Every panel says what it shows and which series it comes from. Colours mark thresholds only where a
number has a known bad range.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

Json: TypeAlias = dict[str, Any]
Kind: TypeAlias = Literal["stat", "timeseries", "table"]

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
NO_TRAFFIC: Final = "No traffic"
# Of Grafana's grid; a stat is a number with a line behind it.
GRAPH_HEIGHT: Final = 8
STAT_HEIGHT: Final = 4


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel.

    Attributes:
        expr: PromQL.
        legend: Template of the legend, as ``{{worker}}``.
        is_range_total: It covers the dashboard's whole time range, and is asked once.
    """

    expr: str
    legend: str = ""
    is_range_total: bool = False


@dataclass(frozen=True, slots=True)
class Threshold:
    """From ``value`` on the panel has this colour."""

    value: float
    colour: Literal["yellow", "orange", "red", "green"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A table with a row and a column per value of two labels.

    Attributes:
        rows: Label of the rows; they are sorted by its values.
        columns: Label of the columns.
        names: Values of the columns' label, in order, and what stands above them.
    """

    rows: str
    columns: str
    names: dict[str, str]

    def to_json(self) -> list[Json]:
        """Return the transformations of one query's answer."""
        corner = f"{self.rows}\\{self.columns}"  # how Grafana names the first column
        heading = self.rows.replace("_", " ")
        order = {name: at for at, name in enumerate((corner, *self.names))}
        return [
            {
                "id": "groupingToMatrix",
                "options": {
                    "rowField": self.rows,
                    "columnField": self.columns,
                    "valueField": "Value",
                    "emptyValue": "null",
                },
            },
            {
                "id": "organize",
                "options": {
                    "indexByName": order,
                    "renameByName": {corner: heading, **self.names},
                    "excludeByName": {},
                },
            },
            {
                "id": "sortBy",
                "options": {"fields": {}, "sort": [{"field": self.rows.replace("_", " ")}]},
            },
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        title: Few words.
        shows: What it shows and how to read it, a sentence or two.
        metric: The series it mainly comes from.
        queries: What is asked.
        unit: Grafana's name of the unit.
        kind: How it is drawn.
        width: Columns of 24; 0 takes the usual one.
        empty: What stands there without data.
        base: Colour below the first threshold.
        thresholds: Known bad ranges, lowest first.
        minimum: Lowest value of the axis.
        maximum: Highest one.
        has_exemplars: Points of the graph link to traces.
        is_stacked: Parts that add up to a whole.
        decimals: Digits after the point; None leaves it to Grafana.
        matrix: Table only: what its rows and columns are.
    """

    title: str
    shows: str
    metric: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 0
    empty: str = NO_TRAFFIC
    base: str = "green"
    thresholds: tuple[Threshold, ...] = ()
    minimum: float | None = 0.0
    maximum: float | None = None
    has_exemplars: bool = False
    is_stacked: bool = False
    decimals: int | None = None
    matrix: Matrix | None = None

    @property
    def height(self) -> int:
        """Rows of Grafana's grid."""
        return STAT_HEIGHT if self.kind == "stat" else GRAPH_HEIGHT

    def to_json(self, number: int, x: int, y: int, width: int) -> Json:
        """Return the panel at a place of the grid."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": f"{self.shows} Metric: `{self.metric}`",
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": width, "h": self.height},
            "targets": [self._target(at, query) for at, query in enumerate(self.queries)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _OPTIONS[self.kind],
            **({"transformations": self.matrix.to_json()} if self.matrix else {}),
        }

    def _target(self, at: int, query: Query) -> Json:
        is_once = query.is_range_total or self.kind == "table"
        return {
            "refId": chr(ord("A") + at),
            "datasource": DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "instant": is_once,
            "range": not is_once,
            "exemplar": self.has_exemplars,
            **({"format": "table"} if self.kind == "table" else {}),
        }

    def _defaults(self) -> Json:
        steps: list[Json] = [{"color": self.base, "value": None}]
        steps += [{"color": step.colour, "value": step.value} for step in self.thresholds]
        is_judged = bool(self.thresholds)
        defaults: Json = {
            "unit": self.unit,
            "noValue": self.empty,
            "mappings": [
                {"type": "special", "options": {"match": "nan", "result": {"text": self.empty}}}
            ],
            "thresholds": {"mode": "absolute", "steps": steps if is_judged else steps[:1]},
            "color": self._colour(),
            "custom": self._custom(),
        }
        if self.minimum is not None:
            defaults["min"] = self.minimum
        if self.maximum is not None:
            defaults["max"] = self.maximum
        if self.decimals is not None:
            defaults["decimals"] = self.decimals
        return defaults

    def _colour(self) -> Json:
        if self.kind == "timeseries":
            return {"mode": "palette-classic"}
        if self.kind == "table":
            # Worse is darker, whatever the range; the numbers themselves are in the cells.
            return {"mode": "continuous-BlYlRd"}
        return (
            {"mode": "thresholds"} if self.thresholds else {"mode": "fixed", "fixedColor": "text"}
        )

    def _custom(self) -> Json:
        if self.kind == "table":
            return {"cellOptions": {"type": "color-background", "mode": "gradient"}}
        if self.kind != "timeseries":
            return {}
        return {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if self.is_stacked else 8,
            "showPoints": "auto",
            "spanNulls": False,
            "stacking": {"mode": "normal" if self.is_stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if self.thresholds else "off"},
        }


_OPTIONS: Final[dict[Kind, Json]] = {
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    },
    "timeseries": {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "calcs": ["mean", "max", "lastNotNull"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "table": {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}},
}


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading.

    Attributes:
        title: The question they answer; empty for the first row.
        panels: Laid out from left to right, then below.
    """

    title: str
    panels: tuple[Panel, ...] = field(default=())
