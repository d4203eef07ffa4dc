"""Keeps the fleet's workers those of the configuration and of its discovery.

Each source tells all that it knows; what that means is worked out anew each time, from nothing but
the last answers. So whatever was missed or came in a strange order is right after the next answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple

import structlog

from gateway.config import WorkerConfig
from gateway.discovery.asking import ask_models, base_models
from gateway.discovery.listing import Listing
from gateway.discovery.placing import RefusedError, needs_models, place
from gateway.discovery.sources import make_source
from gateway.fleet.upstreams import make_upstream
from gateway.settings import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.config import PoolConfig, Settings
    from gateway.config.discovery import DiscoveryConfig
    from gateway.discovery.listing import Found, Source
    from gateway.fleet.fleet import Fleet
    from gateway.fleet.tending import Tending

    MakeSource = Callable[[DiscoveryConfig, Callable[[str], bool]], Source]

# Before a source that failed in a way it does not know is run again.
RESTART_S = 5.0
# How long a start waits for the first answers; a source that is away must not hold it up.
FIRST_ANSWER_S = 3.0
FIRST_ANSWER_CHECK_S = 0.02

log = structlog.get_logger("warmlane")


class Wanted(NamedTuple):
    """A worker that is to be there; ``is_ready`` is None where nobody says anything about it."""

    pool: str
    config: WorkerConfig
    is_ready: bool | None = None
    origin: str = ""


class Discovery:
    """Adds, drains and removes workers as the sources say; used from one event loop.

    Args:
        fleet: Gets and loses the workers; those that operators registered are left alone.
        settings: Validated configuration.
        make: Makes the source of a pool.

    Attributes:
        listings: Pool name -> what its source says; only pools that have one.
        refused: Worker id -> why it gets no requests.
        waiting: Workers that are not ready, or have not said yet what they serve.
    """

    def __init__(self, fleet: Fleet, settings: Settings, *, make: MakeSource = make_source) -> None:
        self.listings: dict[str, Listing] = {}
        self.refused: dict[str, str] = {}
        self.waiting: dict[str, str] = {}
        self._fleet = fleet
        self._settings = settings
        self._make = make
        self._changed = asyncio.Event()
        self._sources: dict[str, asyncio.Task[None]] = {}
        # (worker id, URL) -> asks it what it serves; or what it said.
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._told: dict[tuple[str, str], tuple[str, ...]] = {}
        # Worker id -> pool whose source found it; those that a source had drained.
        self._origins: dict[str, str] = {}
        self._drained: set[str] = set()
        fleet.on_models = self._hear

    async def run(self) -> None:
        """Follow the sources until cancelled."""
        try:
            self._follow(self._settings)
            while True:
                await self._changed.wait()
                self._changed.clear()
                self.reconcile()
        finally:
            tasks = [*self._sources.values(), *self._asking.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def first_answers(self) -> None:
        """Wait a moment for what the sources say, so that the first request finds workers."""
        self._follow(self._settings)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_S):
                while not self._is_settled():  # noqa: ASYNC110  # several events at once
                    await asyncio.sleep(FIRST_ANSWER_CHECK_S)

    def reload(self, settings: Settings) -> None:
        """Take over another configuration; its workers are there when this returns.

        What other sources find comes as they answer; until then, what the old ones found stays.
        """
        before, self._settings = self._settings, settings
        same = {pool.name: pool.discovery for pool in before.pools}
        for pool in settings.pools:
            if pool.discovery != same.get(pool.name) and pool.name in self._sources:
                self._sources.pop(pool.name).cancel()
                del self.listings[pool.name]
        self._follow(settings)
        self.reconcile()

    def reconcile(self) -> None:
        """Make the fleet what it should be by now."""
        self.waiting = {}
        refused: dict[str, str] = {}
        members = self._fleet.members()
        wanted = self._wanted(members, refused)
        for worker_id, member in members.items():
            want = wanted.get(worker_id)
            have = member.pool.name, member.config
            is_same = want is not None and (want.pool, want.config) == have
            if not member.by and not is_same:
                self._fleet.remove(worker_id)
                self._drained.discard(worker_id)
                log.info("worker_left", worker=worker_id, pool=member.pool.name)
        members = self._fleet.members()
        for worker_id, want in wanted.items():
            if worker_id not in members:
                try:
                    self._fleet.add(want.pool, want.config)
                except (ValueError, ConfigError) as error:
                    refused[worker_id] = str(error)
                    continue
                log.info("worker_joined", worker=worker_id, pool=want.pool, url=want.config.url)
            self._drain(worker_id, want)
        self._origins = {worker_id: w.origin for worker_id, w in wanted.items() if w.origin}
        self._forget_asked()
        for worker_id, reason in refused.items():
            if self.refused.get(worker_id) != reason:
                log.warning("worker_refused", worker=worker_id, reason=reason)
        self.refused = refused

    def state_of(self, worker_id: str) -> str:
        """Return ``serving``, ``draining`` (as its source says), ``waiting`` or ``refused``."""
        if worker_id in self.refused:
            return "refused"
        if worker_id in self.waiting:
            return "waiting"
        return "draining" if worker_id in self._drained else "serving"

    def _wanted(self, members: dict[str, Tending], refused: dict[str, str]) -> dict[str, Wanted]:
        wanted = {
            worker.id: Wanted(pool.name, worker)
            for pool in self._settings.pools
            for worker in pool.workers
        }
        configs = {pool.name: pool for pool in self._settings.pools}
        for name, listing in self.listings.items():
            if listing.found is None:
                for worker_id, member in members.items():
                    if self._origins.get(worker_id) == name:
                        kept = Wanted(member.pool.name, member.config, None, name)
                        wanted.setdefault(worker_id, kept)
                continue
            refused |= listing.bad
            urls = {want.config.url: worker_id for worker_id, want in wanted.items()}
            for found in listing.found:
                worker_id = found.worker.id
                known = wanted.get(worker_id)
                if known is not None and known.config == found.worker:
                    continue
                taken = worker_id if known is not None else urls.get(found.worker.url)
                if taken is None and worker_id in members and members[worker_id].by:
                    taken = worker_id
                if taken is not None:
                    refused[worker_id] = f"its id or address is that of worker {taken!r} already"
                    continue
                want = self._placed(found, configs[name], members, refused)
                if want is not None:
                    # It may have been found before, in another state or by another pool's source.
                    refused.pop(worker_id, None)
                    self.waiting.pop(worker_id, None)
                    wanted[worker_id] = want
                    urls[found.worker.url] = worker_id
        return wanted

    def _placed(
        self,
        found: Found,
        own: PoolConfig,
        members: dict[str, Tending],
        refused: dict[str, str],
    ) -> Wanted | None:
        """Return where a worker belongs; None if nowhere, or not yet."""
        worker = found.worker
        key = worker.id, worker.url
        member = members.get(worker.id)
        is_member = member is not None and member.config.url == worker.url
        if not found.is_ready and not is_member:
            self.waiting[worker.id] = own.name
            return None
        told = self._told.get(key)
        if told is None and needs_models(found):
            self.waiting[worker.id] = own.name
            if key not in self._asking:
                self._asking[key] = asyncio.get_running_loop().create_task(self._ask(own, worker))
            return None
        try:
            pool = place(found, own, self._settings.pools, told or ())
        except RefusedError as error:
            refused[worker.id] = str(error)
            return None
        return Wanted(pool.name, worker, found.is_ready, own.name)

    def _drain(self, worker_id: str, want: Wanted) -> None:
        """Send a worker no new requests while its source says so; what operators said stays."""
        if want.is_ready is False and worker_id not in self._drained:
            workers = self._fleet.members()[worker_id].engine.workers
            if not any(worker.draining for worker in workers):
                self._drained.add(worker_id)
                self._fleet.drain(worker_id)
                log.info("worker_drains", worker=worker_id)
        elif want.is_ready and worker_id in self._drained:
            self._drained.discard(worker_id)
            self._fleet.drain(worker_id, draining=False)
            log.info("worker_back", worker=worker_id)

    async def _ask(self, pool: PoolConfig, worker: WorkerConfig) -> None:
        try:
            upstream = make_upstream(pool, worker, self._settings.server.limits)
        except ConfigError:
            # It is refused as it joins, and that is said.
            self._told[worker.id, worker.url] = ()
            self._changed.set()
            return
        try:
            self._told[worker.id, worker.url] = await ask_models(upstream)
        finally:
            upstream.close()
        self._changed.set()

    def _hear(self, address_id: str, document: object) -> None:
        """Take note of what a member serves by now: it may be another process than before."""
        member = self._fleet.members().get(address_id)
        if member is None or address_id not in self._origins:
            return
        key, names = (address_id, member.config.url), base_models(document)
        if names and self._told.get(key) != names:
            self._told[key] = names
            self._changed.set()

    def _forget_asked(self) -> None:
        """Ask nobody, and know nothing of anybody, who is not listed any more."""
        listed = {
            (found.worker.id, found.worker.url)
            for listing in self.listings.values()
            for found in listing.found or ()
        }
        listed |= {(i, m.config.url) for i, m in self._fleet.members().items()}
        for key in [key for key in self._asking if key not in listed or key in self._told]:
            self._asking.pop(key).cancel()
        for key in [key for key in self._told if key not in listed]:
            del self._told[key]

    def _follow(self, settings: Settings) -> None:
        """Run the sources that are not run yet."""
        for pool in settings.pools:
            if pool.discovery.type != "static" and pool.name not in self._sources:
                listing = self.listings[pool.name] = Listing(pool.name, self._changed.set)
                keep = self._keep(pool.discovery, listing)
                self._sources[pool.name] = asyncio.get_running_loop().create_task(keep)

    async def _keep(self, config: DiscoveryConfig, listing: Listing) -> None:
        while True:
            try:
                await self._make(config, self._is_well).run(listing)
            except Exception as error:
                listing.failed(f"{type(error).__name__}: {error}")
            await asyncio.sleep(RESTART_S)

    def _is_well(self, worker_id: str) -> bool:
        member = self._fleet.members().get(worker_id)
        return member is not None and member.engine.workers[0].health.ready

    def _is_settled(self) -> bool:
        are_told = all(li.found is not None or li.num_failures for li in self.listings.values())
        return are_told and not self.waiting and not self._changed.is_set()
