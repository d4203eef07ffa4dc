"""Verifies the invariants of a pool's books; see ``blocks.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.kvkeys import block_key
from runner.pool.states import BlockState, require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from runner.pool.blocks import BlockPool
    from runner.pool.states import Content, PoolBooks


def check_pool(
    pool: BlockPool, books: PoolBooks, tables: Iterable[Sequence[int]], loading: Iterable[int]
) -> None:
    """Verify every invariant; O(pool). See ``BlockPool.check``."""
    references = [0] * pool.num_blocks
    for table in tables:
        for block in table:
            references[block] += 1
    require(references == books.references, "references differ from the sequences' tables")
    require(set(loading) == books.loading, "loading blocks differ from the loads under way")
    free = set(books.free)
    require(len(free) == len(books.free), "a block is free twice")
    counts = dict.fromkeys(BlockState, 0)
    for block in range(pool.num_blocks):
        state = pool.state(block)
        counts[state] += 1
        require((block in free) == (state is BlockState.FREE), f"block {block}: free list")
        require((block in books.cached) == (state is BlockState.CACHED), f"block {block}: LRU")
        if block in books.loading:
            is_untouched = not references[block] and not books.pins[block]
            require(is_untouched, f"block {block} is in use while it is loaded")
            require(books.contents[block] is None, f"block {block} is findable before it is loaded")
    pinned = sum(1 for pins, refs in zip(books.pins, references, strict=True) if pins and not refs)
    require(books.num_pinned == pinned, "count of pinned blocks")
    stated = (pool.num_free, pool.num_cached, pool.num_active, pool.num_loading, pool.num_pinned)
    states = (BlockState.FREE, BlockState.CACHED, BlockState.ACTIVE)
    wanted = (*(counts[state] for state in states), counts[BlockState.LOADING], pinned)
    require(stated == wanted, f"states {stated} are not {wanted}")
    _check_keys(books)


def _check_keys(books: PoolBooks) -> None:
    children = [0] * len(books.contents)
    keyed: list[tuple[int, Content]] = [
        (block, content) for block, content in enumerate(books.contents) if content
    ]
    for block, content in keyed:
        require(books.holders.get(content.key) == block, f"block {block}: key held elsewhere")
        key = block_key(content.parent_key, content.tokens)
        require(key == content.key, f"block {block}: key and tokens differ")
        if content.parent_block is not None:
            require(
                books.holders.get(content.parent_key) == content.parent_block,
                f"block {block}: its parent has lost its key",
            )
            children[content.parent_block] += 1
    require(len(keyed) == len(books.holders), "a key without a block")
    for block, content in keyed:
        require(content.children == children[block], f"block {block}: count of children")
