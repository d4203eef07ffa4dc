"""The books themselves: states, references, pins, keys. Rules are in ``blocks.py``."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.kvkeys import KvKey


class InvariantError(AssertionError):
    """The pool's books contradict themselves; the message names the block and the rule."""


class BlockState(Enum):
    """See the first invariant of ``blocks.py``."""

    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"
    LOADING = "loading"
    PINNED = "pinned"


class Content:
    """What a keyed block holds."""

    __slots__ = ("children", "depth", "key", "parent_block", "parent_key", "tokens")

    def __init__(
        self, key: KvKey, parent_key: KvKey, parent_block: int | None, tokens: bytes, depth: int
    ) -> None:
        self.key = key
        self.parent_key = parent_key
        self.parent_block = parent_block
        self.tokens = tokens
        self.depth = depth
        self.children = 0


class PoolBooks:
    """Plain state of a pool of ``num_blocks``.

    Attributes:
        free: Popped from the end: the lowest ids first, then the most recently freed.
        references: Sequences per block.
        pins: Leases per block.
        num_pinned: Blocks with pins and without references.
        contents: Of each keyed block.
        holders: Block by key.
        cached: Blocks that are keyed and nobody's, in order of release; a sequence's last block
            comes before its first, so leaves stand before their parents.
        loading: Blocks a transfer thread may be writing.
    """

    __slots__ = (
        "cached",
        "contents",
        "free",
        "holders",
        "loading",
        "num_pinned",
        "pins",
        "references",
    )

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks - 1, -1, -1))
        self.references = [0] * num_blocks
        self.pins = [0] * num_blocks
        self.num_pinned = 0
        self.contents: list[Content | None] = [None] * num_blocks
        self.holders: dict[KvKey, int] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.loading: set[int] = set()


def require(holds: bool, rule: str) -> None:
    """Raise ``InvariantError`` naming the rule unless it holds."""
    if not holds:
        raise InvariantError(rule)
