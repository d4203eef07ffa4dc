"""Hints say where a match looks first, and never what it finds."""

from __future__ import annotations

from random import Random

import pytest

from prefix_index.blocks import hash_blocks, root_hash
from prefix_index.index import Index


@pytest.mark.parametrize("seed", range(20))
def test_hints_change_no_match(seed: int) -> None:
    rng = Random(seed)
    index, root = Index(1), root_hash("m")
    hashes = hash_blocks(range(rng.randrange(1, 60)), 1, root)
    for worker in range(rng.randrange(1, 9)):
        held = hashes[: rng.choice((0, 1, len(hashes) // 2, len(hashes) - 1, len(hashes)))]
        index.store(f"w{worker}", held, root, tier=rng.choice(("gpu", "cpu")))
    found = index.match(hashes)

    right = sorted({hit.total for hit in found.values()})
    assert index.match(hashes, right) == found
    for _ in range(50):
        wrong = sorted(rng.choices(range(80), k=rng.randrange(6)))
        assert index.match(hashes, wrong) == found


def test_the_right_hints_save_the_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    index, root = Index(1), root_hash("m")
    hashes = hash_blocks(range(2000), 1, root)
    for worker, length in (("a", 2000), ("b", 1234), ("c", 400)):
        index.store(worker, hashes[:length], root)
    blocks = index._view.blocks
    asked: list[bytes] = []
    find = type(blocks).find

    def counting(self: object, block: bytes) -> int:
        asked.append(block)
        return find(blocks, block)

    monkeypatch.setattr(type(blocks), "find", counting)
    index.match(hashes)
    bisected, asked = len(asked), []
    index.match(hashes, [400, 1234, 2000])
    assert len(asked) == 6 < bisected // 3
