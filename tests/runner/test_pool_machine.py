"""The pool's books against a naive model: 100,000 random operations, invariants after each.

The model keeps what every block truly holds, whose it is and why, in plain sets; it never asks the
pool. It also plays the transfer threads: a block that is being loaded may be written at any time.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from prefix_index.events import BlockRemoved, BlockStored
from runner.kvkeys import BlockChain, KvKey, namespace_key, root_key
from runner.leases import Lease, LeaseBook
from runner.pool.blocks import BlockPool
from runner.pool.states import BlockState

SIZE = 4
NUM_BLOCKS = 14
NAMESPACE = namespace_key({"model": "machine"})
OPERATIONS = 100_000
SEEDS = 8

# What a block holds: a key, or rubbish of some writer.
Content = KvKey | str


@dataclass(eq=False)
class Sequence:
    """What a sequence believes its blocks hold."""

    tokens: list[int]
    chain: BlockChain
    blocks: list[int]
    committed: int = 0

    def content(self, index: int) -> Content:
        end = (index + 1) * SIZE
        if end > len(self.tokens):
            return f"part of {self.tokens[index * SIZE :]}"
        self.chain.extend(self.tokens)
        return self.chain.keys[index]


@dataclass(eq=False)
class Load:
    """Blocks a transfer writes for a sequence, which may have gone."""

    sequence: Sequence | None
    first: int
    blocks: list[int]


@dataclass
class Machine:
    """Random operations on a pool and on the naive model beside it."""

    rng: random.Random
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS, SIZE))
    live: list[Sequence] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    leases: list[tuple[Lease, list[Content]]] = field(default_factory=list)
    written: dict[int, Content] = field(default_factory=dict)
    announced: Counter[int | bytes] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.book = LeaseBook(self.pool.pin, self.pool.unpin)

    def _prompt(self) -> list[int]:
        length = self.rng.randrange(1, 26)
        # Few distinct tokens per depth, so that prefixes meet and part again.
        return [self.rng.randrange(2) if at % SIZE == 0 else at for at in range(length)]

    def _begin(self, tokens: list[int], num_loading: int) -> None:
        salt = self.rng.choice(["", "", "s"])
        chain = BlockChain(root_key(NAMESPACE, salt=salt), SIZE, salt)
        chain.extend(tokens)
        hits = self.pool.find(chain, (len(tokens) - 1) // SIZE)
        for index, block in enumerate(hits):
            assert self.written[block] == chain.keys[index], "a hit that is none"
        self.pool.take(hits)
        num_loading = min(num_loading, (len(tokens) - 1) // SIZE - len(hits))
        loading = self.pool.reserve_loading(num_loading)
        rest = -(-len(tokens) // SIZE) - len(hits) - num_loading
        others = None if loading is None else self.pool.allocate(rest)
        if loading is None or others is None:
            self.pool.release_loading(loading or [])
            self.pool.release(hits, chain)
            self.counts["no room"] += 1
            return
        sequence = Sequence(tokens, chain, hits + others, len(hits))
        self.live.append(sequence)
        if loading:
            self.loads.append(Load(sequence, len(hits), loading))
        else:
            self._write(sequence, len(hits))

    def _write(self, sequence: Sequence, start: int) -> None:
        for index in range(start, len(sequence.blocks)):
            self.written[sequence.blocks[index]] = sequence.content(index)

    def _ready(self) -> list[Sequence]:
        loading = [load.sequence for load in self.loads]
        return [sequence for sequence in self.live if sequence not in loading]

    def start(self) -> None:
        self._begin(self._prompt(), 0)

    def load(self) -> None:
        self._begin(self._prompt(), self.rng.randrange(1, 5))

    def transfer(self) -> None:
        """A transfer thread writes one of its blocks, whoever waits for it."""
        if self.loads:
            load = self.rng.choice(self.loads)
            self.written[self.rng.choice(load.blocks)] = "half a block"

    def end_load(self) -> None:
        if not self.loads:
            return
        load = self.loads.pop(self.rng.randrange(len(self.loads)))
        sequence = load.sequence
        for block in load.blocks:
            self.written[block] = "rubbish of a load"
        if sequence is None:
            self.pool.release_loading(load.blocks)
            self.counts["load without a request"] += 1
            return
        last = load.first + self.rng.randrange(len(load.blocks) + 1)
        for index in range(load.first, last):
            self.written[load.blocks[index - load.first]] = sequence.chain.keys[index]
        self.pool.take_loaded(load.blocks)
        sequence.blocks[load.first : load.first] = load.blocks
        self.pool.commit(sequence.blocks, sequence.chain, load.first, last)
        sequence.committed = last
        self._write(sequence, last)
        self.counts["load"] += 1

    def grow(self) -> None:
        if not (ready := self._ready()):
            return
        sequence = self.rng.choice(ready)
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
        if not (ready := self._ready()):
            return
        sequence = self.rng.choice(ready)
        full = len(sequence.tokens) // SIZE
        sequence.chain.extend(sequence.tokens)
        given = self.pool.commit(sequence.blocks, sequence.chain, sequence.committed, full)
        for index in given:
            assert self.pool.record_of(sequence.blocks[index]).depth == index
        sequence.committed = full

    def fork(self) -> None:
        if not (ready := self._ready()) or len(self.live) > 5:
            return
        source = self.rng.choice(ready)
        self.pool.take(source.blocks)
        self.live.append(
            Sequence(
                source.tokens.copy(), source.chain.copy(), source.blocks.copy(), source.committed
            )
        )
        self.counts["fork"] += 1

    def end(self) -> None:
        """Finish, preempt or cancel a sequence: all one to the pool."""
        if not self.live:
            return
        sequence = self.live.pop(self.rng.randrange(len(self.live)))
        self.pool.release(sequence.blocks, sequence.chain)
        for load in self.loads:
            if load.sequence is sequence:
                load.sequence = None

    def lease(self) -> None:
        keyed = [block for block, content in self.written.items() if self._is_keyed(block, content)]
        if not keyed or len(self.leases) > 3:
            return
        blocks = self.rng.sample(keyed, min(len(keyed), self.rng.randrange(1, 3)))
        deadline_s = self.now_s + self.rng.randrange(1, 40)
        lease = self.book.take("m", self.rng.choice(["store", "peer"]), deadline_s, blocks)
        self.leases.append((lease, [self.written[block] for block in blocks]))

    def _is_keyed(self, block: int, content: Content) -> bool:
        return isinstance(content, bytes) and self.pool.block_of(content) == block

    def give_back(self) -> None:
        if self.leases:
            lease, _ = self.leases.pop(self.rng.randrange(len(self.leases)))
            assert self.book.release(lease)

    def sweep(self) -> None:
        orphans = self.book.sweep(self.now_s)
        self.leases = [at for at in self.leases if at[0] not in orphans]
        self.counts["orphans"] += len(orphans)

    def clear(self) -> None:
        if self.loads:
            return
        cleared = self.pool.clear()
        assert cleared == (not any(sequence.blocks for sequence in self.live))
        self.counts["clear"] += cleared

    def lose_books(self) -> None:
        """Start over as after a failure: sequences end, transfers do not."""
        if self.rng.random() < 0.02:
            self.pool.forget_all()
            self.live.clear()
            for load in self.loads:
                load.sequence = None
            self.counts["start over"] += 1

    def operate(self) -> None:
        self.now_s += 1
        operations = (
            *(self.start, self.load, self.load, self.transfer, self.end_load),
            *(self.grow, self.grow, self.grow, self.commit, self.commit, self.fork),
            *(self.end, self.end, self.lease, self.give_back, self.sweep),
            *(self.clear, self.lose_books),
        )
        self.rng.choice(operations)()
        self._read_events()
        self.check()

    def _read_events(self) -> None:
        for event in self.pool.drain_events():
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                assert parent is None or self.announced[parent], "announced before its parent"
                self.announced.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.announced.subtract(event.block_hashes)
            else:
                self.announced.clear()

    def check(self) -> None:
        pool = self.pool
        loading = [block for load in self.loads for block in load.blocks]
        pool.check((sequence.blocks for sequence in self.live), loading)
        assert +self.announced == Counter(pool.cached_hashes())
        # Who may touch a block, counted by hand.
        referenced = Counter(block for sequence in self.live for block in sequence.blocks)
        pinned = {block for lease, _ in self.leases for block in lease.blocks}
        assert not {*loading} & {*referenced, *pinned}
        for block in range(NUM_BLOCKS):
            if referenced[block]:
                expected = {BlockState.ACTIVE}
            elif block in pinned:
                expected = {BlockState.PINNED}
            elif block in loading:
                expected = {BlockState.LOADING}
            else:
                expected = {BlockState.FREE, BlockState.CACHED}
            assert pool.state(block) in expected
        for sequence in self._ready():
            for index, block in enumerate(sequence.blocks):
                assert self.written[block] == sequence.content(index), "overwritten in use"
        for lease, contents in self.leases:
            held = [self.written[block] for block in lease.blocks]
            assert held == contents, "overwritten while leased"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_100_000_random_operations_keep_every_invariant(seed: int) -> None:
    machine = Machine(random.Random(seed))
    for _ in range(OPERATIONS // SEEDS):
        machine.operate()
    while machine.live:
        machine.end()
        machine.check()
    while machine.loads:
        machine.end_load()
        machine.check()
    machine.book.release_all()
    machine.leases.clear()
    machine.check()

    pool = machine.pool
    assert pool.num_free + pool.num_cached == NUM_BLOCKS
    assert pool.evictions_total > 100
    for happening in ("load", "load without a request", "fork", "orphans", "no room"):
        assert machine.counts[happening] > 50, happening
    assert machine.counts["start over"] > 5
