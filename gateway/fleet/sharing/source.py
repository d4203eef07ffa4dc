"""One worker's events, for the replica: on and off in this process, names kept either way."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from prefix_index.names import NameBudget, Names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gateway.fleet.feed import Feed
    from gateway.fleet.fleet import Fleet
    from gateway.routing.pool import Pool, Worker
    from prefix_index.blocks import BlockHash
    from prefix_index.events import EngineHash
    from prefix_index.index import Index
    from prefix_index.ingest import FeedChange


class WorkerSource:
    """One worker's events, on and off, for the replica (see ``replica.source.Source``).

    Keeps the engine's names of blocks also while another process reads the events: whoever goes on
    needs them to understand removals.
    """

    def __init__(
        self, fleet: Fleet, pool: Pool, worker: Worker, index: Index, budget: NameBudget
    ) -> None:
        self._fleet = fleet
        self._pool = pool
        self._worker = worker
        self._index = index
        self._names = Names(budget, lambda block: index.holds(worker.id, block))
        self._feed: Feed | None = None
        self._on_change: Callable[[FeedChange], None] | None = None

    def follow(self, next_sequence: int, digest: int) -> None:
        """Read the worker's events in this process, behind a known batch."""
        self.set_silent(is_silent=False)
        self._feed = self._fleet.follow(
            self._worker, first_sequence=next_sequence, last_digest=digest, names=self._names
        )
        if self._feed is not None:
            self._feed.ingest.on_change = self._on_change

    def unfollow(self) -> None:
        """Stop reading them here."""
        self._fleet.unfollow(self._worker)
        self._feed = None

    def clear(self) -> None:
        """Forget the worker's blocks and their names."""
        if self._feed is not None:
            self._feed.ingest.clear()
            return
        self._index.clear(self._worker.id)
        self._names.clear()

    def adopt(self, names: list[EngineHash], blocks: list[BlockHash]) -> None:
        """Learn the engine's names of blocks that are, or will be, in the index."""
        self._names.add(names, blocks)

    def names(self) -> Iterable[EngineHash]:
        """Return a copy of the names that are known."""
        return [*map(itemgetter(0), self._names.items())]

    def block_of(self, name: EngineHash) -> BlockHash | None:
        """Return the block of a name."""
        return self._names.get(name)

    def position(self) -> tuple[int, int]:
        """Return the next batch's sequence and the last one's digest."""
        if self._feed is None:
            return 0, 0
        last = self._feed.subscriber.last_sequence
        return (0, 0) if last is None else (last + 1, self._feed.subscriber.last_digest)

    def is_silent(self) -> bool:
        """Say whether the worker stopped telling although it should."""
        return self._worker.mode == "approximate"

    def set_silent(self, is_silent: bool) -> None:
        """Believe its events, or model it; a worker routed by text stays so."""
        if self._worker.mode != "text":
            self._pool.set_mode(self._worker, "approximate" if is_silent else "exact")

    def listen(self, on_change: Callable[[FeedChange], None] | None) -> None:
        """Call back after each batch that changed something."""
        self._on_change = on_change
        if self._feed is not None:
            self._feed.ingest.on_change = self._on_change
