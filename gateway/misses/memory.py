"""The recent prompts of each pool and tenant, bounded in tokens, found by their end or by features.

Used from the event loop only; look-ups and changes are O(features of one prompt).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.misses.known import Known
    from prefix_index.blocks import BlockHash
    from prefix_index.draft import Prompt

# About 20 bytes a token with its text, its ids and its share of a block hash: 40 MB when full.
MAX_TOKENS = 2_000_000
MAX_PROMPTS = 4096
# Holders of a feature that everybody shares; the newest are the likeliest twins.
MAX_HOLDERS = 4
# A long conversation's early messages are not what its next turn is found by.
MAX_FEATURES = 96
# How far behind its end a prompt's predecessor is looked for: past answers and messages of 2,000
# tokens in 5 us. One that is further away is found by its features, behind the request.
MAX_LOOK_BACK = 128


class Entry:
    """One conversation (or one request that nothing followed): its last prompt."""

    __slots__ = ("features", "known", "tail")

    def __init__(self, known: Known, tail: BlockHash) -> None:
        self.known = known
        self.tail = tail
        self.features: deque[int] = deque()


class Memory:
    """Bounded store of prompts.

    Args:
        max_tokens: Tokens of all prompts together.
        max_prompts: Prompts.
    """

    def __init__(self, *, max_tokens: int = MAX_TOKENS, max_prompts: int = MAX_PROMPTS) -> None:
        self._max_tokens = max_tokens
        self._max_prompts = max_prompts
        # Oldest first. The last block that can be a hit names a prompt.
        self._entries: OrderedDict[BlockHash, Entry] = OrderedDict()
        self._holders: dict[int, deque[Entry]] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def extended_by(self, pool: str, tenant: str, prompt: Prompt, num_blocks: int) -> Entry | None:
        """Return the longest remembered prompt that this one begins with, if it is not far.

        Args:
            pool: Where the prompt went.
            tenant: Whose it is; prompts of others are not found.
            prompt: The prompt.
            num_blocks: Leading blocks of it that can be a hit.
        """
        entries, hashes = self._entries, prompt.block_hashes
        for at in range(num_blocks - 1, max(-1, num_blocks - 1 - MAX_LOOK_BACK), -1):
            entry = entries.get(hashes[at])
            if entry is not None:
                return entry if entry.known.scope == (pool, tenant) else None
        return None

    def replace(self, entry: Entry, known: Known, new_features: Sequence[int]) -> None:
        """Let a prompt take the place of the one it extends."""
        del self._entries[entry.tail]
        self.num_tokens -= entry.known.prompt.num_tokens
        entry.known = known
        entry.tail = known.prompt.block_hashes[known.num_blocks - 1]
        self._insert(entry)
        self._register(entry, new_features)
        self._shrink()

    def add(self, known: Known, features: Sequence[int]) -> None:
        """Remember a prompt; one that ends in the same block is replaced."""
        entry = Entry(known, known.prompt.block_hashes[known.num_blocks - 1])
        self._insert(entry)
        self._register(entry, features)
        self._shrink()

    def drop(self, entry: Entry) -> None:
        """Forget a prompt."""
        if self._entries.get(entry.tail) is entry:
            del self._entries[entry.tail]
            self._release(entry)

    def forget(self, is_meant: Callable[[Known], bool]) -> int:
        """Forget prompts for good; return how many."""
        gone = [entry for entry in self._entries.values() if is_meant(entry.known)]
        for entry in gone:
            self.drop(entry)
        return len(gone)

    def near(self, features: Sequence[int], limit: int) -> list[Known]:
        """Return the prompts that share most features, newest first among equals."""
        votes: Counter[int] = Counter()
        found: dict[int, Entry] = {}
        for feature in features:
            for entry in self._holders.get(feature, ()):
                votes[id(entry)] += 1
                found[id(entry)] = entry
        ranked = sorted(found.values(), key=lambda e: votes[id(e)], reverse=True)
        return [entry.known for entry in islice(ranked, limit)]

    def _insert(self, entry: Entry) -> None:
        before = self._entries.pop(entry.tail, None)
        if before is not None:
            self._release(before)
        self._entries[entry.tail] = entry
        self.num_tokens += entry.known.prompt.num_tokens

    def _register(self, entry: Entry, features: Sequence[int]) -> None:
        for feature in features:
            holders = self._holders.get(feature)
            if holders is None:
                holders = self._holders[feature] = deque(maxlen=MAX_HOLDERS)
            if entry not in holders:
                holders.appendleft(entry)
                entry.features.append(feature)
        while len(entry.features) > MAX_FEATURES:
            self._unregister(entry, entry.features.popleft())

    def _release(self, entry: Entry) -> None:
        self.num_tokens -= entry.known.prompt.num_tokens
        for feature in entry.features:
            self._unregister(entry, feature)
        entry.features.clear()

    def _unregister(self, entry: Entry, feature: int) -> None:
        holders = self._holders.get(feature)
        if holders is None:
            return
        if entry in holders:
            holders.remove(entry)
        if not holders:
            del self._holders[feature]

    def _shrink(self) -> None:
        while len(self._entries) > 1 and (
            self.num_tokens > self._max_tokens or len(self._entries) > self._max_prompts
        ):
            _, oldest = self._entries.popitem(last=False)
            self._release(oldest)
