"""The shared index of one pool: reads the events of some workers, takes the others' from Redis.

Redis decides who reads what (``lease``); the reader publishes (``publication``), the others follow
the pool's stream (``tail``) and read a whole state where they have a hole (``load``). While Redis
is away everybody reads all events: workers send them to whoever listens. No request waits for this.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from redis.exceptions import ResponseError

from prefix_index.replica.codec import (
    Head,
    SharedValueError,
    entry_order,
    pack_head,
    unpack_head,
)
from prefix_index.replica.lease import (
    INCOMPLETE,
    LEASE_S,
    TICK_S,
    Leases,
    Shared,
)
from prefix_index.replica.link import LINK_ERRORS, answer
from prefix_index.replica.load import load
from prefix_index.replica.publisher import Publisher
from prefix_index.replica.tail import Tail, field
from prefix_index.replica.tasks import run_together
from prefix_index.replica.view import Entry, View

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from prefix_index.index import Index
    from prefix_index.replica.link import Link
    from prefix_index.replica.source import Source

# Changes are collected this long. An index that is a second old costs nothing, and each delta costs
# every gateway.
PUBLISH_EVERY_S: Final = 0.05
# How long a process that starts waits for Redis before it reads all events itself.
_START_GRACE_S: Final = 1.0
# A state that cannot be read is deleted, for its holder to write anew; not more often than this, so
# that two versions that disagree do not keep each other busy.
_HEAL_EVERY_S: Final = 30.0


class PoolReplica:
    """One pool's share in the common index. Event loop only.

    Args:
        link: Connection.
        pool: Name of the pool.
        holder: Name of this process, different from all others' and without blanks.
        index: The pool's view.
        clock: Monotonic seconds.

    Attributes:
        views: Worker -> what is known of it.
        leases: Who reads what.
        tail: Where this process stands in the stream.
        publisher: Counts what was published, and refused.
        decode_errors: Values in Redis that could not be read.
    """

    def __init__(
        self,
        link: Link,
        pool: str,
        holder: str,
        index: Index,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.views: dict[str, View] = {}
        self.decode_errors = 0
        self.leases = Leases(link, pool, holder)
        self.tail = Tail(link, self.leases.stream)
        self.publisher = Publisher(link, self.leases, index, self.views)
        self._link = link
        self._index = index
        self._clock = clock
        self._ticked_s = clock() - LEASE_S + _START_GRACE_S
        self._shared: dict[str, Shared] = {}
        self._healed_s: dict[str, float] = {}
        self._removed: set[str] = set()
        self._num_outages = 0

    def add(self, worker: str, source: Source) -> None:
        """Share a worker that announces its blocks."""
        self.views[worker] = View(self._index, worker, source)
        self._removed.discard(worker)

    def remove(self, worker: str) -> None:
        """Share a worker no more, and forget it in Redis with the next tick."""
        view = self.views.pop(worker, None)
        if view is not None:
            view.stop_loading()
            view.unfollow()
            self._shared.pop(worker, None)
            self._healed_s.pop(worker, None)
            self._removed.add(worker)

    def age_s(self) -> float:
        """Return how long ago the oldest view was known to be the truth; inf before it was."""
        now_s = self._clock()
        ages = [
            0.0 if view.is_following else _since(now_s, view.current_s)
            for view in self.views.values()
        ]
        return max(ages, default=0.0)

    async def run(self) -> None:
        """Share until cancelled; then give up the leases, so that others need not wait."""
        try:
            await run_together(
                self._forever(self._tick, TICK_S),
                self._forever(self.publisher.publish, PUBLISH_EVERY_S),
                self._forever(self._read, 0.0),
                self._forever(self._load, PUBLISH_EVERY_S),
            )
        finally:
            for view in self.views.values():
                view.unfollow()
            # A task of its own: this one is being cancelled. If it fails, the leases run out.
            release = asyncio.ensure_future(self.leases.release(self.views))
            await asyncio.gather(release, return_exceptions=True)

    async def _forever(
        self, step: Callable[[], Coroutine[None, None, None]], pause_s: float
    ) -> None:
        while True:
            try:
                if self._link.is_up:
                    await step()
            except ResponseError as error:
                # A key of a wrong type; the next tick takes it away.
                self.decode_errors += 1
                self._link.report(error)
                await asyncio.sleep(PUBLISH_EVERY_S)
            except LINK_ERRORS as error:
                self._link.report(error)
            if step == self._tick:
                self._look_after_roles()
            await asyncio.sleep(pause_s if self._link.is_up else PUBLISH_EVERY_S)

    async def _tick(self) -> None:
        asked_s = self._clock()
        for worker in list(self._removed):
            await self.leases.remove(worker, pack_head(Head(is_reset=True)))
            self._removed.discard(worker)
            if worker not in self.views:
                self.leases.forget(worker)
        if not self.tail.is_started:
            await self.tail.start()
        before = {worker: view.applied for worker, view in self.views.items()}
        found = await self.leases.tick(dict.fromkeys(self.views, True))
        self._ticked_s = asked_s
        for worker, shared in found.items():
            view = self.views.get(worker)
            if view is None:
                continue
            if view.applied != before.get(worker) and shared.id:
                # It moved on while the answer was on its way.
                shared = shared._replace(id=view.applied, head=view.head, fault="")
            self._shared[worker] = shared
            self._decide(view, shared, asked_s)
            # Beginning to read a worker's events takes a while, and there may be hundreds.
            await asyncio.sleep(0)

    def _look_after_roles(self) -> None:
        """Without word from Redis for longer than a lease, read all events here."""
        if self._clock() - self._ticked_s <= LEASE_S:
            return
        for view in self.views.values():
            view.lease = b""
            view.role = "alone"
            view.follow()

    def _decide(self, view: View, shared: Shared, asked_s: float) -> None:
        """Take the role that Redis gives, as far as the view allows."""
        view.num_shared = shared.num_blocks
        view.holder, view.generation = shared.holder, shared.generation
        if shared.fault and shared.fault != INCOMPLETE:
            view.decode_errors += 1
            self.decode_errors += 1
        if shared.block_size not in (0, self._index.block_size):
            shared = shared._replace(fault="other block size", id=b"")
        if shared.is_ours:
            self._hold(view, shared)
        elif shared.fault == "other block size":
            view.lease, view.role = b"", "alone"
            view.follow()
        else:
            self._follow_others(view, shared, asked_s)

    def _hold(self, view: View, shared: Shared) -> None:
        """Read the worker's events and publish them, as soon as the view is what Redis has."""
        is_same_lease = view.lease == shared.lease
        view.lease = shared.lease
        if view.is_following:
            view.role = "hold"
            self._check_published(view, shared, is_same_lease=is_same_lease)
        elif not shared.id or view.is_broken:
            # There is nothing to go on from but what is here.
            view.role = "hold"
            view.follow()
            view.publication.restart()
        elif view.applied == shared.id and not (view.needs_load or view.is_loading):
            view.role = "hold"
            view.follow()
        else:
            view.become_tail()
            self._catch_up(view, shared)

    def _check_published(self, view: View, shared: Shared, *, is_same_lease: bool) -> None:
        """Publish everything again if Redis has anything else than what was published last."""
        if shared.id == view.applied:
            is_lost = not view.publication.is_reset and (not shared.id or bool(shared.fault))
        else:
            # A delta that was sent without an answer to it is ours; it will be sent again.
            is_lost = not (view.is_unsure and is_same_lease and _is_later(shared.id, view.applied))
            view.applied = shared.id
        view.is_unsure = False
        if is_lost:
            view.publication.restart()

    def _follow_others(self, view: View, shared: Shared, asked_s: float) -> None:
        view.lease = b""
        view.become_tail()
        if shared.fault == INCOMPLETE:
            return  # its holder sees it as well, and writes it anew
        if shared.fault:
            view.needs_load = True  # which finds the fault and heals it
        elif shared.id == view.applied and not (view.needs_load or view.is_loading):
            view.current_s = asked_s
            view.behind_at = None
            self._check_view(view, shared)
        elif shared.id:
            self._catch_up(view, shared)

    def _check_view(self, view: View, shared: Shared) -> None:
        """Load again what somebody in this process dropped from the view, thinking it void."""
        num_blocks = sum(self._index.blocks_by_tier(view.worker).values())
        has_room = self._index.num_blocks + shared.num_blocks < self._index.max_blocks
        is_due = self._clock() - view.loaded_s >= _HEAL_EVERY_S
        if has_room and is_due and num_blocks < shared.num_blocks / 2:
            view.needs_load = True

    def _catch_up(self, view: View, shared: Shared) -> None:
        """Load what the stream will not bring: it is trimmed, or gone."""
        if view.is_loading or view.applied == shared.id:
            return
        is_stuck = view.behind_at is not None and view.behind_at == self.tail.at
        view.behind_at = self.tail.at
        if not view.applied or is_stuck or self.tail.has_passed(shared.id):
            view.needs_load = True

    async def _read(self) -> None:
        if not self.tail.is_started:
            await asyncio.sleep(PUBLISH_EVERY_S)
            return
        if self._num_outages != self._link.num_outages:
            num_outages = self._link.num_outages
            await self.tail.start()
            self._num_outages = num_outages
        entries = await self.tail.read()
        for entry_id, fields in entries:
            try:
                self._take(entry_id, fields)
            except SharedValueError:
                self.decode_errors += 1
            await asyncio.sleep(0)

    def _take(self, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
        view = self.views.get(field(fields, b"w").decode("utf-8", "replace"))
        if view is not None:
            try:
                head = unpack_head(field(fields, b"h"))
                view.take(Entry(entry_id, field(fields, b"p"), head, field(fields, b"d")))
            except SharedValueError:
                view.decode_errors += 1
                raise

    async def _load(self) -> None:
        for view in list(self.views.values()):
            if not view.needs_load or view.role != "tail":
                continue
            view.start_loading()
            view.loaded_s = self._clock()
            is_done = False
            try:
                is_done = await self._load_one(view)
            except (SharedValueError, ResponseError):
                view.decode_errors += 1
                self.decode_errors += 1
                await self._heal(view)
            finally:
                # Between the last delta that waited and this nothing can have come.
                view.is_loading = False
                if not is_done:
                    # Also if the connection was lost: a part of a state is no state.
                    view.needs_load = True
            if is_done and view.applied:
                view.current_s = view.loaded_s  # what was read was true when the reading began

    async def _load_one(self, view: View) -> bool:
        found = await self.leases.tick({view.worker: False})
        shared = found[view.worker]
        if shared.fault == INCOMPLETE:
            return False
        if shared.fault:
            raise SharedValueError(shared.fault)
        if not shared.id:
            return True  # nothing there: its holder will write it
        state_key = self.leases.keys(view.worker)[2]
        return await load(self._link, state_key, view, shared, self._index)

    async def _heal(self, view: View) -> None:
        """Delete a state that cannot be read; its holder then writes it anew."""
        view.source.clear()
        view.applied, view.head, view.is_broken = b"", Head(), True
        now_s = self._clock()
        if now_s - self._healed_s.get(view.worker, float("-inf")) >= _HEAL_EVERY_S:
            self._healed_s[view.worker] = now_s
            await answer(self._link.client.unlink(*self.leases.keys(view.worker)[1:]))
        else:
            await asyncio.sleep(TICK_S)


def _since(now_s: float, then_s: float | None) -> float:
    return float("inf") if then_s is None else max(0.0, now_s - then_s)


def _is_later(entry_id: bytes, other: bytes) -> bool:
    return bool(entry_id) and (not other or entry_order(entry_id) > entry_order(other))
