"""The simulated engines, and what a router may know of them.

Routers see the fleet through this module only: which workers take requests, what metrics scrapes
showed, what cache events said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gateway.replay.engine import Engine
from gateway.replay.residency import EventIndex, worker_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.replay.engine import EngineModel, Job
    from gateway.replay.kv_cache import Change
    from gateway.replay.traces import Request
    from prefix_index.blocks import BlockHash

# How late cache events are, and how old metrics may be: as in the simulation behind the design.
EVENT_DELAY_S = 0.005
SCRAPE_PERIOD_S = 0.050


class Pull:
    """Prompt blocks that a request brings to its worker from elsewhere.

    Attributes:
        source: Worker that has them, or None for the shared store.
        num_blocks: Leading blocks of the prompt that are there afterwards.
        is_free: Costs neither time nor bandwidth: the oracles' transfers.
    """

    __slots__ = ("is_free", "num_blocks", "source")

    def __init__(self, source: int | None, num_blocks: int, *, is_free: bool = False) -> None:
        self.source = source
        self.num_blocks = num_blocks
        self.is_free = is_free


class Placement:
    """Where a router sent a request.

    Attributes:
        worker: Which worker.
        token: The router's own entry, handed back to it.
        pull: What is to be transferred first; None = nothing.
        predicted_hit_tokens: Hit tokens the router counted on.
        is_urgent: The other gateways should hear of it at once.
    """

    __slots__ = ("is_urgent", "predicted_hit_tokens", "pull", "token", "worker")

    def __init__(
        self,
        worker: int,
        token: object,
        *,
        pull: Pull | None = None,
        predicted_hit_tokens: int = 0,
        is_urgent: bool = False,
    ) -> None:
        self.worker = worker
        self.token = token
        self.pull = pull
        self.predicted_hit_tokens = predicted_hit_tokens
        self.is_urgent = is_urgent


class Router(Protocol):
    """One routing rule, in one or several gateways. Called in order of simulated time."""

    wants_events: bool

    def route(self, request: Request, gateway: int, now_s: float) -> Placement:
        """Choose a worker among those that take requests, and book the request there."""

    def first_token(self, placement: Placement, now_s: float) -> None:
        """Note a first token."""

    def finished(self, placement: Placement, job: Job, now_s: float) -> None:
        """Note the end of a completion."""

    def failed(self, placement: Placement, now_s: float) -> None:
        """Note that a request was lost with its worker."""

    def pulled(self, placement: Placement, tokens: int, seconds: float) -> None:
        """Note a transfer that was measured."""

    def down(self, worker: int, now_s: float) -> None:
        """Note that a worker lost its cache and takes no requests."""

    def up(self, worker: int, now_s: float) -> None:
        """Note that a worker, known or new, takes requests."""

    def draining(self, worker: int, now_s: float) -> None:
        """Note that a worker takes no more requests."""

    def share(self, gateway: int, now_s: float) -> None:
        """Tell the other gateways what one gateway has in flight."""


class Fleet:
    """Engines by number; those that are gone keep theirs.

    Args:
        model: What each engine can do.
        num_workers: How many there are at the start.

    Attributes:
        model: As given.
        engines: All engines there ever were.
        routable: Workers that take requests, ascending.
        events: The index that cache events feed; empty unless somebody wants them.
        now_s: Simulated time.
    """

    def __init__(
        self, model: EngineModel, num_workers: int, *, event_delay_s: float = EVENT_DELAY_S
    ) -> None:
        self.model = model
        self.now_s = 0.0
        self.engines: list[Engine] = []
        self.routable: list[int] = []
        self.events = EventIndex(model.block_tokens, event_delay_s)
        self._listeners: list[Callable[[str, Change, float], None]] = []
        self._scraped_s = float("-inf")
        self._scraped: dict[int, tuple[int, float]] = {}
        for _ in range(num_workers):
            self.add()

    def listen(self, listener: Callable[[str, Change, float], None]) -> None:
        """Have a listener told of each (holder, change, time) at once."""
        self._listeners.append(listener)

    def add(self) -> int:
        """Start one more worker and return its number."""
        worker = len(self.engines)
        self.engines.append(self._engine(worker))
        self.routable.append(worker)
        return worker

    def drain(self, worker: int) -> None:
        """Send a worker nothing more."""
        self.routable.remove(worker)

    def stop(self, worker: int) -> Engine:
        """Take a worker down with all it holds; returns the engine that was."""
        lost = self.engines[worker]
        self.engines[worker] = self._engine(worker)
        if worker in self.routable:
            self.routable.remove(worker)
        self.events.clear(worker)
        return lost

    def start(self, worker: int) -> None:
        """Let a stopped worker take requests again."""
        self.routable.append(worker)
        self.routable.sort()

    def scraped(self, worker: int) -> tuple[int, float]:
        """Return (requests waiting, share of KV pinned) as of the last metrics scrape."""
        tick_s = self.now_s // SCRAPE_PERIOD_S * SCRAPE_PERIOD_S
        if tick_s > self._scraped_s:
            self._scraped_s = tick_s
            size = self.model.block_tokens / self.model.gpu_tokens
            self._scraped = {
                w: (len(e.waiting), e.cache.num_pinned * size) for w, e in enumerate(self.engines)
            }
        return self._scraped.get(worker, (0, 0.0))

    def held_prefix(self, worker: int, blocks: Sequence[BlockHash]) -> int:
        """Return how many leading blocks a worker has in any tier at this moment."""
        return self.engines[worker].cache.match(blocks).num_blocks

    def _engine(self, worker: int) -> Engine:
        return Engine(self.model, self.announcer(worker_id(worker)))

    def announcer(self, holder: str) -> Callable[[Change], None]:
        """Return what tells the listeners of a holder's changes, at the time they happen."""
        listeners = self._listeners

        def announce(change: Change) -> None:
            for listener in listeners:
                listener(holder, change, self.now_s)

        return announce
