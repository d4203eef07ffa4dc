"""The order in which a tier gives up its blocks: greedy-dual by size and frequency, leaves first.

A block is worth ``age + touches * seconds_saved``; every block of a tier is equally large, so size
drops out. The age is the worth of the last victim, so that what was once popular fades. A block
with children in the tier is never given up before them: nobody could reach them without it.

Source: L. Cherkasova, Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy, HP Labs 1998.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.kvkeys import KvKey

# The heap is rebuilt when more than this many entries for each block in it are out of date.
_MAX_STALE = 2


@dataclass(slots=True)
class _Entry:
    parent: KvKey
    depth: int
    touches: int
    priority: float
    ticket: int


class EvictionOrder:
    """Blocks of one tier in the order they go. O(log n) an operation; one thread.

    Args:
        saved_s: Seconds that holding a block of this depth saves when it is asked for; below 0
            counts as 0.
    """

    def __init__(self, saved_s: Callable[[int], float]) -> None:
        self._saved_s = saved_s
        self._entries: dict[KvKey, _Entry] = {}
        # Of every parent named, held here or not: one may come after its children.
        self._children: dict[KvKey, int] = {}
        self._leaves: list[tuple[float, int, KvKey]] = []
        self._ticket = 0
        self._age = 0.0

    def __len__(self) -> int:
        """Return how many blocks it holds."""
        return len(self._entries)

    def __contains__(self, key: KvKey) -> bool:
        """Return whether the block is held."""
        return key in self._entries

    def add(self, key: KvKey, parent: KvKey, depth: int, *, touches: int = 1) -> None:
        """Take a block in; one that is held counts as touched.

        Args:
            key: Of the block.
            parent: Of the block before it.
            depth: Blocks before it in its sequence.
            touches: How often it has been asked for before.
        """
        if key in self._entries:
            self.touch(key)
            return
        self._children[parent] = self._children.get(parent, 0) + 1
        entry = _Entry(parent, depth, max(1, touches), 0.0, 0)
        self._entries[key] = entry
        self._rank(key, entry)

    def touch(self, key: KvKey) -> None:
        """Note that a request asked for a block; nothing happens if it is not held."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.touches += 1
            self._rank(key, entry)

    def remove(self, key: KvKey) -> None:
        """Take a block out, with or without children; nothing happens if it is not held."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        left = self._children[entry.parent] - 1
        if left:
            self._children[entry.parent] = left
            return
        del self._children[entry.parent]
        parent = self._entries.get(entry.parent)
        if parent is not None:
            self._push(entry.parent, parent)

    def pop_victim(self, is_pinned: Callable[[KvKey], bool]) -> KvKey | None:
        """Take out and return the leaf worth least that is not pinned; None if there is none.

        Args:
            is_pinned: Blocks that must stay for now; they keep their place.
        """
        skipped: list[tuple[float, int, KvKey]] = []
        victim = None
        while self._leaves and victim is None:
            item = heapq.heappop(self._leaves)
            if not self._is_current(item):
                continue
            if is_pinned(item[2]):
                skipped.append(item)
            else:
                victim = item[2]
                self._age = max(self._age, item[0])
        for item in skipped:
            heapq.heappush(self._leaves, item)
        if victim is not None:
            self.remove(victim)
        return victim

    def clear(self) -> None:
        """Forget every block and the age."""
        self._entries.clear()
        self._children.clear()
        self._leaves.clear()
        self._age = 0.0

    def _rank(self, key: KvKey, entry: _Entry) -> None:
        entry.priority = self._age + entry.touches * max(0.0, self._saved_s(entry.depth))
        self._ticket += 1
        entry.ticket = self._ticket
        self._push(key, entry)

    def _push(self, key: KvKey, entry: _Entry) -> None:
        if key in self._children:
            return
        heapq.heappush(self._leaves, (entry.priority, entry.ticket, key))
        if len(self._leaves) > 16 + (1 + _MAX_STALE) * len(self._entries):
            self._leaves = [item for item in set(self._leaves) if self._is_current(item)]
            heapq.heapify(self._leaves)

    def _is_current(self, item: tuple[float, int, KvKey]) -> bool:
        entry = self._entries.get(item[2])
        return entry is not None and entry.ticket == item[1] and item[2] not in self._children
