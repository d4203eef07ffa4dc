"""KV events of the tiers: what each has come to hold and has given up, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.kvkeys import BlockChain
from runner.pool.events import removed_event, stored_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.events import Event
    from runner.kvkeys import KvKey
    from runner.tiers.books import Entry
    from runner.tiers.types import TierName

# As vLLM's connectors name them; an index reads SHARED_STORAGE as one that others write too.
MEDIA: dict[TierName, str] = {"cpu": "CPU", "disk": "STORAGE", "remote": "SHARED_STORAGE"}


class Announcer:
    """Collects the events of all tiers; neighbouring blocks of a chain become one event."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[Event] = []
        # The run of blocks still growing: tier, chain, first and last index.
        self._run: tuple[TierName, BlockChain, int, int] | None = None

    def stored(self, tier: TierName, chain: BlockChain, index: int) -> None:
        """A tier holds block ``index`` of a sequence now."""
        run = self._run
        if run and run[0] == tier and run[1] is chain and run[3] == index:
            self._run = (tier, chain, run[2], index + 1)
            return
        self._end_run()
        self._run = (tier, chain, index, index + 1)

    def removed(self, tier: TierName, key: KvKey) -> None:
        """A tier does not hold a block any more."""
        self._end_run()
        self._events.append(removed_event(key, medium=MEDIA[tier]))

    def drain(self) -> list[Event]:
        """Return the events since the last call, in order."""
        self._end_run()
        events, self._events = self._events, []
        return events

    def _end_run(self) -> None:
        if self._run is None:
            return
        tier, chain, first, last = self._run
        self._run = None
        self._events.append(
            stored_event(chain, first, last, block_size=self._block_size, medium=MEDIA[tier])
        )


def announce_recovered(
    announcer: Announcer, tier: TierName, entries: Sequence[Entry], root: KvKey, block_size: int
) -> None:
    """Announce what a tier held before this process, as far as its beginning is known.

    A block tells its parent and its own tokens, but neither salt nor adapter; so only chains that
    lead to the root without either can be described. The others are announced on their first hit.

    Args:
        announcer: Takes the events, parents first.
        tier: Whose.
        entries: All it holds.
        root: Parent of first blocks without salt and adapter.
        block_size: Tokens of a block.
    """
    children: dict[KvKey, list[Entry]] = {}
    for entry in entries:
        children.setdefault(entry.record.parent, []).append(entry)
    pending = [(BlockChain(root, block_size), entry) for entry in children.pop(root, ())]
    while pending:
        chain, entry = pending.pop()
        chain.keys.append(entry.record.key)
        chain.tokens.append(entry.record.tokens)
        announcer.stored(tier, chain, len(chain.keys) - 1)
        entry.is_announced = True
        following = children.pop(entry.record.key, [])
        pending += [(chain.copy(), other) for other in following[1:]]
        # Taken next, on the same chain, so that a path without branches is one event.
        pending += [(chain, other) for other in following[:1]]
