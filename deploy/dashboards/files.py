"""All dashboards, as the files that the chart ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from deploy.dashboards.index import INDEX
from deploy.dashboards.overview import OVERVIEW
from deploy.dashboards.routing import ROUTING
from deploy.dashboards.warmup import WARMUP
from deploy.dashboards.workers import WORKERS
from deploy.dashboards.worth import WORTH

# Inside the chart, since a chart cannot read files outside itself; compose mounts the same folder.
FOLDER: Final = Path(__file__).parents[2] / "helm" / "warmlane" / "dashboards"
BOARDS: Final = (OVERVIEW, ROUTING, WORKERS, INDEX, WARMUP, WORTH)


def rendered() -> dict[str, str]:
    """Return the text of every file by its name."""
    return {
        f"{board.name}.json": json.dumps(board.to_json(), indent=1, ensure_ascii=False) + "\n"
        for board in BOARDS
    }
