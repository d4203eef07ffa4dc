"""Which blocks the requests in flight on one worker occupy, shared blocks counted once.

A prompt's block hashes are chained, so prompts form a tree: equal hashes at one depth mean equal
prefixes. The tree keeps runs of blocks, not blocks, and compares runs by binary search; adding a
prompt of 500 blocks costs a few steps instead of 500 counters. One event loop only, no locks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash


class Run:
    """Blocks ``start`` to ``end`` of a prompt, used by ``count`` requests; a node of the tree."""

    __slots__ = ("children", "count", "end", "hashes", "parent", "start")

    def __init__(
        self, hashes: Sequence[BlockHash], start: int, end: int, parent: Run | None, count: int = 1
    ) -> None:
        self.hashes = hashes
        self.start = start
        self.end = end
        self.parent = parent
        self.count = count
        self.children: dict[BlockHash, Run] = {}


class ActiveBlocks:
    """The distinct full blocks of a set of prompts.

    Attributes:
        num_blocks: How many there are.
    """

    def __init__(self) -> None:
        self._root = Run((), 0, 0, None)
        self.num_blocks = 0

    def common_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of ``hashes`` are among the active ones."""
        node, at = self._root, 0
        while at < len(hashes):
            child = node.children.get(hashes[at])
            if child is None:
                return at
            reached = common_until(child.hashes, hashes, at, min(child.end, len(hashes)))
            if reached < child.end:
                return reached
            node, at = child, reached
        return at

    def add(self, hashes: Sequence[BlockHash]) -> Run:
        """Add one prompt; returns the handle that ``release`` takes. Keeps a reference to it."""
        node, at = self._root, 0
        while at < len(hashes):
            child = node.children.get(hashes[at])
            if child is None:
                leaf = Run(hashes, at, len(hashes), node)
                node.children[hashes[at]] = leaf
                self.num_blocks += len(hashes) - at
                return leaf
            reached = common_until(child.hashes, hashes, at, min(child.end, len(hashes)))
            node = child if reached == child.end else _split(child, node, reached)
            node.count += 1
            at = reached
        return node

    def release(self, leaf: Run) -> None:
        """Take back one ``add``; each handle must be released exactly once."""
        node = leaf
        while (parent := node.parent) is not None:
            node.count -= 1
            if node.count == 0:
                del parent.children[node.hashes[node.start]]
                self.num_blocks -= node.end - node.start
            node = parent


def common_until(
    left: Sequence[BlockHash], right: Sequence[BlockHash], start: int, end: int
) -> int:
    """Return the first index from ``start`` on where the two chains differ, at most ``end``.

    Blocks before ``start`` must be equal. O(log n): a chained hash says all about its ancestors.
    """
    if start < end and left[end - 1] == right[end - 1]:
        return end
    low, high = start, max(start, end - 1)
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _split(child: Run, parent: Run, at: int) -> Run:
    """Cut ``child`` at block ``at``; the lower part keeps its identity, its handles stay valid."""
    upper = Run(child.hashes, child.start, at, parent, child.count)
    upper.children[child.hashes[at]] = child
    parent.children[child.hashes[child.start]] = upper
    child.start = at
    child.parent = upper
    return upper
