"""What became of blocks that the tiers do not hold: how often asked for, and given up or not."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runner.kvkeys import KvKey

# Each about 100 bytes: 20 MB for 3 million tokens of blocks of 16.
MAX_KEYS = 200_000


class Past:
    """A bounded memory of blocks, the latest ones; engine thread only."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._touches: OrderedDict[KvKey, int] = OrderedDict()
        self._evicted: OrderedDict[KvKey, None] = OrderedDict()

    def touched(self, keys: Iterable[KvKey]) -> None:
        """Note that a request had blocks in its prompt."""
        for key in keys:
            self._touches[key] = self._touches.pop(key, 0) + 1
        while len(self._touches) > self._max_keys:
            self._touches.popitem(last=False)

    def touches(self, key: KvKey) -> int:
        """Return how many requests had a block in their prompt; at least 1: it was computed."""
        return max(1, self._touches.get(key, 0))

    def evicted(self, key: KvKey) -> None:
        """Note that a tier gave a block up for room."""
        self._evicted[key] = None
        self._evicted.move_to_end(key)
        if len(self._evicted) > self._max_keys:
            self._evicted.popitem(last=False)

    def was_evicted(self, key: KvKey) -> bool:
        """Whether a tier once held a block and gave it up."""
        return key in self._evicted

    def clear(self) -> None:
        """Forget everything."""
        self._touches.clear()
        self._evicted.clear()
