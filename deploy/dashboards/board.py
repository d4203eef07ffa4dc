"""One dashboard: its frame, its variables, and where its panels lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from deploy.dashboards.panels import DATASOURCE, STAT_HEIGHT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.dashboards.panels import Json, Panel, Row

TAG: Final = "warmlane"
COLUMNS: Final = 24
# Grafana 10.4's and 11's own; newer ones migrate what they read.
SCHEMA_VERSION: Final = 39
# One series per process: gateways, and runners of ours.
PROCESSES: Final = '{__name__=~"warmlane_build_info|warmlane_runner_kv_blocks"'


@dataclass(frozen=True, slots=True)
class Filter:
    """A variable that is a regular expression over a label; all values as long as none is chosen.

    Attributes:
        name: Of the variable and of the label.
        values: Where its values come from, for Grafana's ``label_values``.
    """

    name: str
    values: str

    def to_json(self) -> Json:
        """Return the variable."""
        query = f"label_values({self.values}, {self.name})"
        return {
            "name": self.name,
            "label": self.name.replace("_", " "),
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"qryType": 1, "query": query, "refId": f"variable-{self.name}"},
            "refresh": 2,  # when the time range changes: workers come and go
            "sort": 1,
            "multi": True,
            "includeAll": True,
            # Also matches series that do not have the label.
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


FILTERS: Final = (
    Filter("job", f"{PROCESSES}}}"),
    Filter("instance", f'{PROCESSES},job=~"$job"}}'),
    Filter("pool", "warmlane_worker_ready"),
    Filter("worker", 'warmlane_worker_ready{pool=~"$pool"}'),
)


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard.

    Attributes:
        name: Of its file.
        title: What Grafana calls it.
        about: What it is for.
        rows: The first one without a heading, of stats alone.
        filters: Variables of its own, beside those of all dashboards.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    filters: tuple[Filter, ...] = ()

    def to_json(self) -> Json:
        """Return what Grafana imports."""
        return {
            "id": None,
            "uid": f"{TAG}-{self.name}",
            "title": self.title,
            "description": self.about,
            "tags": [TAG],
            "editable": True,
            "graphTooltip": 1,
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "refresh": "30s",
            "timezone": "browser",
            "time": {"from": "now-1h", "to": "now"},
            "links": [_LINK],
            "annotations": {"list": []},
            "templating": {"list": [_SOURCE, *(it.to_json() for it in (*FILTERS, *self.filters))]},
            "panels": list(_laid_out(self.rows)),
        }


_SOURCE: Final[Json] = {
    "name": "datasource",
    "label": "data source",
    "type": "datasource",
    "query": "prometheus",
    "refresh": 1,
    "current": {},
}
_LINK: Final[Json] = {
    "type": "dashboards",
    "title": "Warmlane",
    "tags": [TAG],
    "asDropdown": False,
    "includeVars": True,
    "keepTime": True,
    "targetBlank": False,
    "icon": "external link",
}


def _laid_out(rows: tuple[Row, ...]) -> Iterator[Json]:
    """Yield rows and panels with numbers and places."""
    number, y = 1, 0
    for row in rows:
        if row.title:
            yield _heading(row, number, y)
            number, y = number + 1, y + 1
        x = height = 0
        for panel in row.panels:
            width = _width(panel, row)
            if x + width > COLUMNS:
                x, y = 0, y + height
            yield panel.to_json(number, x, y, width)
            number, x, height = number + 1, x + width, panel.height
        y += height


def _width(panel: Panel, row: Row) -> int:
    """Return its own width, or an equal part of a line of stats."""
    if panel.width or panel.height != STAT_HEIGHT:
        return panel.width or COLUMNS // 2
    return COLUMNS // min(8, len(row.panels))


def _heading(row: Row, number: int, y: int) -> Json:
    return {
        "id": number,
        "type": "row",
        "title": row.title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        "panels": [],
    }
