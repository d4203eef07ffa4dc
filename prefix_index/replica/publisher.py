"""Publish what this process reads: one delta after the other, fenced by the server."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from prefix_index.replica.codec import pack_delta, pack_head
from prefix_index.replica.lease import KEPT_S, STREAM_DELTAS
from prefix_index.replica.scripts import PUBLISH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prefix_index.index import Index
    from prefix_index.replica.lease import Leases
    from prefix_index.replica.link import Link
    from prefix_index.replica.publication import Delta
    from prefix_index.replica.view import View


class Publisher:
    """Publishes the views that this process holds; event loop only.

    Args:
        link: Connection.
        leases: Of the pool.
        index: Holds the views' blocks.
        views: Worker -> its view, as it is at any time.

    Attributes:
        published: Blocks whose states were published.
        refused: Deltas that the server refused, by its reason.
    """

    def __init__(self, link: Link, leases: Leases, index: Index, views: Mapping[str, View]) -> None:
        self.published = 0
        self.refused: Counter[str] = Counter()
        self._link = link
        self._leases = leases
        self._index = index
        self._views = views
        # A state that lists more than a view and its names can have lost removals.
        self._max_blocks = 2 * index.max_blocks

    async def publish(self) -> None:
        """Publish what is pending, one delta of each worker in turn."""
        ready = [view for view in self._views.values() if view.role == "hold" and view.is_following]
        while ready:
            ready = [view for view in ready if await self._publish_one(view)]
            await asyncio.sleep(0)

    async def _publish_one(self, view: View) -> bool:
        """Return whether there may be more."""
        if view.role != "hold" or not self._link.is_up:
            return False
        publication = view.publication
        is_silent = view.source.is_silent()
        if is_silent != publication.is_silent:
            publication.is_silent = is_silent
            publication.restart()
        delta = publication.next_delta()
        if delta is None:
            return False
        was_unsure, view.is_unsure = view.is_unsure, True
        found = await self._send(view, delta)
        view.is_unsure = was_unsure
        if found in (b"fenced", b"behind", b"stale"):
            # Whoever is fenced learns from the next tick who holds the lease now; likewise whether
            # it was our own delta that the server has already.
            if found != b"fenced" and not was_unsure:
                publication.restart()
            self.refused[found.decode()] += 1
            return False
        view.is_unsure = False
        if isinstance(found, list):
            found = found[0]
            self.refused["full"] += 1
            publication.restart()
        else:
            publication.done(delta)
        view.applied, view.head = found, delta.head
        self.published += len(delta.states)
        return True

    async def _send(self, view: View, delta: Delta) -> bytes | list[bytes]:
        head = delta.head
        pairs: list[bytes] = []
        gone: list[bytes] = []
        for block, value in delta.states.items():
            if value:
                pairs += (block, value)
            elif not head.is_reset:
                gone.append(block)
        args: list[bytes | str | int] = [
            *(view.lease, b"*" if head.is_reset else view.applied, head.epoch, delta.sequence),
            *(pack_head(head), self._index.block_size, view.worker, pack_delta(delta.states)),
            *(STREAM_DELTAS, int(KEPT_S * 1000), self._max_blocks, len(pairs) // 2),
            *pairs,
            *gone,
        ]
        keys = [*self._leases.keys(view.worker), self._leases.stream]
        found: bytes | list[bytes] = await PUBLISH.run(self._link.client, keys, args)
        return found
