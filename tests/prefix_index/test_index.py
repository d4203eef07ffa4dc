"""The index against a model that walks: same hits, same counts, same bounds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_index import Hit, Index, root_hash
from prefix_index.holdings import SHIFT
from prefix_index.index import TIERS, Tier
from prefix_index.view_blocks import Blocks
from tests.prefix_index.forest import (
    BLOCK_SIZE,
    BLOCKS,
    LEAVES,
    PARENTS,
    ROOTS,
    WORKERS,
    Model,
    chain,
    path_to,
)

workers = st.sampled_from(WORKERS)
blocks = st.sampled_from(BLOCKS)
tiers = st.sampled_from(TIERS)
stores = st.tuples(st.just("store"), workers, blocks, st.integers(1, 6), tiers)
removes = st.tuples(st.just("remove"), workers, blocks, st.just(1), tiers)
clears = st.tuples(st.just("clear"), workers, blocks, st.just(0), tiers)
shortens = st.tuples(st.just("shorten"), workers, blocks, st.integers(0, 6), tiers)
operations = st.lists(st.one_of(stores, stores, removes, removes, shortens, clears), max_size=60)
Operation = tuple[str, str, bytes, int, Tier]


def apply(index: Index, model: Model, operation: Operation) -> None:
    kind, worker, block, number, tier = operation
    path = path_to(block)
    if kind == "store":
        stored = path[-number:]
        index.store(worker, stored, PARENTS[stored[0]], tier)
        model.copies.update((worker, each, tier) for each in stored)
    elif kind == "remove":
        index.remove(worker, [block], tier)
        model.copies[worker, block, tier] = max(model.copies[worker, block, tier] - 1, 0)
    elif kind == "shorten":
        index.shorten(worker, path, number)
        cut = set(path[max(number, 1) :])
        model.forget(lambda who, which: who != worker or which not in cut)
    else:
        index.clear(worker)
        model.forget(lambda who, which: who != worker)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_bisection_finds_what_a_walk_finds_after_any_history(history: list[Operation]) -> None:
    index, model = Index(BLOCK_SIZE), Model()
    for operation in history:
        apply(index, model, operation)

        for leaf in LEAVES:
            assert index.match(path_to(leaf)) == model.match(path_to(leaf))


@settings(max_examples=200, deadline=None)
@given(operations)
def test_counts_are_those_of_a_multiset(history: list[Operation]) -> None:
    index, model = Index(BLOCK_SIZE), Model()
    for operation in history:
        apply(index, model, operation)

    held = {(worker, block) for (worker, block, _), count in model.copies.items() if count > 0}
    assert index.num_blocks == len(held)
    for worker in WORKERS:
        expected = Counter(tier for block in BLOCKS for tier in model.tiers(worker, block))
        assert index.blocks_by_tier(worker) == {tier: expected[tier] for tier in TIERS}
        assert all(index.held_blocks(worker, tier) == expected[tier] for tier in TIERS)
        for block in BLOCKS:
            for tier in TIERS:
                held_here = model.copies[worker, block, tier] > 0
                assert index.holds(worker, block, tier) == held_here


@settings(max_examples=200, deadline=None)
@given(operations)
def test_taking_all_copies_back_leaves_nothing(history: list[Operation]) -> None:
    index, model = Index(BLOCK_SIZE), Model()
    for operation in history:
        apply(index, model, operation)
    for (worker, block, tier), count in model.copies.items():
        for _ in range(count):
            index.remove(worker, [block], tier)

    assert index.num_blocks == 0
    while index.sweep(10):
        pass
    assert len(index._view.blocks) == 0
    assert len(index._view.states) == 2  # of nobody's blocks and of roots
    for holder in index._workers.values():
        assert holder.num_blocks == holder.num_hidden == holder.num_below == 0


@settings(max_examples=200, deadline=None)
@given(operations, st.integers(1, 12))
def test_the_bound_holds_and_eviction_never_leaves_children_that_are_credited(
    history: list[Operation], max_blocks: int
) -> None:
    index = Index(BLOCK_SIZE, max_blocks)
    for operation in history:
        apply(index, Model(), operation)

        assert index.num_blocks <= max_blocks
        for leaf in LEAVES:
            path = path_to(leaf)
            for worker in WORKERS:
                walked = 0
                while walked < len(path) and index.holds(worker, path[walked]):
                    walked += 1
                hit = index.match(path).get(worker, Hit())
                assert hit.total == walked * BLOCK_SIZE


def test_the_least_recently_stored_leaves_of_the_fullest_worker_go_first() -> None:
    index = Index(BLOCK_SIZE, max_blocks=6)
    old, new = chain(1, 2, 3), chain(4, 5, 6)
    other = chain(7)
    index.store("other", other, ROOTS[0])
    index.store("w", old, ROOTS[0])
    index.store("w", new, ROOTS[0])

    assert index.match(old) == {"w": Hit(gpu=2 * BLOCK_SIZE)}
    assert index.match(new) == {"w": Hit(gpu=3 * BLOCK_SIZE)}
    assert index.match(other) == {"other": Hit(gpu=BLOCK_SIZE)}


def test_a_chain_longer_than_the_bound_keeps_its_beginning() -> None:
    index = Index(BLOCK_SIZE, max_blocks=4)
    blocks = chain(*range(10))
    index.store("w", blocks, ROOTS[0])

    assert index.match(blocks) == {"w": Hit(gpu=4 * BLOCK_SIZE)}


def test_descendants_are_hidden_while_their_parent_is_away_and_return_with_it() -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(1, 2, 3, 4)
    index.store("w", blocks, ROOTS[0])
    index.remove("w", [blocks[1]])

    assert index.match(blocks) == {"w": Hit(gpu=BLOCK_SIZE)}

    index.store("w", [blocks[1]], blocks[0])

    assert index.match(blocks) == {"w": Hit(gpu=4 * BLOCK_SIZE)}


def test_a_chain_that_starts_in_the_middle_is_no_hit_until_its_beginning_comes() -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(1, 2, 3, 4)
    index.store("w", blocks[2:], blocks[1])

    assert index.match(blocks) == {}
    assert index.match(blocks[2:]) == {}

    index.store("w", blocks[:2], ROOTS[0])

    assert index.match(blocks) == {"w": Hit(gpu=4 * BLOCK_SIZE)}


def test_a_block_stored_twice_survives_one_removal_and_a_third_is_ignored() -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(1, 2, 3)
    index.store("w", blocks, ROOTS[0])
    index.store("w", blocks, ROOTS[0])
    hits = []
    for _ in range(3):
        index.remove("w", [blocks[2]])
        hits.append(index.match(blocks)["w"].total)

    assert hits == [3 * BLOCK_SIZE, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE]

    index.store("w", [blocks[2]], blocks[1])

    assert index.match(blocks)["w"].total == 3 * BLOCK_SIZE


def test_a_block_that_left_the_gpu_is_a_hit_of_the_tier_that_still_has_it() -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(1, 2, 3, 4)
    index.store("w", blocks, ROOTS[0])
    index.store("w", blocks[1:3], blocks[0], "cpu")
    index.store("w", blocks[2:], blocks[1], "disk")
    index.remove("w", blocks[1:], "gpu")

    expected = Hit(gpu=BLOCK_SIZE, cpu=2 * BLOCK_SIZE, disk=BLOCK_SIZE)
    assert index.match(blocks) == {"w": expected}
    assert expected.total == 4 * BLOCK_SIZE


def test_more_copies_than_can_be_counted_do_not_reach_the_next_tier() -> None:
    index = Index(BLOCK_SIZE)
    block = chain(1)
    for _ in range(70_000):
        index.store("w", block, ROOTS[0])

    assert index.blocks_by_tier("w") == {"gpu": 1, "cpu": 0, "disk": 0, "remote": 0}


def test_clearing_one_worker_leaves_the_others_and_its_place_can_be_taken() -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(1, 2, 3)
    for worker in ("a", "b", "c"):
        index.store(worker, blocks, ROOTS[0])
    index.clear("b")
    index.store("d", blocks[:1], ROOTS[0])

    full = Hit(gpu=3 * BLOCK_SIZE)
    assert index.match(blocks) == {"a": full, "c": full, "d": Hit(gpu=BLOCK_SIZE)}
    assert index.num_blocks == 7


def test_an_observation_shortens_a_chain_and_never_deletes_it() -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(1, 2, 3, 4)
    for worker in ("a", "b"):
        index.store(worker, blocks, ROOTS[0])
    index.shorten("a", blocks, 2)
    index.shorten("b", blocks, 0)
    index.shorten("nobody", blocks, 0)

    assert index.match(blocks) == {"a": Hit(gpu=2 * BLOCK_SIZE), "b": Hit(gpu=BLOCK_SIZE)}


def test_forty_workers_with_forty_depths_are_told_apart() -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(*range(40))
    for depth in range(1, 41):
        index.store(f"w{depth}", blocks[:depth], ROOTS[0])

    hits = index.match(blocks)

    assert {worker: hit.total for worker, hit in hits.items()} == {
        f"w{depth}": depth * BLOCK_SIZE for depth in range(1, 41)
    }


def test_a_long_chain_is_matched_in_a_logarithmic_number_of_look_ups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(*range(4096))
    index.store("w", blocks[:3000], ROOTS[0])
    find, looked_up = Blocks.find, []

    def counted(self: Blocks, block: bytes) -> int:
        looked_up.append(block)
        return find(self, block)

    monkeypatch.setattr(Blocks, "find", counted)

    assert index.match(blocks) == {"w": Hit(gpu=3000 * BLOCK_SIZE)}
    assert len(looked_up) <= 14


def test_nothing_is_matched_by_nothing() -> None:
    index = Index(BLOCK_SIZE)
    index.remove("nobody", chain(1))
    index.clear("nobody")

    assert index.match([]) == {}
    assert index.match(chain(1)) == {}
    assert index.blocks_by_tier("nobody") == dict.fromkeys(TIERS, 0)
    assert not index.holds("nobody", chain(1)[0])


def test_a_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        Index(0)


def test_a_false_parent_in_a_shared_state_fails_no_match() -> None:
    """Only a corrupt state can say so: hashes are chained, and engines' blocks are hashed here."""
    index = Index(BLOCK_SIZE)
    root, one, two, three, other = root_hash("m"), *(bytes([n]) * 16 for n in range(1, 5))
    below = 1 << SHIFT["cpu"]
    for worker in ("v", "w"):
        index.set_copies(worker, one, root, 1)
        index.set_copies(worker, two, one, 1)
        index.set_copies(worker, bytes([9]) * 16, root, below)
    index.set_copies("w", other, root, below)
    index.set_copies("w", three, other, 1)

    hits = index.match([one, two, three])

    assert (hits["v"].total, hits["w"].total) == (2 * BLOCK_SIZE, 3 * BLOCK_SIZE)
