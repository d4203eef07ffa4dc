"""What was warmed where, and how much of it clients' prompts hit: was it worth it.

A warmed prefix is found in a client's prompt by the hash of its last block, looked for at one place
in 512 tokens, so that the request path pays a few look-ups.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prefix_index.blocks import BlockHash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gateway.routing.dispatch import Plan, Ticket
    from gateway.routing.pool import Pool
    from gateway.warm.shareable import Shareable

# As for what is known of documents' ends (gateway/worth/stable_ends.py).
GRAIN_TOKENS = 512
# Prefixes, some 400 bytes each: two runs of the largest size.
MAX_PREFIXES = 20_000
# Prefixes behind one place; short ones under one system prompt share theirs.
MAX_SIBLINGS = 16


@dataclass(slots=True)
class Prefix:
    """One warmed prefix.

    Attributes:
        pool: Name of its pool.
        id: The item's name; empty for what the gateway keeps warm itself.
        tenant: Whose it is.
        ring_key: Key of its requests.
        num_blocks: Its length.
        num_tokens: Likewise.
        end: Its last block.
        place: The block under which it is looked for.
        is_pinned: Whether nothing of warm-up may push it out.
        workers: Where it was warmed.
        hit_tokens: Tokens of clients' prompts found in it there.
        computed_tokens: Tokens computed for it.
    """

    pool: str
    id: str
    tenant: str
    ring_key: str
    num_blocks: int
    num_tokens: int
    end: BlockHash
    place: BlockHash
    is_pinned: bool = False
    workers: set[str] = field(default_factory=set)
    hit_tokens: int = 0
    computed_tokens: int = 0


class Warmed:
    """The prefixes that were warmed; event loop only, bounded, the oldest leave."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[tuple[str, BlockHash], Prefix] = OrderedDict()
        self._places: dict[BlockHash, list[Prefix]] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._prefixes.values())

    def add(self, found: Shareable, worker: str, computed_tokens: int) -> None:
        """Take note of a prefix that a worker holds by now."""
        key = found.pool.name, found.hashes[-1]
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = Prefix(
                found.pool.name,
                found.item.id,
                found.item.tenant,
                found.ring_key,
                len(found.hashes),
                found.num_tokens,
                found.hashes[-1],
                place := _place(found.hashes, found.pool.block_size),
            )
            self._prefixes[key] = prefix
            self._places[place] = [prefix, *self._places.get(place, ())][:MAX_SIBLINGS]
        self._prefixes.move_to_end(key)
        prefix.is_pinned = found.item.pin
        prefix.workers.add(worker)
        prefix.computed_tokens += computed_tokens
        if len(self._prefixes) > MAX_PREFIXES:
            self._drop(next(iter(self._prefixes)))

    def hit(self, plan: Plan, ticket: Ticket) -> int:
        """Return how many tokens of a finished prompt were found in what was warmed there."""
        hashes = plan.hashes
        if not self._places or not hashes:
            return 0
        observed, worker = ticket.observed_hit_tokens, ticket.worker.id
        hit_tokens = ticket.predicted_hit_tokens if observed is None else observed
        stride = max(1, GRAIN_TOKENS // plan.pool.block_size)
        for at in (*range(len(hashes) // stride * stride - 1, 0, -stride), 0):
            for prefix in self._places.get(hashes[at], ()):
                length = prefix.num_blocks
                if worker not in prefix.workers or length > len(hashes):
                    continue
                if hashes[length - 1] == prefix.end:
                    tokens = min(hit_tokens, prefix.num_tokens)
                    prefix.hit_tokens += tokens
                    return tokens
        return 0

    def emptied(self, worker: str) -> None:
        """A worker's cache is empty: nothing is warm there."""
        for prefix in self._prefixes.values():
            prefix.workers.discard(worker)

    def held(self, pool: Pool) -> dict[str, int]:
        """Return worker -> warmed prefixes that it holds still, by the index where it says."""
        counts: dict[str, int] = {}
        for prefix in self._prefixes.values():
            if prefix.pool != pool.name:
                continue
            for worker_id in prefix.workers:
                worker = pool.workers.get(worker_id)
                is_told = worker is not None and worker.mode == "exact" and pool.index is not None
                if is_told and not pool.index.holds(worker_id, prefix.end):  # type: ignore[union-attr]
                    continue
                counts[worker_id] = counts.get(worker_id, 0) + 1
        return counts

    def forget(self, is_meant: Callable[[Prefix], bool]) -> int:
        """Forget prefixes for good; return how many."""
        gone = [key for key, prefix in self._prefixes.items() if is_meant(prefix)]
        for key in gone:
            self._drop(key)
        return len(gone)

    def _drop(self, key: tuple[str, BlockHash]) -> None:
        gone = self._prefixes.pop(key)
        kept = [prefix for prefix in self._places.get(gone.place, ()) if prefix is not gone]
        if kept:
            self._places[gone.place] = kept
        else:
            self._places.pop(gone.place, None)


def _place(hashes: Sequence[BlockHash], block_size: int) -> BlockHash:
    stride = max(1, GRAIN_TOKENS // block_size)
    return hashes[max(0, len(hashes) // stride * stride - 1)]
