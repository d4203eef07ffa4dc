"""The index against the naive model after any history, with its sweeping and trimming under way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefix_index import Hit, Index
from prefix_index.index import TIERS, Tier
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
counts = st.sampled_from((0, 0, 1, 1, 2, 0xFFFF))
packed = st.tuples(counts, counts, counts, counts).map(
    lambda each: sum(number << 16 * i for i, number in enumerate(each))
)


class Unbounded(RuleBasedStateMachine):
    """Every operation there is; the model is right after each."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.model = Index(BLOCK_SIZE), Model()

    @rule(worker=workers, block=blocks, length=st.integers(1, 6), tier=tiers)
    def store(self, worker: str, block: bytes, length: int, tier: Tier) -> None:
        stored = path_to(block)[-length:]
        self.index.store(worker, stored, PARENTS[stored[0]], tier)
        for each in stored:
            if self.model.copies[worker, each, tier] < 0xFFFF:
                self.model.copies[worker, each, tier] += 1

    @rule(
        worker=workers, block=blocks, length=st.integers(1, 6), tier=tiers, leaf_first=st.booleans()
    )
    def remove(self, worker: str, block: bytes, length: int, tier: Tier, leaf_first: bool) -> None:
        removed = path_to(block)[-length:]
        self.index.remove(worker, removed[::-1] if leaf_first else removed, tier)
        for each in removed:
            self.model.copies[worker, each, tier] = max(
                self.model.copies[worker, each, tier] - 1, 0
            )

    @rule(worker=workers, block=blocks, copies=packed)
    def set_copies(self, worker: str, block: bytes, copies: int) -> None:
        for _ in range(2):  # told twice, it is the same
            self.index.set_copies(worker, block, PARENTS[block], copies)
        self.model.set(worker, block, copies)

    @rule(worker=workers)
    def clear(self, worker: str) -> None:
        self.index.clear(worker)
        self.model.forget(lambda who, which: who != worker)

    @rule(worker=workers, block=blocks, length=st.integers(0, 6))
    def shorten(self, worker: str, block: bytes, length: int) -> None:
        path = path_to(block)
        self.index.shorten(worker, path, length)
        cut = set(path[max(length, 1) :])
        self.model.forget(lambda who, which: who != worker or which not in cut)

    @rule(max_blocks=st.integers(1, 20))
    def sweep(self, max_blocks: int) -> None:
        self.index.sweep(max_blocks)

    @invariant()
    def hits_are_those_of_a_walk(self) -> None:
        for leaf in LEAVES:
            assert self.index.match(path_to(leaf)) == self.model.match(path_to(leaf))

    @invariant()
    def copies_and_parents_are_those_of_the_model(self) -> None:
        for worker in WORKERS:
            held = {block: self.model.packed(worker, block) for block in self.model.held(worker)}
            entries = list(self.index.entries(worker))
            assert len(entries) == len(held)
            assert set(entries) == {(block, PARENTS[block], held[block]) for block in held}
            assert {block for block, _, _ in self.index.entries(worker)} == held.keys()
            for block in BLOCKS:
                assert self.index.copies(worker, block) == held.get(block, 0)
                expected = PARENTS[block] if block in held else None
                assert self.index.parent(worker, block) == expected

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        total = 0
        for worker in WORKERS:
            held = self.model.held(worker)
            total += len(held)
            assert self.index.blocks_by_tier(worker) == {
                tier: sum(tier in self.model.tiers(worker, block) for block in held)
                for tier in TIERS
            }
        assert self.index.num_blocks == total

    def teardown(self) -> None:
        for worker in WORKERS:
            self.index.clear(worker)
        while self.index.sweep(5):
            pass
        assert len(self.index._view.blocks) == 0
        assert len(self.index._view.states) == 2  # of nobody's blocks and of roots


class Bounded(RuleBasedStateMachine):
    """Less room than blocks: what goes was nobody's parent, and its worker had enough."""

    max_blocks = 8

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(BLOCK_SIZE, self.max_blocks)
        self.known: set[str] = set()
        # What would be held without the bound.
        self.held: dict[str, set[bytes]] = {worker: set() for worker in WORKERS}

    @rule(worker=workers, block=blocks, length=st.integers(1, 6), tier=tiers)
    def store(self, worker: str, block: bytes, length: int, tier: Tier) -> None:
        stored = path_to(block)[-length:]
        self.known.add(worker)
        self.held[worker].update(stored)
        self.index.store(worker, stored, PARENTS[stored[0]], tier)

    @rule(worker=workers, block=blocks, copies=packed)
    def set_copies(self, worker: str, block: bytes, copies: int) -> None:
        if copies:
            self.known.add(worker)
            self.held[worker].add(block)
        else:
            self.held[worker].discard(block)
        self.index.set_copies(worker, block, PARENTS[block], copies)

    @rule(worker=workers, block=blocks)
    def remove(self, worker: str, block: bytes) -> None:
        self.held[worker].discard(block)
        self.index.set_copies(worker, block, PARENTS[block], 0)

    @rule(worker=workers)
    def clear(self, worker: str) -> None:
        self.index.clear(worker)
        self.known.discard(worker)
        self.held[worker].clear()

    @rule(max_blocks=st.integers(1, 4))
    def sweep(self, max_blocks: int) -> None:
        self.index.sweep(max_blocks)

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.index.num_blocks <= self.max_blocks

    @invariant()
    def only_leaves_of_workers_with_more_than_their_share_went(self) -> None:
        for worker, before in self.held.items():
            now = {block for block, _, _ in self.index.entries(worker)}
            assert now <= before
            for block in before - now:
                assert not any(PARENTS[child] == block for child in now)
            if now != before:
                assert len(before) * len(self.known) >= self.max_blocks
            self.held[worker] = now

    @invariant()
    def what_is_left_is_credited_as_far_as_it_reaches(self) -> None:
        for leaf in LEAVES:
            path = path_to(leaf)
            hits = self.index.match(path)
            for worker, held in self.held.items():
                walked = next((i for i, each in enumerate(path) if each not in held), len(path))
                assert hits.get(worker, Hit()).total == walked * BLOCK_SIZE


TestUnbounded = Unbounded.TestCase
TestUnbounded.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBounded = Bounded.TestCase
TestBounded.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


names = st.sampled_from([*BLOCKS[:6], *ROOTS])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(workers, names, names, st.integers(0, 2)), max_size=30))
def test_parents_that_contradict_each_other_do_no_harm(
    claims: list[tuple[str, bytes, bytes, int]],
) -> None:
    index = Index(BLOCK_SIZE, max_blocks=6)
    for worker, block, parent, copies in claims:
        index.set_copies(worker, block, parent, copies)
        index.store(worker, [parent, block], block)
        for leaf in LEAVES:
            assert index.match(path_to(leaf)).keys() <= set(WORKERS)
    for worker in WORKERS:
        index.clear(worker)
    while index.sweep(5):
        pass

    assert index.num_blocks == 0
    assert len(index._view.blocks) == 0


@pytest.mark.parametrize(
    ("block", "parent", "copies"),
    [
        (b"short", ROOTS[0], 1),
        (chain(1)[0], b"a parent of seventeen"[:17], 1),
        (chain(1)[0], ROOTS[0], -1),
        (chain(1)[0], ROOTS[0], 1 << 64),
    ],
)
def test_what_cannot_be_an_entry_is_refused_and_changes_nothing(
    block: bytes, parent: bytes, copies: int
) -> None:
    index = Index(BLOCK_SIZE)
    with pytest.raises(ValueError, match="expected two hashes of 16 bytes and copies in 64 bits"):
        index.set_copies("w", block, parent, copies)

    assert index.num_blocks == 0
    assert len(index._view.blocks) == 0


def test_a_hash_of_another_length_is_refused_by_a_store() -> None:
    index = Index(BLOCK_SIZE)
    with pytest.raises(ValueError, match=r"16 bytes, not \[3, 16\]"):
        index.store("w", [*chain(1), b"abc"], ROOTS[0])

    assert index.num_blocks == len(index._view.blocks) == 0


@pytest.mark.parametrize("sweeps", [0, 1, 100])
def test_a_worker_that_comes_back_before_its_old_blocks_are_swept_holds_only_new_ones(
    sweeps: int,
) -> None:
    index = Index(BLOCK_SIZE)
    old, new = chain(*range(1, 101)), chain(*range(1, 51))
    for round_ in range(3):
        index.store("w", old, ROOTS[0])
        index.clear("w")
        for _ in range(sweeps):
            index.sweep(1)

        assert index.match(old) == {}, round_

        index.store("w", new, ROOTS[0])

        assert index.match(old) == {"w": Hit(gpu=50 * BLOCK_SIZE)}
        assert index.blocks_by_tier("w")["gpu"] == index.num_blocks == 50


def test_stores_sweep_what_nobody_sweeps() -> None:
    index = Index(BLOCK_SIZE)
    for life in range(50):
        index.store("w", chain(*range(life, life + 40)), ROOTS[0])
        index.clear("w")

    assert len(index._view.blocks) <= 3 * 40


def test_more_workers_than_bits_in_a_word_are_told_apart() -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(1, 2, 3)
    for k in range(200):
        index.store(f"w{k}", blocks[: k % 3 + 1], ROOTS[0], TIERS[k % 4])
    for k in range(100):
        index.clear(f"w{k}")

    hits = index.match(blocks)

    assert hits.keys() == {f"w{k}" for k in range(100, 200)}
    assert all(hits[f"w{k}"].total == (k % 3 + 1) * BLOCK_SIZE for k in range(100, 200))
    assert all(hits[f"w{k}"][k % 4] == hits[f"w{k}"].total for k in range(100, 200))


def test_pages_give_what_is_held_throughout_once_while_the_index_changes() -> None:
    index = Index(BLOCK_SIZE)
    lasting = [chain(k, *range(20)) for k in range(100, 140)]
    passing = [chain(k, *range(20)) for k in range(200, 240)]
    for stays, goes in zip(lasting, passing, strict=True):
        index.store("w", stays, ROOTS[0])
        index.store("w", goes, ROOTS[0], "cpu")
        index.store("other", goes, ROOTS[0])
    seen: list[bytes] = []
    cursor, number = 0, 0
    while True:
        entries, cursor = index.page("w", cursor, 30)
        seen += [block for block, _, _ in entries]
        if not cursor:
            break
        index.remove("w", passing[number % 40], "cpu")
        index.store("new", chain(number, 999), ROOTS[0])
        number += 1

    assert number > 10
    expected = {block for stays in lasting for block in stays}
    assert expected <= set(seen)
    assert all(seen.count(block) == 1 for block in expected)


def test_a_hub_that_many_workers_share_outlives_its_children() -> None:
    index = Index(BLOCK_SIZE, max_blocks=1000)
    hub = chain(*range(10))
    for k in range(5000):
        index.store(f"w{k % 7}", hub + chain(k + 100, root=hub[-1]), ROOTS[0])

    assert index.num_blocks <= 1000
    assert {hit.total for hit in index.match(hub).values()} == {10 * BLOCK_SIZE}


def test_a_large_view_loses_what_is_old_and_keeps_what_is_young_or_stored_again() -> None:
    index = Index(BLOCK_SIZE, max_blocks=10_000)  # five windows of the hand, and more
    hot = chain(*range(1, 101))
    chains = [chain(k, *range(20)) for k in range(1000, 3000)]
    for number, each in enumerate(chains):
        index.store(f"w{number % 3}", each, ROOTS[0])
        if number % 50 == 0:
            index.store("w0", hot, ROOTS[0])

    assert index.num_blocks <= index.max_blocks
    assert index.match(hot)["w0"].total == 100 * BLOCK_SIZE
    lengths = [sum(hit.total for hit in index.match(each).values()) for each in chains]
    assert all(length == 21 * BLOCK_SIZE for length in lengths[-100:])
    assert sum(lengths[:1000]) < sum(lengths[1000:]) / 10


def test_a_bound_that_falls_is_met_again_by_the_next_stores() -> None:
    index = Index(BLOCK_SIZE, max_blocks=5000)
    for k in range(300):
        index.store(f"w{k % 3}", chain(k, *range(10)), ROOTS[0])
    index.max_blocks = 500
    for k in range(300, 350):
        index.store(f"w{k % 3}", chain(k, *range(10)), ROOTS[0])

    assert index.num_blocks <= 500


def test_a_chain_stored_block_by_block_between_others_is_split_by_samples() -> None:
    index = Index(BLOCK_SIZE)
    blocks = chain(*range(1, 2001))
    for at, block in enumerate(blocks):
        index.store("other", chain(at, 0), ROOTS[1])
        index.store(
            "w", [block], blocks[at - 1] if at else ROOTS[0], "cpu" if at >= 1000 else "gpu"
        )

    hit = index.match(blocks)["w"]

    assert hit.total == 2000 * BLOCK_SIZE
    assert abs(hit.gpu - hit.cpu) <= 2 * 2000 // 64 * BLOCK_SIZE
