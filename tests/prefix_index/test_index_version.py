"""Whoever remembers an answer of the index may trust it as long as the version is the same."""

from __future__ import annotations

from random import Random

import pytest

from prefix_index import Hit, Index, Residency, hash_blocks, root_hash
from prefix_index.view_hits import Match

ROOT = root_hash("m")
# Two conversations that begin alike, and a third one.
START = list(range(6))
CHAINS = [hash_blocks(ids, 1, ROOT) for ids in ([*START, 50, 51], [*START, 60], range(90, 97))]
WORKERS = ("a", "b", "c")
TIERS = ("gpu", "cpu", "disk")


def change(index: Index, rng: Random) -> None:
    """Do one thing that a worker's events, another gateway or an answer may cause."""
    worker, chain = rng.choice(WORKERS), rng.choice(CHAINS)
    start = rng.randrange(len(chain))
    part = chain[start : rng.randrange(start, len(chain)) + 1]
    parent = chain[start - 1] if start else ROOT
    tier = rng.choice(TIERS)
    match rng.randrange(8):
        case 0 | 1:
            index.store(worker, part, parent, tier)
        case 2:
            index.store(worker, chain, ROOT)
        case 3:
            index.remove(worker, part, tier)
        case 4:
            index.set_copies(worker, part[0], parent, rng.choice((0, 1, 1 << 16)))
        case 5:
            index.shorten(worker, chain, start)
        case 6:
            index.sweep(rng.randrange(1, 4))
        case _:
            index.clear(worker)


@pytest.mark.parametrize("max_blocks", [1000, 12])
@pytest.mark.parametrize("seed", range(10))
def test_answers_are_the_same_while_the_version_is(seed: int, max_blocks: int) -> None:
    rng, index = Random(seed), Index(1, max_blocks)
    num_remembered = num_asked = 0
    known: list[tuple[int, dict[str, Hit]]] = [(index.version, {}) for _ in CHAINS]
    for _ in range(400):
        if rng.random() < 0.7:
            change(index, rng)
        for at, chain in enumerate(CHAINS):
            version, hits = known[at]
            num_asked += 1
            if version == index.version:
                num_remembered += 1
                assert index.match(chain) == hits
            else:
                known[at] = (index.version, index.match(chain))
    assert num_asked // 10 < num_remembered < num_asked


@pytest.mark.parametrize("max_blocks", [1000, 12])
@pytest.mark.parametrize("seed", range(10))
def test_what_a_worker_sees_it_sees_until_something_is_lost(seed: int, max_blocks: int) -> None:
    rng, index = Random(seed), Index(1, max_blocks)
    seen: set[tuple[str, bytes]] = set()
    losses, num_remembered = index.losses, 0
    for _ in range(400):
        change(index, rng)
        if losses != index.losses:
            losses = index.losses
            seen.clear()
        num_remembered += len(seen)
        assert all(index.sees(worker, block) for worker, block in seen)
        pairs = [(worker, block) for worker in WORKERS for chain in CHAINS for block in chain]
        seen |= {pair for pair in pairs if index.sees(*pair)}
    assert num_remembered


def test_no_version_of_one_index_is_anothers() -> None:
    first, second = Index(1), Index(1)
    seen = {first.version, second.version}
    for number in range(20):
        for index in (first, second):
            index.store("w", hash_blocks([number], 1, ROOT), ROOT)
            assert index.version not in seen
            seen.add(index.version)


def test_a_remembered_answer_says_where_to_look_next() -> None:
    hits = {"a": Hit(gpu=48), "b": Hit(gpu=16, cpu=16), "c": Hit(disk=48)}
    assert Match(hits, 1).lengths(16) == [2, 3]
    assert Match({"a": Hit(gpu=48), "c": Hit(disk=48)}, 1).lengths(16) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_model_sees_what_else_changes_in_its_index(seed: int) -> None:
    """Feedback and bounds take from the index what the model still has; a touch brings it back."""
    rng, index = Random(seed), Index(1, 1000)
    model = Residency(index, "w", 1000)
    for _ in range(200):
        chain = rng.choice(CHAINS)
        model.touch(chain, ROOT)
        assert index.match(chain)["w"].total == len(chain)
        match rng.randrange(4):
            case 0:
                index.shorten("w", chain, rng.randrange(len(chain)))
            case 1:
                index.remove("w", [chain[-1]])
            case 2:
                index.store("other", chain, ROOT)
