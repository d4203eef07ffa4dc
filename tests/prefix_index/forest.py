"""A small forest of chains, and a naive model of who holds what of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from prefix_index import Hit, hash_blocks, root_hash
from prefix_index.index import TIERS, Tier

BLOCK_SIZE = 16
WORKERS = ("w0", "w1", "w2")
ROOTS = (root_hash("m"), root_hash("m", salt="tenant"))


def chain(*ids: int, root: bytes = ROOTS[0]) -> list[bytes]:
    """Return the hashes of a chain of blocks, one id standing for a whole block."""
    return hash_blocks(ids, 1, root)


def tree() -> dict[bytes, bytes]:
    """Return block -> parent of a small forest with branches of several lengths."""
    paths = [
        (ROOTS[0], (1, 2, 3, 4, 5, 6)),
        (ROOTS[0], (1, 2, 3, 7, 8)),
        (ROOTS[0], (1, 2, 9)),
        (ROOTS[0], (10, 11)),
        (ROOTS[1], (1, 2, 3)),
    ]
    parents: dict[bytes, bytes] = {}
    for root, ids in paths:
        blocks = chain(*ids, root=root)
        parents.update(zip(blocks, [root, *blocks], strict=False))
    return parents


PARENTS = tree()
BLOCKS = list(PARENTS)
LEAVES = [block for block in BLOCKS if block not in PARENTS.values()]


def path_to(block: bytes) -> list[bytes]:
    """Return the chain from the first block to this one."""
    path = [block]
    while path[0] in PARENTS and PARENTS[path[0]] in PARENTS:
        path.insert(0, PARENTS[path[0]])
    return path


class Model:
    """Copies per (worker, block, tier), and hits by walking."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[str, bytes, Tier]] = Counter()

    def tiers(self, worker: str, block: bytes) -> list[Tier]:
        return [tier for tier in TIERS if self.copies[worker, block, tier] > 0]

    def packed(self, worker: str, block: bytes) -> int:
        return sum(self.copies[worker, block, tier] << 16 * i for i, tier in enumerate(TIERS))

    def set(self, worker: str, block: bytes, packed: int) -> None:
        for i, tier in enumerate(TIERS):
            self.copies[worker, block, tier] = packed >> 16 * i & 0xFFFF

    def held(self, worker: str) -> set[bytes]:
        return {block for block in BLOCKS if self.tiers(worker, block)}

    def match(self, hashes: list[bytes]) -> dict[str, Hit]:
        hits = {}
        for worker in WORKERS:
            tokens: Counter[str] = Counter()
            for block in hashes:
                tiers = self.tiers(worker, block)
                if not tiers:
                    break
                tokens[tiers[0]] += BLOCK_SIZE
            if tokens:
                hits[worker] = Hit(**tokens)
        return hits

    def forget(self, keep: Callable[[str, bytes], bool]) -> None:
        for worker, block, tier in list(self.copies):
            if not keep(worker, block):
                del self.copies[worker, block, tier]
