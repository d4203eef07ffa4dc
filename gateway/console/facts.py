"""What a gateway can tell of itself that may be worth an alert: states of now and counters."""

from __future__ import annotations

from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

from gateway.fleet.event_health import EFFECTS
from gateway.fleet.figures import filled_share
from gateway.routing.health import Breaker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.console.parts import Parts
    from gateway.routing.pool import Pool, Worker


class Fact(NamedTuple):
    """A number that is compared with a threshold.

    Attributes:
        alert: Name of the alert.
        value: What is compared.
        pool: Whose; empty = the gateway's.
        worker: Of that pool; empty = all of it.
        why: What an operator reads beside the name.
    """

    alert: str
    value: float
    pool: str = ""
    worker: str = ""
    why: str = ""


class Count(NamedTuple):
    """Counters so far, of which the one that grows least is compared; else as ``Fact``."""

    alert: str
    values: tuple[int, ...]
    pool: str = ""
    worker: str = ""
    why: str = ""


def states(parts: Parts, now_s: float) -> Iterator[Fact]:
    """Yield what is compared as it is; ``now_s`` is monotonic."""
    for pool in parts.fleet.pools:
        is_out = not any(worker.health.ready for worker in pool.workers.values())
        why = f"none of its {len(pool.workers)} workers is ready"
        yield Fact("WarmlanePoolUnavailable", float(is_out), pool.name, why=why)
        for worker in pool.workers.values():
            yield from _of_worker(parts, pool, worker, now_s)
    for name, listing in parts.discovery.listings.items():
        why = "its discovery fails; the workers it found last stay"
        yield Fact("WarmlaneDiscoveryStale", float(listing.is_failing), name, why=why)
    if parts.sharing is not None:
        is_down = float(not parts.sharing.link.is_up)
        why = "every gateway follows all workers itself"
        yield Fact("WarmlaneRedisAway", is_down, why=why)
        for name, shared in parts.sharing.pools.items():
            age_s = shared.replica.age_s()
            why = "the view that gateways share is " + (
                f"{age_s:.0f} s old" if isfinite(age_s) else "not there yet"
            )
            yield Fact("WarmlaneIndexStale", age_s, name, why=why)


def _of_worker(parts: Parts, pool: Pool, worker: Worker, now_s: float) -> Iterator[Fact]:
    at = (pool.name, worker.id)
    is_ready = worker.health.ready
    is_out = not is_ready or worker.health.breaker(now_s) is not Breaker.CLOSED
    why = "its requests failed, its breaker is open" if is_ready else "it fails its health checks"
    yield Fact("WarmlaneWorkerEjected", float(is_out), *at, why)
    why = "it makes other tokens of a prompt than this gateway"
    yield Fact("WarmlaneParityDiverged", float(parts.fleet.parity_of(worker) == 0), *at, why)
    feed = parts.fleet.feeds.get(worker.id)
    if feed is not None and feed.health in EFFECTS:
        yield Fact("WarmlaneIndexStale", inf, *at, f"its events: {EFFECTS[feed.health]}")
    filled = filled_share(pool, worker)
    watch = parts.fleet.watches.get(worker.id)
    usage = None if watch is None else watch.scrape.of_rank("kv_usage", worker.rank)
    taken = max(filled or 0.0, usage or 0.0)
    yield Fact("WarmlaneCacheFull", taken, *at, f"{taken:.0%} of its device KV memory is taken")


def counts(parts: Parts) -> Iterator[Count]:
    """Yield what only grows, and is compared by its increase."""
    gate = parts.dispatcher.gate
    for pool in parts.fleet.pools:
        why = "requests refused, because too many wait or for too long"
        refused = gate.num_full[pool.name] + gate.num_timeouts[pool.name]
        yield Count("WarmlaneQueueRefusing", (refused,), pool.name, why=why)
        for worker in pool.workers.values():
            feed = parts.fleet.feeds.get(worker.id)
            if feed is not None:
                # A gateway that joins late counts a loss and no gap.
                both = (feed.subscriber.losses, feed.subscriber.gaps)
                why = "KV events were lost and cannot be had again"
                yield Count("WarmlaneIndexGap", both, pool.name, worker.id, why)
