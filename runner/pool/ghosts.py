"""What has been given up lately: tells an evicted prefix from one never seen."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.kvkeys import KvKey


class Ghosts:
    """The last ``capacity`` evicted keys."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[KvKey, None] = OrderedDict()

    def __contains__(self, key: KvKey) -> bool:
        """Whether a key was evicted and has not come back since."""
        return key in self._keys

    def add(self, key: KvKey) -> None:
        """Note an eviction; the oldest one is forgotten where there are too many."""
        self._keys[key] = None
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def discard(self, key: KvKey) -> None:
        """Note that a key is held again."""
        self._keys.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._keys.clear()
