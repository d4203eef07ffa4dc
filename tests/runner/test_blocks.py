"""The pool's books: invariants under random operations, eviction order, sharing, events."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from prefix_index.events import AllBlocksCleared, BlockRemoved, BlockStored
from runner.kvkeys import BlockChain, event_hash, namespace_key, root_key
from runner.pool.blocks import BlockPool
from runner.pool.states import BlockState, InvariantError

SIZE = 4
NAMESPACE = namespace_key({"model": "test"})


def chain_of(tokens: list[int], salt: str = "") -> BlockChain:
    chain = BlockChain(root_key(NAMESPACE, salt=salt), SIZE, salt)
    chain.extend(tokens)
    return chain


def run_prompt(pool: BlockPool, tokens: list[int], salt: str = "") -> tuple[list[int], BlockChain]:
    """Do what the scheduler does for a prompt: hits, blocks, commit. Keeps it running."""
    chain = chain_of(tokens, salt)
    hits = pool.find(chain, (len(tokens) - 1) // SIZE)
    pool.take(hits)
    rest = pool.allocate(-(-len(tokens) // SIZE) - len(hits))
    assert rest is not None
    blocks = hits + rest
    pool.commit(blocks, chain, len(hits), len(tokens) // SIZE)
    return blocks, chain


def finish_prompt(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Run a prompt and release it at once; returns the blocks it had."""
    blocks, chain = run_prompt(pool, tokens, salt)
    pool.release(blocks, chain)
    return blocks


@dataclass
class NaiveSequence:
    """What a sequence believes its blocks hold."""

    salt: str
    tokens: list[int]
    chain: BlockChain
    blocks: list[int]
    committed: int = 0


@dataclass
class NaiveWorld:
    """Random sequences over a small alphabet, with what every block truly holds beside them.

    ``written`` is the naive model: block -> (salt, all tokens up to its end), set whenever a
    sequence writes one, never consulted by the pool.
    """

    rng: random.Random
    pool: BlockPool = field(default_factory=lambda: BlockPool(24, SIZE))
    live: list[NaiveSequence] = field(default_factory=list)
    written: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    announced: Counter[int | bytes] = field(default_factory=Counter)
    parents: dict[int | bytes, int | bytes | None] = field(default_factory=dict)

    def start(self) -> None:
        salt = self.rng.choice(["", "", "a"])
        length = self.rng.randrange(1, 30)
        # Few distinct tokens per depth, so that prefixes meet and part again.
        tokens = [self.rng.randrange(2) if at % SIZE == 0 else at for at in range(length)]
        chain = chain_of(tokens, salt)
        hits = self.pool.find(chain, (length - 1) // SIZE)
        for index, block in enumerate(hits):
            assert self.written[block] == (salt, tuple(tokens[: (index + 1) * SIZE]))
        self.pool.take(hits)
        rest = self.pool.allocate(-(-length // SIZE) - len(hits))
        if rest is None:
            self.pool.release(hits, chain)
            return
        sequence = NaiveSequence(salt, tokens, chain, hits + rest, len(hits))
        for index in range(len(hits), len(sequence.blocks)):
            self._write(sequence, index)
        self.live.append(sequence)

    def grow(self) -> None:
        sequence = self.rng.choice(self.live)
        if len(sequence.tokens) == len(sequence.blocks) * SIZE:
            more = self.pool.allocate(1)
            if more is None:
                return
            sequence.blocks += more
        elif self.pool.is_shared(sequence.blocks[-1]):
            private = self.pool.allocate(1)
            if private is None:
                return
            self.pool.replace_last(sequence.blocks, private[0])
        at = len(sequence.tokens)
        sequence.tokens.append(self.rng.randrange(2) if at % SIZE == 0 else at)
        self._write(sequence, len(sequence.blocks) - 1)

    def commit(self) -> None:
        sequence = self.rng.choice(self.live)
        full = len(sequence.tokens) // SIZE
        sequence.chain.extend(sequence.tokens)
        self.pool.commit(sequence.blocks, sequence.chain, sequence.committed, full)
        sequence.committed = full

    def fork(self) -> None:
        source = self.rng.choice(self.live)
        self.pool.take(source.blocks)
        twin = NaiveSequence(
            source.salt,
            source.tokens.copy(),
            source.chain.copy(),
            source.blocks.copy(),
            source.committed,
        )
        self.live.append(twin)

    def end(self) -> None:
        sequence = self.live.pop(self.rng.randrange(len(self.live)))
        self.pool.release(sequence.blocks, sequence.chain)

    def clear(self) -> None:
        assert self.pool.clear() == (not self.live)

    def operate(self) -> None:
        operations = [self.start, self.clear]
        if self.live:
            operations += [self.grow, self.grow, self.grow, self.commit, self.commit, self.end]
            operations += [self.fork] if len(self.live) < 6 else [self.end]
        self.rng.choice(operations)()
        self._read_events()
        self.check()

    def check(self) -> None:
        pool = self.pool
        pool.check(sequence.blocks for sequence in self.live)
        for sequence in self.live:
            for index, block in enumerate(sequence.blocks):
                held = sequence.tokens[: (index + 1) * SIZE]
                assert self.written[block] == (sequence.salt, tuple(held)), "overwritten in use"
        assert pool.num_free + pool.num_cached + pool.num_active == pool.num_blocks
        assert +self.announced == Counter(pool.cached_hashes())

    def _write(self, sequence: NaiveSequence, index: int) -> None:
        held = sequence.tokens[: (index + 1) * SIZE]
        self.written[sequence.blocks[index]] = (sequence.salt, tuple(held))

    def _read_events(self) -> None:
        for event in self.pool.drain_events():
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * SIZE
                chain = [event.parent_block_hash, *event.block_hashes]
                parent = event.parent_block_hash
                assert parent is None or self.announced[parent], "parent announced before"
                self.parents.update(zip(event.block_hashes, chain, strict=False))
                self.announced.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert len(event.block_hashes) == 1
                self.announced.subtract(event.block_hashes)
                followed = {self.parents[held] for held, count in self.announced.items() if count}
                assert event.block_hashes[0] not in followed, "evicted before its child"
            else:
                self.announced.clear()


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_keep_every_invariant(seed: int) -> None:
    world = NaiveWorld(random.Random(seed))
    for _ in range(2500):
        world.operate()
    while world.live:
        world.end()
        world.check()

    assert world.pool.evictions_total > 50
    assert world.pool.num_active == 0


def test_the_least_recently_used_prompt_goes_first_and_its_last_block_before_its_first() -> None:
    pool = BlockPool(6, SIZE)
    old = finish_prompt(pool, [1] * 12)
    new = finish_prompt(pool, [2] * 12)
    assert pool.num_free == 0

    assert set(pool.allocate(4) or []) == {*old, new[2]}
    removed = [event for event in pool.drain_events() if isinstance(event, BlockRemoved)]
    chain = chain_of([1] * 12)
    assert [event.block_hashes[0] for event in removed[:3]] == [
        event_hash(key) for key in reversed(chain.keys)
    ]


def test_a_hit_makes_a_prompt_recently_used() -> None:
    pool = BlockPool(4, SIZE)
    first = finish_prompt(pool, [1] * 8)
    second = finish_prompt(pool, [2] * 8)
    again = finish_prompt(pool, [1] * 8)
    assert again[0] == first[0]

    assert set(pool.allocate(2) or []) == set(second)
    assert pool.find(chain_of([1] * 8), 2) == again
    assert {pool.state(block) for block in again} == {BlockState.CACHED}


def test_what_two_prompts_computed_alike_is_keyed_once_and_kept_while_either_is_used() -> None:
    pool = BlockPool(8, SIZE)
    tokens = [1] * 8
    chains = [chain_of(tokens), chain_of(tokens)]
    tables = [pool.allocate(2) or [] for _ in chains]
    for blocks, chain in zip(tables, chains, strict=True):
        pool.commit(blocks, chain, 0, 2)

    assert pool.find(chains[0], 2) == tables[0]
    # The second goes on, its next block follows the first one's copy.
    tables[1] += pool.allocate(1) or []
    chains[1].extend(tokens + [5] * 4)
    pool.commit(tables[1], chains[1], 2, 3)
    pool.release(tables[0], chains[0])
    assert pool.num_cached == 2

    assert pool.allocate(4) is None, "blocks that a running sequence follows are not evicted"
    pool.check([tables[1]])
    pool.release(tables[1], chains[1])
    assert (pool.num_cached, pool.num_free) == (3, 5)


def test_a_prompt_computed_twice_counts_as_used_by_both() -> None:
    pool = BlockPool(6, SIZE)
    chains = [chain_of([1] * 8), chain_of([1] * 8)]
    tables = [pool.allocate(2) or [] for _ in chains]
    for blocks, chain in zip(tables, chains, strict=True):
        pool.commit(blocks, chain, 0, 2)
    pool.release(tables[0], chains[0])
    other = finish_prompt(pool, [2] * 8)
    # The last use of the first prompt is its second computation, whose copies have no keys.
    pool.release(tables[1], chains[1])

    assert set(pool.allocate(4) or []) == {*tables[1], *other}
    assert pool.find(chains[0], 2) == tables[0]


def test_a_private_copy_takes_the_key_over_when_the_first_was_evicted() -> None:
    pool = BlockPool(5, SIZE)
    chains = [chain_of([1] * 4), chain_of([1] * 4)]
    tables = [pool.allocate(1) or [] for _ in chains]
    for blocks, chain in zip(tables, chains, strict=True):
        pool.commit(blocks, chain, 0, 1)
    pool.release(tables[0], chains[0])
    taken = pool.allocate(4)
    assert taken is not None, "the first copy had to go"
    pool.release(taken, chain_of([]))

    tables[1] += pool.allocate(1) or []
    chains[1].extend([1] * 8)
    pool.commit(tables[1], chains[1], 1, 2)

    assert pool.find(chains[1], 2) == tables[1]
    pool.check([tables[1]])


def test_equal_keys_with_other_tokens_are_a_miss() -> None:
    pool = BlockPool(4, SIZE)
    finish_prompt(pool, [1] * 8)
    forged = chain_of([1] * 8)
    forged.tokens[0] = bytes(SIZE * 4)

    assert pool.find(forged, 2) == []


def test_salts_adapters_and_namespaces_never_share_keys() -> None:
    other = namespace_key({"model": "other"})
    roots = {
        root_key(NAMESPACE),
        root_key(other),
        root_key(NAMESPACE, salt="a"),
        root_key(NAMESPACE, salt="ab"),
        root_key(NAMESPACE, adapter="a"),
        root_key(NAMESPACE, salt="a", adapter="b"),
        root_key(NAMESPACE, salt="\ud800"),
    }

    assert len(roots) == 7
    keys = {chain_of([1] * 4, salt).keys[0] for salt in ("", "a", "b")}
    assert len(keys) == 3


def test_stored_events_look_like_vllms() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(10))
    blocks, chain = run_prompt(pool, tokens, "tenant-a")
    chain.extend([*tokens, 10, 11])
    pool.commit(blocks, chain, 2, 3)

    first, second = pool.drain_events()
    assert isinstance(first, BlockStored)
    assert first.block_hashes == [int.from_bytes(key[-8:], "big") for key in chain.keys[:2]]
    assert first.parent_block_hash is None
    assert first.token_ids == tokens[:8]
    assert first.extra_keys == [["tenant-a"], None]
    assert (first.medium, first.group_idx, first.block_size) == ("GPU", 0, SIZE)
    assert first.kv_cache_spec_kind == "full_attention"
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[1]
    assert second.extra_keys == [None]


def test_clearing_is_refused_while_blocks_are_in_use_and_announced_once() -> None:
    pool = BlockPool(8, SIZE)
    blocks, chain = run_prompt(pool, [1] * 8)
    pool.drain_events()

    assert not pool.clear()
    assert pool.drain_events() == []
    pool.release(blocks, chain)
    assert pool.clear()
    assert pool.drain_events() == [AllBlocksCleared()]
    assert (pool.num_free, pool.find(chain, 2)) == (8, [])


@pytest.mark.parametrize("damage", ["reference", "free list", "key", "child count"])
def test_the_check_finds_damaged_books(damage: str) -> None:
    pool = BlockPool(8, SIZE)
    blocks, chain = run_prompt(pool, [1] * 12)
    pool.check([blocks])
    if damage == "reference":
        pool._books.references[blocks[0]] += 1
    elif damage == "free list":
        pool._books.free.append(blocks[1])
    elif damage == "key":
        del pool._books.holders[chain.keys[2]]
    else:
        pool._content(blocks[0]).children = 0

    with pytest.raises(InvariantError):
        pool.check([blocks])
