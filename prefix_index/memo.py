"""Known prompt segments: what has been tokenized and hashed once is not done again.

Two bounded LRU maps. *Chains* know a segment after all segments before it: its tokens, how many
there are so far, and the block hashes completed in it. *Texts* know a segment's tokens wherever it
stands, so that one changed segment does not cost the tokens of all that follow. Both may be used
from any thread.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from prefix_index.blocks import hash_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prefix_index.blocks import BlockHash

# An entry costs about 600 bytes beside its tokens, as much as this many tokens with their hashes.
_MIN_WEIGHT_TOKENS = 64

Key = bytes


class Segment:
    """One segment of a prompt after all that precede it. Immutable.

    Attributes:
        ids: Tokens of the segment.
        num_tokens: Tokens of the prompt up to the segment's end.
        block_hashes: Hashes of the blocks that end in the segment.
        last_hash: Hash of the last full block so far, or the root.
        tail: Tokens after that block, fewer than a block.
    """

    __slots__ = ("block_hashes", "ids", "last_hash", "num_tokens", "tail")

    def __init__(
        self,
        ids: array[int],
        num_tokens: int,
        block_hashes: list[BlockHash],
        last_hash: BlockHash,
        tail: array[int],
    ) -> None:
        self.ids = ids
        self.num_tokens = num_tokens
        self.block_hashes = block_hashes
        self.last_hash = last_hash
        self.tail = tail

    @classmethod
    def start(cls, root: BlockHash) -> Segment:
        """Return the empty beginning of every prompt with this root."""
        return cls(_NO_IDS, 0, [], root, _NO_IDS)

    def extended(self, ids: array[int], block_size: int) -> Segment:
        """Return the segment that follows this one with these tokens."""
        pending = self.tail + ids
        hashes = hash_blocks(pending, block_size, self.last_hash)
        return Segment(
            ids=ids,
            num_tokens=self.num_tokens + len(ids),
            block_hashes=hashes,
            last_hash=hashes[-1] if hashes else self.last_hash,
            tail=pending[len(hashes) * block_size :],
        )


_NO_IDS: array[int] = array("I")

_Entry = TypeVar("_Entry")


class _Lru(Generic[_Entry]):
    """Entries bounded by their tokens. Not thread safe by itself."""

    __slots__ = ("_max_weight", "_num_tokens", "entries", "weight")

    def __init__(self, max_weight: int, num_tokens: Callable[[_Entry], int]) -> None:
        self.entries: OrderedDict[Key, _Entry] = OrderedDict()
        self.weight = 0
        self._max_weight = max_weight
        self._num_tokens = num_tokens

    def put(self, key: Key, entry: _Entry) -> None:
        """Add an entry, or refresh one that is there already (equal keys mean equal entries)."""
        if key in self.entries:
            self.entries.move_to_end(key)
            return
        self.entries[key] = entry
        self.weight += self._weigh(entry)
        while self.weight > self._max_weight:
            _, oldest = self.entries.popitem(last=False)
            self.weight -= self._weigh(oldest)

    def get(self, key: Key) -> _Entry | None:
        """Return an entry and refresh it."""
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
        return entry

    def _weigh(self, entry: _Entry) -> int:
        return max(self._num_tokens(entry), _MIN_WEIGHT_TOKENS)


class SegmentMemo:
    """The two maps, each bounded to half of ``max_tokens``, least recently used entries leave."""

    def __init__(self, max_tokens: int) -> None:
        self._lock = threading.Lock()
        self._chains: _Lru[Segment] = _Lru(max_tokens // 2, lambda segment: len(segment.ids))
        self._texts: _Lru[array[int]] = _Lru(max_tokens // 2, len)

    @property
    def num_tokens(self) -> int:
        """Tokens held in both maps, small entries counted as ``_MIN_WEIGHT_TOKENS``."""
        return self._chains.weight + self._texts.weight

    def known_chain(self, keys: Sequence[Key]) -> list[Segment]:
        """Return the known segments that lead a prompt, given its chained keys in order."""
        found = []
        with self._lock:
            entries = self._chains.entries
            for key in keys:
                segment = entries.get(key)
                if segment is None:
                    break
                found.append(segment)
            # Last first, so that a prompt's beginning outlives its end.
            for key in reversed(keys[: len(found)]):
                entries.move_to_end(key)
        return found

    def known_texts(self, keys: Sequence[Key]) -> list[array[int] | None]:
        """Return the tokens of each segment that is known by its text alone."""
        with self._lock:
            return [self._texts.get(key) for key in keys]

    def add(
        self, chain_keys: Sequence[Key], segments: Sequence[Segment], text_keys: Sequence[Key]
    ) -> None:
        """Remember consecutive segments of one prompt, by their chain and by their text."""
        with self._lock:
            # Last first, as above.
            for at in range(len(segments) - 1, -1, -1):
                self._chains.put(chain_keys[at], segments[at])
                self._texts.put(text_keys[at], segments[at].ids)
