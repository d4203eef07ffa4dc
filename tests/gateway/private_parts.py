"""A gateway that writes everything down that it can, and all that it wrote."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fakes.collector import Collector
from tests.gateway.tenancy_parts import Serving, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from tests.fakes.engine import RawEngine

# Whatever an operator can read; POST explain is given a body, and so a test's own business.
DUMPS = (
    "/metrics",
    "/console",
    "/console/data",
    *(
        f"/admin/v1/{name}"
        for name in ("workers", "index", "documents", "worth", "misses", "usage", "config", "warm")
    ),
)


@dataclass
class Written:
    """Everything that left a gateway but its answers and what workers were sent.

    Attributes:
        gw: The gateway while it runs.
        surfaces: Name -> what it held; complete once the gateway has stopped.
    """

    gw: Serving
    surfaces: dict[str, bytes] = field(default_factory=dict)

    def places_of(self, text: str) -> list[str]:
        """Name the surfaces that hold a text."""
        return [name for name, held in self.surfaces.items() if text.encode() in held]

    async def read_dumps(self) -> None:
        """Read what an operator can."""
        for path in DUMPS:
            async with self.gw.session.get(self.gw.url + path) as response:
                self.surfaces[path] = await response.read()
                assert response.status == 200, (path, self.surfaces[path])


@asynccontextmanager
async def writing(
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    *engines: RawEngine,
    telemetry: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Written]:
    """Run a gateway with every log and every trace; what it wrote is there afterwards."""
    capfd.readouterr()
    async with Collector() as collector:
        told = {
            "otlp_endpoint": collector.url,
            "trace_sample": 1.0,
            "decision_log": str(folder / "decisions.jsonl"),
            **(telemetry or {}),
        }
        async with serving(*engines, telemetry=told, **config) as gw:
            written = Written(gw)
            yield written
            await written.read_dumps()
    written.surfaces["traces"] = b"".join(collector.requests)
    said = capfd.readouterr()
    written.surfaces |= {"stdout": said.out.encode(), "stderr": said.err.encode()}
    written.surfaces |= _files(folder)
    assert collector.spans


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def events(stderr: bytes) -> list[dict[str, Any]]:
    """Return the JSON lines of a log."""
    return [json.loads(line) for line in stderr.splitlines() if line.startswith(b"{")]
