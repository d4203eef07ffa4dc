"""How old the block is that a worker would evict next: our own view of its LRU order.

Engines do not tell the order. This mirror keeps the prompts routed to one worker at a granularity
of some 512 tokens, and forgets entries lazily when the index says that they are gone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prefix_index.blocks import BlockHash

# Tokens between two mirrored blocks: the granularity the eviction term was simulated at.
GRAIN_TOKENS = 512
# Bound for workers whose capacity is unknown or whose index is never asked: 33M tokens.
MAX_ENTRIES = 65_536


class LruMirror:
    """Routed blocks of one worker, least recently used first; one event loop only."""

    def __init__(self, block_size: int) -> None:
        self._stride = max(1, GRAIN_TOKENS // block_size)
        self._last_use_s: OrderedDict[BlockHash, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last_use_s)

    def touch(self, hashes: Sequence[BlockHash], now_s: float) -> None:
        """Note a prompt routed to the worker. The deepest block is the first to go later."""
        if not hashes:
            return
        used = self._last_use_s
        for block in (hashes[-1], *hashes[self._stride - 1 :: self._stride][::-1]):
            used[block] = now_s
            used.move_to_end(block)
        while len(used) > MAX_ENTRIES:
            used.popitem(last=False)

    def oldest_age_s(self, now_s: float, is_held: Callable[[BlockHash], bool]) -> float:
        """Return the age of the least recently used block that is still held, else 0.

        Drops the entries before it; amortised O(1) a touch.
        """
        used = self._last_use_s
        while used:
            block = next(iter(used))
            if is_held(block):
                return max(0.0, now_s - used[block])
            del used[block]
        return 0.0

    def clear(self) -> None:
        """Forget everything: the worker restarted or its cache was reset."""
        self._last_use_s.clear()
