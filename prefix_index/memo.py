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

# The default bound: 20 million tokens, every prompt that 60 GPUs' worth of KV can hold.
MAX_MEMO_BYTES = 256 * 2**20
# What an entry takes beside its arrays, measured (CPython 3.11): its key, its place in an ordered
# map, the objects' own headers.
TEXT_ENTRY_BYTES = 320
_CHAIN_ENTRY_BYTES = 560
# A token id, and a block hash as an object in a list.
_TOKEN_BYTES = 4
HASH_BYTES = 64

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


class Lru(Generic[_Entry]):
    """Entries bounded by their bytes. Not thread safe by itself.

    Attributes:
        entries: Least recently used first.
        num_bytes: What they take.
        has_forgotten: Whether an entry was ever dropped, or refused because it is too large.
    """

    __slots__ = ("_max_bytes", "_size", "entries", "has_forgotten", "num_bytes")

    def __init__(self, max_bytes: int, size: Callable[[_Entry], int]) -> None:
        self.entries: OrderedDict[Key, _Entry] = OrderedDict()
        self.num_bytes = 0
        self.has_forgotten = False
        self._max_bytes = max_bytes
        self._size = size

    def put(self, key: Key, entry: _Entry) -> None:
        """Add an entry, or refresh one that is there already (equal keys mean equal entries)."""
        if key in self.entries:
            self.entries.move_to_end(key)
            return
        size = self._size(entry)
        if size > self._max_bytes:  # it would push out everything, and then itself
            self.has_forgotten = True
            return
        self.entries[key] = entry
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, oldest = self.entries.popitem(last=False)
            self.num_bytes -= self._size(oldest)
            self.has_forgotten = True

    def get(self, key: Key) -> _Entry | None:
        """Return an entry and refresh it."""
        entry = self.entries.get(key)
        if entry is not None:
            self.entries.move_to_end(key)
        return entry


class SegmentMemo:
    """The two maps, each bounded to half of ``max_bytes``, least recently used entries leave.

    Tokens that both maps share count in both, since either may be the last to hold them.
    """

    def __init__(self, max_bytes: int = MAX_MEMO_BYTES) -> None:
        self._lock = threading.Lock()
        self._chains: Lru[Segment] = Lru(max_bytes // 2, _chain_bytes)
        self._texts: Lru[array[int]] = Lru(max_bytes // 2, _text_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes held in both maps."""
        return self._chains.num_bytes + self._texts.num_bytes

    @property
    def has_forgotten(self) -> bool:
        """Whether text that was once known may be unknown now."""
        return self._chains.has_forgotten

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


def _chain_bytes(segment: Segment) -> int:
    hashes = len(segment.block_hashes) * HASH_BYTES
    return _CHAIN_ENTRY_BYTES + hashes + (len(segment.ids) + len(segment.tail)) * _TOKEN_BYTES


def _text_bytes(ids: array[int]) -> int:
    return TEXT_ENTRY_BYTES + len(ids) * _TOKEN_BYTES
