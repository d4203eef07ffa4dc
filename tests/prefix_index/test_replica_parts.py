"""Look-ups, routings and the limits of what is kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefix_index.blocks import BlockHash, hash_blocks, root_hash
from prefix_index.index import Index
from prefix_index.ingest import FeedChange
from prefix_index.replica.codec import Head, pack_delta, pack_state, unpack_state
from prefix_index.replica.link import Link
from prefix_index.replica.lookup import Lookup
from prefix_index.replica.publication import MAX_PENDING_BLOCKS, Publication
from prefix_index.replica.touches import Touches
from prefix_index.replica.view import Entry, View
from tests.prefix_index.replica_parts import Engine, EngineSource, Gateway, content, running
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]

ROOT = root_hash("m")


async def test_a_look_up_says_what_each_worker_holds(valkey: Valkey) -> None:
    """Whatever the order of the workers and the lengths they hold."""
    rng = random.Random(3)
    engines = [Engine(f"w{number}") for number in range(12)]
    gateway = Gateway(valkey.url, engines, name="one")
    chain = [10 * number for number in range(1, 41)]
    tokens = [token for block in chain for token in range(block, block + 4)]
    hashes = hash_blocks(tokens, 4, ROOT)
    lengths = {engine.worker: rng.choice([0, 1, 2, 7, 20, 39, 40]) for engine in engines}
    async with running(gateway):
        await poll_until(lambda: all(gateway.holds_lease(engine.worker) for engine in engines))
        for engine in engines:
            if lengths[engine.worker]:
                engine.store(chain[: lengths[engine.worker]])
        await poll_until(
            lambda: all(view.publication.is_empty for view in gateway.replica.views.values())
        )
        lookup = Lookup(gateway.link, gateway.replica.leases, gateway.index)
        for _ in range(5):
            workers = list(lengths)
            rng.shuffle(workers)
            found = await lookup.find(hashes, workers)
            assert dict(found) == {name: held for name, held in lengths.items() if held}
            assert [item.num_blocks for item in found] == sorted(
                (held for held in lengths.values() if held), reverse=True
            )
        assert await lookup.find([], list(lengths)) == []


async def test_what_is_looked_up_fills_the_view_of_the_best_workers(valkey: Valkey) -> None:
    engine = Engine("w")
    gateway = Gateway(valkey.url, [engine], name="one")
    chain = [10, 20, 30]
    hashes = hash_blocks([t for block in chain for t in range(block, block + 4)], 4, ROOT)
    async with running(gateway):
        await poll_until(lambda: gateway.holds_lease("w"))
        engine.store(chain)
        engine.store(chain[:1], medium="CPU")
        await poll_until(lambda: gateway.replica.views["w"].publication.is_empty)
        expected = gateway.content("w")
        view = Index(4)
        lookup = Lookup(gateway.link, gateway.replica.leases, view)
        lookup.look_up(hashes, ROOT, ["w"])
        await poll_until(lambda: lookup.filled == 3)
        assert {b: (p, c) for b, p, c in view.entries("w")} == {
            b: (p if p != root_hash("m") else ROOT, c) for b, (p, c) in expected.items()
        }


async def test_look_ups_are_bounded_and_none_begins_while_redis_is_away(valkey: Valkey) -> None:
    gateway = Gateway(valkey.url, [], name="one")
    lookup = Lookup(gateway.link, gateway.replica.leases, gateway.index)
    lookup.look_up([bytes(16)], ROOT, ["w"])
    assert (lookup.asked, lookup.skipped) == (0, 1)
    async with running(gateway):
        await poll_until(lambda: gateway.link.is_up)
        for _ in range(100):
            lookup.look_up([bytes(16)], ROOT, ["w"])
        assert lookup.asked == 4
        await lookup.close()


class Teller:
    """One gateway's routings, heard into chains."""

    def __init__(self, url: str, name: str) -> None:
        self.link = Link(url, namespace="t", timeout_s=1.0)
        self.index = Index(4)
        self.touches = Touches(self.link, "pool", name, on_touch=self._touched, above=self._above)
        self.heard: list[tuple[str, tuple[BlockHash, ...], BlockHash]] = []

    def _touched(self, worker: str, hashes: Sequence[BlockHash], root: BlockHash) -> None:
        self.heard.append((worker, tuple(hashes), root))
        for block, parent in zip(hashes, (root, *hashes), strict=False):
            self.index.set_copies(worker, block, parent, 1)

    def _above(self, worker: str, block: BlockHash, depth: int) -> list[BlockHash] | None:
        chain: list[BlockHash] = []
        at: BlockHash | None = block
        while at is not None and len(chain) < depth:
            chain.append(at)
            at = self.index.parent(worker, at)
        return chain[::-1] if len(chain) == depth else None


async def test_a_growing_conversation_is_told_by_its_new_blocks_only(valkey: Valkey) -> None:
    one, two = Teller(valkey.url, "one"), Teller(valkey.url, "two")
    chain = hash_blocks(list(range(400)), 4, ROOT)
    tasks = [asyncio.create_task(p) for t in (one, two) for p in (t.link.run(), t.touches.run())]
    try:
        for length in (50, 60, 60, 100):
            one.touches.touched("w", chain[:length], ROOT)
        await poll_until(lambda: len(two.heard) == 4)
        assert [len(hashes) for _, hashes, _ in two.heard] == [50, 60, 60, 100]
        assert two.heard[-1] == ("w", tuple(chain), ROOT)
        with valkey.client() as client:
            used = sum(len(f[b"t"]) for _, f in client.xrange(one.link.key("pool", "touches")))
        assert used < 16 * 100 + 4 * 100
        # One that starts now learns the same.
        three = Teller(valkey.url, "three")
        tasks += [asyncio.create_task(p) for p in (three.link.run(), three.touches.run())]
        await poll_until(lambda: len(three.heard) == 4)
        assert not one.heard
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x91\x95\xa1w", b"\x91\x95\xa1w\xc4\x01x\x00\xc4\x00\xc4\x01y"]
)
async def test_routings_that_are_none_are_counted(valkey: Valkey, data: bytes) -> None:
    one = Teller(valkey.url, "one")
    with valkey.client() as client:
        client.xadd(one.link.key("pool", "touches"), {b"s": b"x", b"t": data})
        client.xadd(one.link.key("pool", "touches"), {b"other": data})
    tasks = [asyncio.create_task(one.link.run()), asyncio.create_task(one.touches.run())]
    try:
        await poll_until(lambda: one.touches.decode_errors == 2)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_routings_that_wait_for_redis_are_bounded() -> None:
    one = Teller(f"redis://127.0.0.1:{free_port()}", "one")
    for number in range(3000):
        one.touches.touched("w", hash_blocks(list(range(number, number + 8)), 4, ROOT), ROOT)
    assert one.touches.dropped == 3000 - 1024


def test_changes_that_wait_for_redis_are_bounded_and_then_all_is_sent_again() -> None:
    index, engine = Index(4), Engine("w")
    source = EngineSource(engine, index)
    publication = Publication(index, "w", source)
    source.listen(publication.saw)
    source.follow(0, 0)
    publication.restart()
    while (delta := publication.next_delta()) is not None:
        publication.done(delta)
    for start in range(0, 40 * MAX_PENDING_BLOCKS, 400):
        engine.store([start + 4 * at for at in range(10)])
        assert publication.num_pending <= MAX_PENDING_BLOCKS + 10
    assert publication.restarts == 2
    sent = {}
    while (delta := publication.next_delta()) is not None:
        sent |= delta.states
        publication.done(delta)
    assert len(sent) == index.num_blocks
    assert publication.is_empty


@example([(4, True), (0, True)], 0)  # listed only once both chains are there
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=60), st.integers(0, 2**32))
def test_a_publication_ends_in_what_the_index_holds_however_its_deltas_fall(
    steps: list[tuple[int, bool]], seed: int
) -> None:
    """Interleaved with changes, resets and losses; whoever goes on from there sees the truth."""
    rng = random.Random(seed)
    index, engine = Index(4), Engine("w")
    source = EngineSource(engine, index)
    publication = Publication(index, "w", source)
    source.listen(publication.saw)
    source.follow(0, 0)
    publication.restart()
    shared: dict[BlockHash, bytes] = {}
    head = None
    for number, is_store in steps:
        base = 100 * number  # a name is one chain's alone
        if rng.random() < 0.05:
            engine.reset()
        elif is_store:
            engine.store([base, base + 4])
        else:
            engine.remove([base + 4])
        while rng.random() < 0.6 and (delta := publication.next_delta()) is not None:
            if rng.random() < 0.2:
                continue  # it got lost and is sent again
            if delta.head.is_reset:
                shared.clear()
            shared |= delta.states
            head = delta.head
            publication.done(delta)
    while (delta := publication.next_delta()) is not None:
        if delta.head.is_reset:
            shared.clear()
        shared |= delta.states
        head = delta.head
        publication.done(delta)
    assert {block for block, value in shared.items() if value} == {
        block for block, _, _ in index.entries("w")
    }
    assert head is not None
    successor = Index(4)
    follower = EngineSource(engine, successor)
    if head.next_sequence:
        for block, value in shared.items():
            if value:
                parent, copies, name = unpack_state(value)
                successor.set_copies("w", block, parent, copies)
                assert name is not None
                follower.adopt([name], [block])
    follower.follow(head.next_sequence, head.digest)
    assert content(successor, "w") == engine.truth() == content(index, "w")


_NUMBERS = st.integers(0, 11)


@given(
    st.lists(
        st.dictionaries(_NUMBERS, st.tuples(_NUMBERS, st.sampled_from([0, 1, 1, 1, 2, 1 << 16]))),
        max_size=8,
    )
)
def test_a_delta_is_written_as_block_by_block_in_whatever_order_it_names_them(
    deltas: list[dict[int, tuple[int, int]]],
) -> None:
    """Chains, parts of chains, children before parents, blocks that are known or gone."""
    index, naive = Index(4), Index(4)
    view = View(index, "w", EngineSource(Engine("w"), index))
    view.role = "tail"
    blocks = [ROOT, *(bytes((number,)) * 16 for number in range(1, 12))]
    for number, delta in enumerate(deltas, start=1):
        states: dict[BlockHash, bytes] = {}
        for at, (above, copies) in delta.items():
            if at == 0 or above >= at:  # a root is no block, and chains have no circles
                continue
            block, parent = blocks[at], blocks[above]
            states[block] = pack_state(parent, copies, at) if copies else b""
            naive.set_copies("w", block, parent, copies)
        view.apply(Entry(b"%d-0" % number, view.applied, Head(), pack_delta(states)))
        assert content(index, "w") == content(naive, "w")
        for block in content(naive, "w"):
            chain: list[BlockHash] = []
            at_block: BlockHash | None = block
            while at_block is not None and at_block != ROOT:
                chain.insert(0, at_block)
                at_block = naive.parent("w", at_block)
            assert index.match(chain) == naive.match(chain)


def test_a_change_without_blocks_is_published_as_nothing() -> None:
    index, engine = Index(4), Engine("w")
    publication = Publication(index, "w", EngineSource(engine, index))
    publication.saw(FeedChange(False, {}))
    assert publication.next_delta() is None
