"""Live state as metrics: read at scrape time, so that a worker's series leave with it.

The contract's twelve names are bare samples with ``scope``; a value nobody reports is absent,
never 0. Each has a typed twin for alerts, in ``gateway/fleet/figures.py`` or in
``gateway/telemetry/requests.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from gateway.fleet.figures import WORKER, engine_state, reported, twins
from gateway.telemetry import parts
from gateway.telemetry.observed import counts, gauges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.fleet.feed import Feed
    from gateway.fleet.fleet import Fleet
    from gateway.routing.pool import Pool, Worker
    from gateway.telemetry.requests import Telemetry

# warmlane_kv_event_NAME_total -> what it counts, and where that is read.
EVENT_COUNTS: dict[str, tuple[str, Callable[[Feed], int]]] = {
    "gaps": ("Times KV events were missing", lambda feed: feed.subscriber.gaps),
    "losses": ("Times missing ones could not be had", lambda feed: feed.subscriber.losses),
    "replays": ("Times the worker's buffer answered", lambda feed: feed.subscriber.replays),
    "restarts": ("Times the worker's cache was new", lambda feed: feed.restarts),
    "decode_errors": ("Messages that were no events", lambda feed: feed.subscriber.decode_errors),
    "unknown": ("Events of a type not known here", lambda feed: feed.subscriber.unknown_events),
    "orphans": ("Events that waited for their parent", lambda feed: feed.ingest.orphans),
    "rejected": ("Events that could not be used", lambda feed: feed.ingest.rejected),
    "implausible": ("Events that contradict themselves", lambda feed: feed.ingest.implausible),
    "stored_blocks": ("Block copies that came", lambda feed: feed.ingest.stored),
    "removed_blocks": ("Block copies that left", lambda feed: feed.ingest.removed),
}


class FleetCollector(Collector):
    """Reads pools, feeds and windows; registered with the telemetry's registry."""

    def __init__(self, fleet: Fleet, telemetry: Telemetry, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: names here are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        now_s, scopes = self._clock(), self._telemetry.scopes()
        yield from gauges({at: seen.recent(now_s) for at, seen in scopes.items()})
        yield from counts(scopes)
        yield from reported(self._fleet)
        yield from twins(self._fleet)
        yield from engine_state(self._fleet, self._telemetry.request_tokens)
        yield from self._state()
        yield from self._events()

    def _state(self) -> Iterator[Metric]:
        """Yield the typed state of workers and index."""
        members = self._members()
        for name, text, read in (
            ("warmlane_worker_ready", "1 while checks pass", lambda w: w.health.ready),
            (
                "warmlane_worker_exact",
                "1 while the index is fed by its own events",
                lambda w: w.mode == "exact",
            ),
            (
                "warmlane_worker_parity",
                "1 if its prompt tokens equal ours, 0 if they diverged, -1 unknown",
                self._fleet.parity_of,
            ),
            (
                "warmlane_in_flight_requests",
                "Sent and not finished",
                lambda w: w.books.in_flight,
            ),
            (
                "warmlane_queued_tokens",
                "Uncached prompt tokens without a first token",
                lambda w: w.books.queued_tokens,
            ),
        ):
            rows = (((pool.name, worker.id), read(worker)) for pool, worker in members)
            yield from parts.gauge(name, text, WORKER, rows)
        yield from parts.gauge(
            "warmlane_index_blocks",
            "Blocks believed to be held",
            (*WORKER, "tier"),
            (
                ((pool.name, worker.id, tier), count)
                for pool, worker in members
                if pool.index is not None
                for tier, count in pool.index.blocks_by_tier(worker.id).items()
            ),
        )
        now_s = self._clock()
        yield from parts.gauge(
            "warmlane_worker_event_age_seconds",
            "Time since the worker's last KV event",
            WORKER,
            (
                ((pool.name, worker.id), now_s - worker.last_event_s)
                for pool, worker in members
                if worker.last_event_s is not None
            ),
        )
        yield from parts.counter(
            "warmlane_unread_prompts",
            "Prompts routed without tokens",
            ("pool", "reason"),
            (
                ((pool.name, reason), count)
                for pool in self._fleet.pools
                for reason, count in list(pool.unread_prompts.items())
            ),
        )

    def _events(self) -> Iterator[Metric]:
        """Yield what came of the workers' KV events, for those that this process follows."""
        feeds = self._fleet.feeds
        followed = [
            ((pool.name, worker.id), feeds[worker.id])
            for pool, worker in self._members()
            if worker.id in feeds
        ]
        for name, (text, read) in EVENT_COUNTS.items():
            rows = ((at, read(feed)) for at, feed in followed)
            yield from parts.counter(f"warmlane_kv_event_{name}", text, WORKER, rows)
        yield from parts.gauge(
            "warmlane_kv_event_lag_seconds",
            "How long events have been due that did not come",
            WORKER,
            ((at, feed.lag_s) for at, feed in followed),
        )
        yield from parts.gauge(
            "warmlane_kv_event_health",
            "1 for the state that a worker's events are in",
            (*WORKER, "state"),
            (((*at, feed.health.value), 1) for at, feed in followed),
        )

    def _members(self) -> list[tuple[Pool, Worker]]:
        """Return all workers as they are now: they may come and go while they are read."""
        return [(pool, worker) for pool in self._fleet.pools for worker in pool.workers.values()]
