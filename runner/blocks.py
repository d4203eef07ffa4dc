"""Which block of the KV pool holds what: references, keys, reuse, eviction, events.

Bookkeeping only, no KV bytes. Called from the engine thread alone. Invariants, all verified by
``check``:

1. A block is FREE (nobody's, no content worth keeping), ACTIVE (referenced) or CACHED (not
   referenced, its key known); the counts add up to the pool.
2. A key is given to a full block whose step has run, and only if its parent has one.
3. Key -> block and block -> key change together, and a block that changes hands has announced
   BlockRemoved before it is handed out.
4. A referenced block is never evicted, nor is one that a keyed child follows (leaf first).
5. Two sequences that computed the same block: the first keeps the key, the other's stays private.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import TYPE_CHECKING

from prefix_index.events import AllBlocksCleared, BlockRemoved, BlockStored
from runner.kvkeys import block_key, event_hash, unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prefix_index.events import Event
    from runner.kvkeys import BlockChain, KvKey

# The device pool is "GPU" in events whatever the device, as vLLM has it on CPU too.
MEDIUM = "GPU"

# One attention group, full attention: what an index needs to know to use the hashes.
_GROUP = 0
_SPEC_KIND = "full_attention"


class InvariantError(AssertionError):
    """The pool's books contradict themselves; the message names the block and the rule."""


class BlockState(Enum):
    """See the module's first invariant."""

    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"


class _Content:
    """What a keyed block holds."""

    __slots__ = ("children", "key", "parent_block", "parent_key", "tokens")

    def __init__(
        self, key: KvKey, parent_key: KvKey, parent_block: int | None, tokens: bytes
    ) -> None:
        self.key = key
        self.parent_key = parent_key
        self.parent_block = parent_block
        self.tokens = tokens
        self.children = 0


class BlockPool:
    """Hands out blocks, remembers what they hold, and takes back the least recently used.

    Attributes:
        num_blocks: Size of the pool.
        block_size: Tokens per block.
        evictions_total: Keyed blocks given up for room.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions_total = 0
        # Popped from the end: the lowest ids first, then the most recently freed.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._contents: list[_Content | None] = [None] * num_blocks
        self._holders: dict[KvKey, int] = {}
        # Blocks nobody references, in order of release; a sequence's last block comes before its
        # first, so leaves stand before their parents.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._events: list[Event] = []

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks kept for reuse, referenced by nobody."""
        return len(self._cached)

    @property
    def num_active(self) -> int:
        """Blocks referenced by sequences."""
        return self.num_blocks - len(self._free) - len(self._cached)

    def state(self, block: int) -> BlockState:
        """Return a block's state."""
        if self._references[block]:
            return BlockState.ACTIVE
        return BlockState.FREE if self._contents[block] is None else BlockState.CACHED

    def is_shared(self, block: int) -> bool:
        """Whether more than one sequence references the block, so that nobody may write it."""
        return self._references[block] > 1

    def find(self, chain: BlockChain, max_blocks: int) -> list[int]:
        """Return the blocks holding the longest known beginning of ``chain``; takes no reference.

        Token ids are compared too: equal keys with other tokens are a miss.
        """
        found: list[int] = []
        for key, tokens in zip(chain.keys[:max_blocks], chain.tokens, strict=False):
            block = self._holders.get(key)
            if block is None:
                break
            if self._content(block).tokens != tokens:
                break
            found.append(block)
        return found

    def take(self, blocks: Iterable[int]) -> None:
        """Reference blocks that are keyed or already referenced."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Return ``count`` writable blocks, evicting as needed; None if there are not as many.

        Mutates: evicts cached blocks, leaf first and least recently used first.
        """
        while len(self._free) < count:
            if not self._evict_one():
                return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _content(self, block: int) -> _Content:
        content = self._contents[block]
        if content is None:
            raise InvariantError(f"block {block} has no content")
        return content

    def _evict_one(self) -> bool:
        for _ in range(len(self._cached)):
            block = next(iter(self._cached))
            content = self._content(block)
            if content.children:
                # Its child is in use by a sequence with a private copy of this block: as good
                # as used itself.
                self._cached.move_to_end(block)
                continue
            self._forget(block, content)
            self._free.append(block)
            self.evictions_total += 1
            return True
        return False

    def _forget(self, block: int, content: _Content) -> None:
        del self._cached[block]
        del self._holders[content.key]
        self._contents[block] = None
        if content.parent_block is not None:
            self._content(content.parent_block).children -= 1
        self._events.append(
            BlockRemoved(block_hashes=[event_hash(content.key)], medium=MEDIUM, group_idx=_GROUP)
        )

    def release(self, blocks: Sequence[int], chain: BlockChain) -> None:
        """Give back one reference of each block of a sequence.

        Args:
            blocks: Its block table, first block first.
            chain: Its keys: where another block holds the same content, that one counts as used.
        """
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            self._references[block] -= 1
            if not self._references[block]:
                if self._contents[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None
            if index < len(chain.keys):
                holder = self._holders.get(chain.keys[index])
                if holder is not None and holder in self._cached:
                    self._cached.move_to_end(holder)

    def replace_last(self, blocks: list[int], private: int) -> None:
        """Swap the shared last block of a table for a private copy; the others keep it."""
        _require(self.is_shared(blocks[-1]), f"block {blocks[-1]} is not shared")
        self._references[blocks[-1]] -= 1
        blocks[-1] = private

    def commit(self, blocks: Sequence[int], chain: BlockChain, start: int, end: int) -> None:
        """Make blocks ``start`` to ``end`` of a sequence findable, and announce them.

        Their step must have run. Blocks another sequence committed first stay private. Where an
        ancestor has been evicted meanwhile, the sequence's own copy of it is made findable first.
        """
        while start and chain.keys[start - 1] not in self._holders:
            start -= 1
        new: list[int] = []
        for index in range(start, end):
            if chain.keys[index] in self._holders:
                self._announce(chain, new)
                new = []
            else:
                self._give_key(blocks[index], chain, index)
                new.append(index)
        self._announce(chain, new)

    def _give_key(self, block: int, chain: BlockChain, index: int) -> None:
        _require(self._references[block] > 0, f"block {block} is nobody's, yet gets a key")
        _require(self._contents[block] is None, f"block {block} has a key already")
        parent_key = chain.parent(index)
        parent_block = self._holders[parent_key] if index else None
        if parent_block is not None:
            self._content(parent_block).children += 1
        key = chain.keys[index]
        self._contents[block] = _Content(key, parent_key, parent_block, chain.tokens[index])
        self._holders[key] = block

    def _announce(self, chain: BlockChain, indexes: Sequence[int]) -> None:
        """Announce neighbouring blocks that have just got their keys."""
        if not indexes:
            return
        first, last = indexes[0], indexes[-1] + 1
        # As vLLM orders them: the adapter with every block, then the salt with the first one.
        number, name = chain.adapter or (None, None)
        adapter = [name] if name is not None else []
        extra_keys: list[list[str] | None] = [adapter or None] * len(indexes)
        if chain.salt and not first:
            extra_keys[0] = [*adapter, chain.salt]
        self._events.append(
            BlockStored(
                block_hashes=[event_hash(key) for key in chain.keys[first:last]],
                parent_block_hash=event_hash(chain.keys[first - 1]) if first else None,
                token_ids=unpack_tokens(b"".join(chain.tokens[first:last])),
                block_size=self.block_size,
                medium=MEDIUM,
                lora_id=number,
                lora_name=name,
                extra_keys=extra_keys,
                group_idx=_GROUP,
                kv_cache_spec_kind=_SPEC_KIND,
            )
        )

    def clear(self) -> bool:
        """Forget all cached blocks; refused (False) while any block is referenced."""
        if self.num_active:
            return False
        self.forget_all()
        return True

    def forget_all(self) -> None:
        """Make every block FREE, whoever references it: for a pool whose books are not sound."""
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._references = [0] * self.num_blocks
        self._contents = [None] * self.num_blocks
        self._holders.clear()
        self._cached.clear()
        self._events.append(AllBlocksCleared())

    def drain_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cached_hashes(self) -> list[int]:
        """Return the event hash of every keyed block: what an index of the events must hold."""
        return [event_hash(key) for key in self._holders]

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify every invariant; O(pool).

        Args:
            tables: The block tables of all sequences: they are the only references.

        Raises:
            InvariantError: If one is broken.
        """
        references = [0] * self.num_blocks
        for table in tables:
            for block in table:
                references[block] += 1
        _require(references == self._references, "references differ from the sequences' tables")
        free = set(self._free)
        _require(len(free) == len(self._free), "a block is free twice")
        for block in range(self.num_blocks):
            state = self.state(block)
            _require((block in free) == (state is BlockState.FREE), f"block {block}: free list")
            _require((block in self._cached) == (state is BlockState.CACHED), f"block {block}: LRU")
        self._check_keys()

    def _check_keys(self) -> None:
        children = [0] * self.num_blocks
        keyed = [(block, content) for block, content in enumerate(self._contents) if content]
        for block, content in keyed:
            _require(self._holders.get(content.key) == block, f"block {block}: key held elsewhere")
            key = block_key(content.parent_key, content.tokens)
            _require(key == content.key, f"block {block}: key and tokens differ")
            if content.parent_block is not None:
                _require(
                    self._holders.get(content.parent_key) == content.parent_block,
                    f"block {block}: its parent has lost its key",
                )
                children[content.parent_block] += 1
        _require(len(keyed) == len(self._holders), "a key without a block")
        for block, content in keyed:
            _require(content.children == children[block], f"block {block}: count of children")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(rule)
