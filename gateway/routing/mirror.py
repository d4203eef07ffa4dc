"""How old the block is that a worker would evict next: our own view of its LRU order.

Engines do not tell the order. This mirror keeps the prompts routed to one worker at a granularity
of some 512 tokens, and forgets entries lazily when the index says that they are gone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prefix_index.blocks import BlockHash

# Tokens between two mirrored blocks: the granularity the eviction term was simulated at.
GRAIN_TOKENS: Final = 512
# How long the oldest block is believed to be still there: nothing against how its worth fades.
CHECK_S: Final = 0.25
# A prompt that was touched so shortly before is as recent as it will be.
FRESH_S: Final = 0.5
# Bound for workers whose capacity is unknown or whose index is never asked: 33M tokens.
MAX_ENTRIES: Final = 65_536


class LruMirror:
    """Routed blocks of one worker, least recently used first; one event loop only."""

    def __init__(self, block_size: int) -> None:
        self._stride = max(1, GRAIN_TOKENS // block_size)
        self._last_use_s: OrderedDict[BlockHash, float] = OrderedDict()
        # Last use of the oldest block, and until when that is believed.
        self._oldest_s = 0.0
        self._believed_until_s = float("-inf")

    def __len__(self) -> int:
        return len(self._last_use_s)

    def touch(self, hashes: Sequence[BlockHash], now_s: float) -> None:
        """Note a prompt routed to the worker. The deepest block is the first to go later."""
        used = self._last_use_s
        if not hashes or now_s - used.get(hashes[-1], float("-inf")) < FRESH_S:
            return
        self._believed_until_s = float("-inf")
        for block in (hashes[-1], *hashes[self._stride - 1 :: self._stride][::-1]):
            used[block] = now_s
            used.move_to_end(block)
        while len(used) > MAX_ENTRIES:
            used.popitem(last=False)

    def oldest_age_s(self, now_s: float, is_held: Callable[[BlockHash], bool]) -> float:
        """Return the age of the least recently used block that is still held, else 0.

        Drops the entries before it; amortised O(1) a touch. Whether it is held is looked up again
        after ``CHECK_S`` or a touch.
        """
        if now_s >= self._believed_until_s:
            self._oldest_s = self._oldest_held_s(now_s, is_held)
            self._believed_until_s = now_s + CHECK_S
        return max(0.0, now_s - self._oldest_s)

    def _oldest_held_s(self, now_s: float, is_held: Callable[[BlockHash], bool]) -> float:
        used = self._last_use_s
        while used:
            block = next(iter(used))
            if is_held(block):
                return used[block]
            del used[block]
        return now_s

    def clear(self) -> None:
        """Forget everything: the worker restarted or its cache was reset."""
        self._last_use_s.clear()
        self._believed_until_s = float("-inf")
