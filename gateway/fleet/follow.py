"""Whose events this process follows, and the sockets and memory that the feeds share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq.asyncio

from gateway.fleet.feed import Feed
from prefix_index.names import NameBudget
from prefix_index.receiver import Receivers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine
    from typing import Any

    from gateway.fleet.sources import EventSource
    from gateway.routing.pool import Pool, Worker
    from prefix_index.index import Index
    from prefix_index.names import Names

# Names freed in one go: under a millisecond.
SWEEP_NAMES = 10_000


class Following:
    """The feeds of one process; used from one event loop.

    Args:
        spawn: Starts a task that lives as long as the fleet, and returns it.
        clock: Monotonic seconds.

    Attributes:
        feeds: Worker id -> its feed.
    """

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, object]], asyncio.Task[object]],
        clock: Callable[[], float],
    ) -> None:
        self.feeds: dict[str, Feed] = {}
        self._spawn = spawn
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[object]] = {}
        self._budgets: dict[str, tuple[Index, NameBudget]] = {}
        self._context: zmq.asyncio.Context | None = None
        self._receivers: Receivers | None = None

    def follow(
        self,
        pool: Pool,
        worker: Worker,
        source: EventSource,
        *,
        first_sequence: int = 0,
        last_digest: int = 0,
        names: Names | None = None,
    ) -> Feed:
        """Begin to follow a worker; one that is followed already keeps its feed.

        The feed takes nothing before the caller gives up control, so that ``on_change`` and adopted
        names can be set.
        """
        feed = self.feeds.get(worker.id)
        if feed is not None:
            return feed
        index = pool.index
        assert index is not None, "a pool without an index has nothing to put events into"
        if not first_sequence:
            index.clear(worker.id)  # else what is replayed would count twice
        if self._receivers is None:
            self._context = zmq.asyncio.Context()
            self._receivers = Receivers(self._context)
        feed = Feed(
            pool,
            worker,
            index,
            events=source.events,
            replay=source.replay,
            topic=source.topic,
            first_sequence=first_sequence,
            last_digest=last_digest,
            context=self._receivers.context,
            receiver=self._receivers.at(source.events),
            budget=self.budget(pool, index),
            names=names,
            clock=self._clock,
        )
        self.feeds[worker.id] = feed
        self._tasks[worker.id] = self._spawn(feed.run())
        return feed

    def unfollow(self, worker_id: str) -> None:
        """End to follow a worker; what the index has of it stays."""
        if self.feeds.pop(worker_id, None) is not None:
            self._tasks.pop(worker_id).cancel()

    def budget(self, pool: Pool, index: Index) -> NameBudget:
        """Return the memory for engine hashes that a pool's workers share."""
        known = self._budgets.get(pool.name)
        if known is None or known[0] is not index:
            known = self._budgets[pool.name] = index, NameBudget.for_blocks(index.max_blocks)
        return known[1]

    def check(self) -> None:
        """Look after all feeds; called about once a second."""
        for feed in list(self.feeds.values()):
            feed.check()

    def sweep(self) -> bool:
        """Free a slice of what cleared workers left behind, and say whether there is more."""
        is_more = False
        for _, budget in self._budgets.values():
            is_more |= budget.sweep(SWEEP_NAMES)
        return is_more

    def close(self) -> None:
        """Close the sockets; the tasks must have ended."""
        if self._context is not None:
            self._context.term()
