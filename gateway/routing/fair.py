"""Who of those who wait comes next: by priority, then fairly between tenants, then in order.

Pure bookkeeping: no clock, no loop, no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

T = TypeVar("T")

# So many tenants that wait no more are remembered, so that coming back gains them nothing.
_MAX_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant's rights: its share under contention, and its rank (higher comes first)."""

    weight: float = 1.0
    priority: int = 0


_USUAL = Standing()


@dataclass(slots=True, eq=False)
class Place(Generic[T]):
    """One who waits.

    Attributes:
        item: What waits.
        tenant: Whose it is.
        cost: What serving it takes; only ratios matter.
        rank: Its tenant's priority.
    """

    item: T
    tenant: str
    cost: float
    rank: int = 0


class FairQueue(Generic[T]):
    """Places of one pool. Not for several threads.

    Of equal priority, the tenant comes next that has been served least for its weight. Only what is
    served counts, so that leaving costs nothing, and time without a request earns nothing.

    Source: start-time fair queueing (Goyal, Vin, Cheng 1996), tags charged on service.

    Args:
        standings: Tenant -> its rights; others have weight 1 and priority 0.
    """

    def __init__(self, standings: Mapping[str, Standing] | None = None) -> None:
        self._standings = {} if standings is None else standings
        self._lines: dict[tuple[int, str], dict[Place[T], None]] = {}
        # Tenant -> cost served so far per weight; nobody's is behind the clock when it arrives.
        self._served: dict[str, float] = {}
        self._clock = 0.0
        self._num_places = 0

    def __len__(self) -> int:
        return self._num_places

    def places(self) -> Iterator[Place[T]]:
        """Yield those who wait, in no particular order."""
        for line in self._lines.values():
            yield from line

    def add(self, item: T, tenant: str, cost: float) -> Place[T]:
        """Put one at the end of its tenant's line."""
        standing = self._standings.get(tenant, _USUAL)
        place = Place(item, tenant, cost, standing.priority)
        self._served[tenant] = max(self._served.get(tenant, 0.0), self._clock)
        self._lines.setdefault((-place.rank, tenant), {})[place] = None
        self._num_places += 1
        return place

    def leave(self, place: Place[T]) -> bool:
        """Take one out that was not served; False if it is not here any more."""
        key = (-place.rank, place.tenant)
        line = self._lines.get(key)
        if line is None or place not in line:
            return False
        del line[place]
        if not line:
            del self._lines[key]
        self._num_places -= 1
        return True

    def serve(self, place: Place[T]) -> None:
        """Take one out that was served, and charge its tenant."""
        if not self.leave(place):
            return
        tenant = place.tenant
        self._clock = max(self._clock, self._served[tenant])
        self._served[tenant] += self._share(place)
        if len(self._served) > len(self._lines) + _MAX_REMEMBERED:
            waiting = {name for _, name in self._lines}
            self._served = {name: at for name, at in self._served.items() if name in waiting}

    def surplus(self, tenant: str) -> Place[T] | None:
        """Return who has to go so that one more of ``tenant`` can wait; None if nobody has to.

        That is the last one of the tenant with most places for its weight, among those of the
        lowest rank, if it has a place more for its weight than ``tenant`` would have; of a lower
        rank in any case.
        """
        if not self._lines:
            return None
        mine = self._standings.get(tenant, _USUAL)
        lowest = max(rank for rank, _ in self._lines)
        if lowest < -mine.priority:
            return None
        fullest = max(
            (key for key in self._lines if key[0] == lowest),
            key=lambda key: len(self._lines[key]) / self._weight(key[1]),
        )
        line = self._lines[fullest]
        if lowest == -mine.priority:
            own = self._lines.get((lowest, tenant), ())
            is_more = (len(line) - 1) / self._weight(fullest[1]) >= (len(own) + 1) / mine.weight
            if fullest[1] == tenant or not is_more:
                return None
        return next(reversed(line))

    def in_order(self) -> Iterator[Place[T]]:
        """Yield those who wait, the next one first, as if each was served; change nothing."""
        heap = []
        for number, ((rank, tenant), line) in enumerate(self._lines.items()):
            heap.append((rank, self._served[tenant], number, iter(list(line))))
        heapify(heap)
        while heap:
            rank, served, number, line_rest = heappop(heap)
            place = next(line_rest, None)
            if place is not None:
                yield place
                heappush(heap, (rank, served + self._share(place), number, line_rest))

    def _share(self, place: Place[T]) -> float:
        return place.cost / self._weight(place.tenant)

    def _weight(self, tenant: str) -> float:
        return self._standings.get(tenant, _USUAL).weight
