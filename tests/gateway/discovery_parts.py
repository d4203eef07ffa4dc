"""A fleet with discovery in front of mock engines, driven by sources of the test's own."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from gateway.config import Settings, WorkerConfig
from gateway.discovery.discovery import Discovery
from gateway.discovery.listing import Found, Listing
from gateway.fleet.fleet import Fleet
from tests.fakes.engine import RawEngine, Seen, answer
from tests.support import poll_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from gateway.config.discovery import DiscoveryConfig


class Told:
    """A listing's answers, as they come."""

    def __init__(self) -> None:
        self.num_changes = 0
        self.listing = Listing("chat", self._count)

    def _count(self) -> None:
        self.num_changes += 1

    @property
    def ids(self) -> list[str]:
        return [found.worker.id for found in self.listing.found or ()]

    @property
    def ready_ids(self) -> list[str]:
        return [found.worker.id for found in self.listing.found or () if found.is_ready]


class ScriptedSource:
    """Tells what the test says."""

    def __init__(self) -> None:
        self.listing: Listing | None = None
        self.is_well: Callable[[str], bool] = lambda _id: True

    async def run(self, listing: Listing) -> None:
        self.listing = listing
        await asyncio.Event().wait()

    async def tell(self, *found: Found) -> None:
        await poll_until(lambda: self.listing is not None)
        assert self.listing is not None
        self.listing.told(found)


def serving_models(*models: str) -> Callable[[Seen], Any]:
    """Return what an engine with these models answers."""

    def respond(seen: Seen) -> Any:
        if seen.target == "/v1/models":
            cards = [{"id": model, "object": "model"} for model in models]
            return answer(json.dumps({"object": "list", "data": cards}).encode())
        return answer(b"{}")

    return respond


def worker(worker_id: str, url: str, **more: Any) -> WorkerConfig:
    return WorkerConfig(id=worker_id, url=url, **more)


def settings_of(*pools: dict[str, Any], **sections: Any) -> Settings:
    return Settings.model_validate({"pools": list(pools), **sections})


def pool(name: str = "chat", models: Sequence[str] = ("m",), **more: Any) -> dict[str, Any]:
    found = {"type": "file", "path": "unused"}
    return {"name": name, "models": list(models), "engine": "vllm", "discovery": found, **more}


class Finding:
    """A fleet whose pools' sources are scripted."""

    def __init__(self, settings: Settings) -> None:
        self.sources: dict[str, ScriptedSource] = {}
        self.fleet = Fleet(settings)
        self.discovery = Discovery(self.fleet, settings, make=self._make)

    def _make(self, config: DiscoveryConfig, is_well: Callable[[str], bool]) -> ScriptedSource:
        source = ScriptedSource()
        source.is_well = is_well
        self.sources[config.path] = source  # type: ignore[union-attr]
        return source

    @property
    def source(self) -> ScriptedSource:
        return self.sources["unused"]

    def ids(self, pool: str = "chat") -> list[str]:
        return next(list(p.workers) for p in self.fleet.pools if p.name == pool)

    async def has(self, *ids: str, pool: str = "chat") -> None:
        """Wait until a pool has exactly these workers."""
        what = f"{pool} has {ids}"
        await poll_until(lambda: sorted(self.ids(pool)) == sorted(ids), what=what)


@asynccontextmanager
async def finding(settings: Settings) -> AsyncIterator[Finding]:
    found = Finding(settings)
    await found.fleet.start()
    task = asyncio.create_task(found.discovery.run())
    num_sources = sum(pool.discovery.type != "static" for pool in settings.pools)
    await poll_until(lambda: len(found.sources) == num_sources)
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await found.fleet.stop()


def engine_of(*models: str) -> RawEngine:
    return RawEngine(serving_models(*models))
