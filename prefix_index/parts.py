"""Workers whose blocks are larger than the index's: their size, and the parts of a block.

One block of such an engine is a whole number of the index's blocks, its *parts*. The engine's name
stands for the last part. The others, of which the engine knows nothing, are named by their own
hash: so they are found from the last one upwards, and engine blocks that begin alike share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from prefix_index.blocks import BlockHash
from prefix_index.events import EngineHash

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prefix_index.index import Index
    from prefix_index.names import Names

# Bounds a walk over parts, whatever a shared index says of parents. Hybrid models inflate their
# blocks to a few thousand tokens.
MAX_PARTS: Final = 4096


class Held(NamedTuple):
    """One block of the index that a worker holds or held."""

    name: EngineHash
    block: BlockHash
    parent: BlockHash


class EngineBlockSize:
    """A worker's block size, learned from what it announces.

    An unfinished block is announced alone and is smaller than a full one, so several blocks in one
    event settle the size, and until then the largest counts.

    Attributes:
        tokens: Tokens per block, 0 before it is known.
        is_certain: Whether it is settled.
    """

    __slots__ = ("is_certain", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.is_certain = False

    def takes(self, tokens: int, num_blocks: int) -> bool:
        """Learn from an event, and say whether it has full blocks of the worker's size."""
        if tokens != self.tokens:
            if self.is_certain or (num_blocks == 1 and tokens < self.tokens):
                return False
            self.tokens = tokens
        self.is_certain = self.is_certain or num_blocks > 1
        return True


def part_names(
    engine_hashes: Sequence[EngineHash], hashes: list[BlockHash], num_parts: int
) -> list[EngineHash]:
    """Return the name of each block.

    Args:
        engine_hashes: The engine's blocks.
        hashes: Our hashes of their parts, ``num_parts`` for each.
        num_parts: At least 1.
    """
    names: list[EngineHash] = [*hashes]
    names[num_parts - 1 :: num_parts] = engine_hashes
    return names


def parts_from(block: BlockHash | None, index: Index, worker: str, names: Names) -> Iterator[Held]:
    """Iterate upwards over the parts of a block, as far as they are held.

    Args:
        block: The one before the last part.
        index: Knows the parents.
        worker: The holder.
        names: Of its blocks.
    """
    for _ in range(MAX_PARTS):
        if block is None or names.get(block) != block:
            return
        parent = index.parent(worker, block)
        if parent is None:
            return
        yield Held(block, block, parent)
        block = parent


def with_parts(
    known: list[BlockHash], num_parts: int, index: Index, worker: str, names: Names
) -> list[BlockHash]:
    """Return each of these last parts behind its others, up to the first one that lacks some."""
    found: list[BlockHash] = []
    for last in known:
        before = index.parent(worker, last)
        parts = [part.block for part in parts_from(before, index, worker, names)]
        if len(parts) != num_parts - 1:
            break
        found += [*reversed(parts), last]
    return found
