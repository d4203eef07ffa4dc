"""Load shared between simulated gateways: every ``period_s`` each tells what it has in flight.

What ``gateway.routing.others.OthersLoad`` is in the product, for many gateways in one process: one
sum for all instead of a copy each, which is what makes sixteen of them quick to simulate.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from gateway.routing.others import OthersLoad, WorkerLoad

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.routing.books import Books

# Multiples of 2**-20 s add and subtract exactly, as in the product.
_GRAIN_PER_S = float(1 << 20)
_NOTHING = WorkerLoad()


class Hub:
    """What all gateways said last.

    Args:
        num_gateways: How many there are.
        is_shared: False = nobody hears anybody.
    """

    def __init__(self, num_gateways: int, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.said: list[dict[str, WorkerLoad]] = [{} for _ in range(num_gateways)]
        self.said_s = [0.0] * num_gateways
        self.total: dict[str, WorkerLoad] = {}
        self.views = [SharedView(self, gateway) for gateway in range(num_gateways)]

    def say(self, gateway: int, books: Mapping[str, Books], now_s: float) -> None:
        """Publish one gateway's books."""
        said = self.said[gateway]
        self.said_s[gateway] = now_s
        for worker, book in books.items():
            load, old = book.load, said.get(worker, _NOTHING)
            if (
                load.in_flight == old.in_flight
                and load.queued_tokens == old.queued_tokens
                and load.context_tokens == old.context_tokens
                and load.progress_at_s == old.progress_at_s
                and load.restore_until_s == old.restore_until_s
            ):
                continue
            new = WorkerLoad(
                load.in_flight,
                load.queued_tokens,
                round(load.queued_s * _GRAIN_PER_S) / _GRAIN_PER_S,
                load.context_tokens,
                load.progress_at_s,
                load.restore_until_s,
            )
            said[worker] = new
            total = self.total.get(worker)
            if total is None:
                total = self.total[worker] = WorkerLoad()
            total.in_flight += new.in_flight - old.in_flight
            total.queued_tokens += new.queued_tokens - old.queued_tokens
            total.queued_s += new.queued_s - old.queued_s
            total.context_tokens += new.context_tokens - old.context_tokens
            total.progress_at_s = max(total.progress_at_s, new.progress_at_s)
            total.restore_until_s = max(total.restore_until_s, new.restore_until_s)


class SharedView(OthersLoad):
    """The others' load as one gateway sees it."""

    def __init__(self, hub: Hub, gateway: int) -> None:
        super().__init__()
        self._hub = hub
        self._gateway = gateway

    def __len__(self) -> int:
        return len(self._hub.said) - 1

    def of(self, worker_id: str) -> WorkerLoad | None:
        """Return the sum over the other gateways; None while nobody ever used the worker."""
        hub = self._hub
        total = hub.total.get(worker_id)
        if total is None:
            return None
        own = hub.said[self._gateway].get(worker_id)
        if own is None:
            return total
        # The latest times may be the own ones: its books know them anyway.
        return WorkerLoad(
            total.in_flight - own.in_flight,
            total.queued_tokens - own.queued_tokens,
            total.queued_s - own.queued_s,
            total.context_tokens - own.context_tokens,
            total.progress_at_s,
            total.restore_until_s,
        )

    def age_s(self, now_s: float) -> float:
        """Return how long ago the gateway spoke that has been silent for longest."""
        hub = self._hub
        if len(hub.said) == 1:
            return 0.0
        if not hub.is_shared:
            return inf
        own = hub.said_s[self._gateway]
        oldest_s = min(hub.said_s)
        if oldest_s == own:
            oldest_s = min(s for g, s in enumerate(hub.said_s) if g != self._gateway)
        return now_s - oldest_s
