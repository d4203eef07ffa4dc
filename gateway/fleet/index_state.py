"""What an operator may want to know about one worker's part of the index, as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.fleet.event_health import EFFECTS, EventHealth

if TYPE_CHECKING:
    from gateway.fleet.feed import Feed
    from gateway.fleet.sources import EventSource
    from gateway.routing.pool import Pool, Worker


def index_state(
    pool: Pool,
    worker: Worker,
    *,
    source: EventSource | None,
    refused: str,
    feed: Feed | None,
    now_s: float,
) -> dict[str, Any]:
    """Describe how the index knows what a worker holds; a value nobody has is None.

    Args:
        pool: The worker's pool.
        worker: Of it.
        source: Where it publishes, if it does.
        refused: Why the addresses that it names are not used; empty = they are.
        feed: Its feed, if this process follows it.
        now_s: Monotonic seconds.
    """
    blocks = {} if pool.index is None else pool.index.blocks_by_tier(worker.id)
    state: dict[str, Any] = {
        "mode": worker.mode if pool.reader is not None else "text",
        "health": EventHealth.OFF.value,
        "why": refused or None,
        "rank": worker.rank,
        "epoch": worker.epoch,
        "source": None if source is None else source._asdict(),
        "followed": feed is not None,
        "blocks": {tier: count for tier, count in blocks.items() if count},
        "event_age_s": None if worker.last_event_s is None else now_s - worker.last_event_s,
    }
    if feed is None:
        return state
    subscriber, ingest = feed.subscriber, feed.ingest
    return state | {
        "health": feed.health.value,
        "why": refused or EFFECTS.get(feed.health),
        "last_sequence": subscriber.last_sequence,
        "lag_s": feed.lag_s,
        "behind_batches": subscriber.behind_batches,
        "gaps": subscriber.gaps,
        "losses": subscriber.losses,
        "replays": subscriber.replays,
        "restarts": feed.restarts,
        "resets": ingest.resets,
        "decode_errors": subscriber.decode_errors,
        "unknown_events": subscriber.unknown_events,
        "misdirected": feed.misdirected,
        "stored": ingest.stored,
        "removed": ingest.removed,
        "orphans": ingest.orphans,
        "waiting": ingest.waiting,
        "rejected": ingest.rejected,
        "implausible": ingest.implausible,
        "unnamed": ingest.unnamed,
        "names": ingest.num_names,
        "block_size": ingest.block_size or None,
    }
