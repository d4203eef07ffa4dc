"""Which block of the KV pool holds what: references, pins, keys, reuse, eviction, events.

Bookkeeping only, no KV bytes. Called from the engine thread alone. Invariants, all verified by
``check``:

1. A block is FREE (nobody's, no content worth keeping), ACTIVE (referenced), CACHED (not
   referenced, its key known), LOADING (a transfer thread may be writing it) or PINNED (not
   referenced, but a lease reads it); the counts add up to the pool.
2. A key is given to a full block whose step has run, or whose bytes were loaded and verified, and
   only if its parent has one.
3. Key -> block and block -> key change together, and a block that changes hands has announced
   BlockRemoved before it is handed out.
4. A referenced or pinned block is never evicted, nor is one that a keyed child follows (leaf
   first).
5. Two sequences that computed the same block: the first keeps the key, the other's stays private.
6. A LOADING block is in no table, has no key and no pin, and leaves that state only when its
   transfer has ended, whatever became of the request or of these books.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefix_index.events import AllBlocksCleared
from runner.kvkeys import event_hash
from runner.pool.check import check_pool
from runner.pool.events import removed_event, stored_event
from runner.pool.ghosts import Ghosts
from runner.pool.states import BlockState, Content, InvariantError, PoolBooks, require
from runner.tiers.types import BlockRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prefix_index.events import Event
    from runner.kvkeys import BlockChain, KvKey

# The device pool is "GPU" in events whatever the device, as vLLM has it on CPU too.
MEDIUM = "GPU"

# How many pools of evicted keys are remembered, to tell "evicted" from "never seen": a key costs
# about 100 bytes, a block a thousand times that.
_GHOST_POOLS = 4


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
        self._books = PoolBooks(num_blocks)
        self._ghosts = Ghosts(_GHOST_POOLS * num_blocks)
        self._events: list[Event] = []

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._books.free)

    @property
    def num_cached(self) -> int:
        """Blocks kept for reuse, referenced by nobody."""
        return len(self._books.cached)

    @property
    def num_loading(self) -> int:
        """Blocks a transfer may be writing."""
        return len(self._books.loading)

    @property
    def num_pinned(self) -> int:
        """Blocks referenced by nobody that a lease keeps."""
        return self._books.num_pinned

    @property
    def num_active(self) -> int:
        """Blocks referenced by sequences."""
        books = self._books
        idle = len(books.free) + len(books.cached) + len(books.loading) + books.num_pinned
        return self.num_blocks - idle

    def state(self, block: int) -> BlockState:
        """Return a block's state."""
        books = self._books
        if books.references[block]:
            return BlockState.ACTIVE
        if books.pins[block]:
            return BlockState.PINNED
        if block in books.loading:
            return BlockState.LOADING
        return BlockState.FREE if books.contents[block] is None else BlockState.CACHED

    def is_shared(self, block: int) -> bool:
        """Whether more than one sequence references the block, so that nobody may write it."""
        return self._books.references[block] > 1

    def find(self, chain: BlockChain, max_blocks: int) -> list[int]:
        """Return the blocks holding the longest known beginning of ``chain``; takes no reference.

        Token ids are compared too: equal keys with other tokens are a miss.
        """
        found: list[int] = []
        for key, tokens in zip(chain.keys[:max_blocks], chain.tokens, strict=False):
            block = self.block_of(key, tokens)
            if block is None:
                break
            found.append(block)
        return found

    def block_of(self, key: KvKey, tokens: bytes | None = None) -> int | None:
        """Return the block that holds a key, if its packed tokens are those given; takes nothing.

        Args:
            key: Which.
            tokens: None where the asker has only keys (another runner: it compares them itself).
        """
        block = self._books.holders.get(key)
        if block is None or tokens not in (None, self._content(block).tokens):
            return None
        return block

    def record_of(self, block: int) -> BlockRecord:
        """Return the identity of a keyed block."""
        content = self._content(block)
        return BlockRecord(content.key, content.parent_key, content.tokens, content.depth)

    def was_evicted(self, key: KvKey) -> bool:
        """Whether a key was held and given up lately."""
        return key in self._ghosts

    def take(self, blocks: Iterable[int]) -> None:
        """Reference blocks that are keyed or already referenced."""
        books = self._books
        for block in blocks:
            if not books.references[block]:
                if books.pins[block]:
                    books.num_pinned -= 1
                else:
                    del books.cached[block]
            books.references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Return ``count`` writable blocks, evicting as needed; None if there are not as many.

        Mutates: evicts cached blocks, leaf first and least recently used first.
        """
        blocks = self._obtain(count)
        for block in blocks or ():
            self._books.references[block] = 1
        return blocks

    def _obtain(self, count: int) -> list[int] | None:
        free = self._books.free
        while len(free) < count:
            if not self._evict_one():
                return None
        return [free.pop() for _ in range(count)]

    def reserve_loading(self, count: int) -> list[int] | None:
        """Return ``count`` blocks for a transfer to write, as ``allocate``."""
        blocks = self._obtain(count)
        self._books.loading.update(blocks or ())
        return blocks

    def take_loaded(self, blocks: Iterable[int]) -> None:
        """Reference blocks whose transfer has ended, as freshly allocated ones."""
        for block in blocks:
            self._books.loading.remove(block)
            self._books.references[block] = 1

    def release_loading(self, blocks: Iterable[int]) -> None:
        """Free blocks whose transfer has ended and that nobody wants any more."""
        for block in blocks:
            self._books.loading.remove(block)
            self._books.free.append(block)

    def pin(self, block: int) -> None:
        """Keep a keyed block from reuse until ``unpin``, whoever releases it; pins add up."""
        books = self._books
        self._content(block)
        if not books.references[block] and not books.pins[block]:
            del books.cached[block]
            books.num_pinned += 1
        books.pins[block] += 1

    def unpin(self, block: int) -> None:
        """Undo one ``pin``; a block nobody references is cached again, or free if forgotten."""
        books = self._books
        require(books.pins[block] > 0, f"block {block} is not pinned")
        books.pins[block] -= 1
        if books.pins[block] or books.references[block]:
            return
        books.num_pinned -= 1
        self._retire_block(block)

    def _retire_block(self, block: int) -> None:
        """Put a block that nobody references or pins where it belongs."""
        if self._books.contents[block] is None:
            self._books.free.append(block)
        else:
            self._books.cached[block] = None

    def _content(self, block: int) -> Content:
        content = self._books.contents[block]
        if content is None:
            raise InvariantError(f"block {block} has no content")
        return content

    def _evict_one(self) -> bool:
        cached = self._books.cached
        for _ in range(len(cached)):
            block = next(iter(cached))
            content = self._content(block)
            if content.children:
                # Its child is in use by a sequence with a private copy of this block, or pinned:
                # as good as used itself.
                cached.move_to_end(block)
                continue
            self._forget(block, content)
            self._books.free.append(block)
            self.evictions_total += 1
            return True
        return False

    def _forget(self, block: int, content: Content) -> None:
        books = self._books
        del books.cached[block]
        del books.holders[content.key]
        books.contents[block] = None
        if content.parent_block is not None:
            self._content(content.parent_block).children -= 1
        self._ghosts.add(content.key)
        self._events.append(removed_event(content.key, medium=MEDIUM))

    def release(self, blocks: Sequence[int], chain: BlockChain) -> None:
        """Give back one reference of each block of a sequence.

        Args:
            blocks: Its block table, first block first.
            chain: Its keys: where another block holds the same content, that one counts as used.
        """
        books = self._books
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            books.references[block] -= 1
            if not books.references[block]:
                if books.pins[block]:
                    books.num_pinned += 1
                else:
                    self._retire_block(block)
            if index < len(chain.keys):
                holder = books.holders.get(chain.keys[index])
                if holder is not None and holder in books.cached:
                    books.cached.move_to_end(holder)

    def replace_last(self, blocks: list[int], private: int) -> None:
        """Swap the shared last block of a table for a private copy; the others keep it."""
        require(self.is_shared(blocks[-1]), f"block {blocks[-1]} is not shared")
        self._books.references[blocks[-1]] -= 1
        blocks[-1] = private

    def commit(self, blocks: Sequence[int], chain: BlockChain, start: int, end: int) -> list[int]:
        """Make blocks ``start`` to ``end`` of a sequence findable, and announce them.

        Their step must have run. Blocks another sequence committed first stay private. Where an
        ancestor has been evicted meanwhile, the sequence's own copy of it is made findable first.

        Returns:
            Indexes of the blocks that got their keys now.
        """
        holders = self._books.holders
        while start and chain.keys[start - 1] not in holders:
            start -= 1
        given: list[int] = []
        for index in range(start, end):
            if chain.keys[index] not in holders:
                self._give_key(blocks[index], chain, index)
                given.append(index)
        self._announce(chain, given)
        return given

    def _give_key(self, block: int, chain: BlockChain, index: int) -> None:
        books = self._books
        require(books.references[block] > 0, f"block {block} is nobody's, yet gets a key")
        require(books.contents[block] is None, f"block {block} has a key already")
        parent_key = chain.parent(index)
        parent_block = books.holders[parent_key] if index else None
        if parent_block is not None:
            self._content(parent_block).children += 1
        key, tokens = chain.keys[index], chain.tokens[index]
        books.contents[block] = Content(key, parent_key, parent_block, tokens, index)
        books.holders[key] = block
        self._ghosts.discard(key)

    def _announce(self, chain: BlockChain, indexes: Sequence[int]) -> None:
        """Announce blocks that have just got their keys, neighbours in one event."""
        first = 0
        for at in range(1, len(indexes) + 1):
            if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
                start, end = indexes[first], indexes[at - 1] + 1
                size = self.block_size
                self._events.append(stored_event(chain, start, end, block_size=size, medium=MEDIUM))
                first = at

    def clear(self) -> bool:
        """Forget all cached blocks; refused (False) while any block is referenced."""
        if self.num_active:
            return False
        self.forget_all()
        return True

    def forget_all(self) -> None:
        """Forget every key and reference: for a pool whose books are not sound.

        Blocks that a transfer reads or writes stay out of use until it has ended.
        """
        old, self._books = self._books, PoolBooks(self.num_blocks)
        books = self._books
        books.loading, books.pins = old.loading, old.pins
        busy = {block for block, pins in enumerate(old.pins) if pins}
        books.num_pinned = len(busy)
        busy |= old.loading
        books.free = [block for block in books.free if block not in busy]
        self._ghosts.clear()
        self._events.append(AllBlocksCleared())

    def drain_events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def cached_hashes(self) -> list[int]:
        """Return the event hash of every keyed block: what an index of the events must hold."""
        return [event_hash(key) for key in self._books.holders]

    def check(self, tables: Iterable[Sequence[int]], loading: Iterable[int] = ()) -> None:
        """Verify every invariant; O(pool).

        Args:
            tables: The block tables of all sequences: they are the only references.
            loading: Blocks of all loads that have not ended.

        Raises:
            InvariantError: If one is broken.
        """
        check_pool(self, self._books, tables, loading)
