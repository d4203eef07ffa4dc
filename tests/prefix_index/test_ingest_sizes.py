"""Workers whose blocks are larger than the index's: what they hold is known in tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_index import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    Hit,
    Index,
    WorkerFeed,
    hash_blocks,
    root_hash,
)
from prefix_index.blocks import BlockHash
from prefix_index.events import EngineHash, Event
from prefix_index.index import Tier
from prefix_index.ingest import FeedChange
from prefix_index.names import NameBudget, Names
from tests.prefix_index.sized_engine import SizedEngine

B = 4
ROOT = root_hash("m")


class Coarse(SizedEngine):
    """An engine with blocks of ``num_parts`` times the index's, read by a feed."""

    def __init__(self, index: Index, worker: str, num_parts: int) -> None:
        super().__init__(num_parts * B, self.apply)
        self.worker = worker
        self.index = index
        self.feed = WorkerFeed(index, worker, "m")

    def apply(self, *events: Event) -> None:
        self.feed.apply(EventBatch(1.0, list(events)))

    def restart(self, *, is_told: bool) -> None:
        if is_told:
            self.reset()
        else:
            self.feed.clear()
            self.forget()

    def believed_tokens(self, tokens: list[int]) -> int:
        """Return the leading tokens that the index says it holds, in whole blocks of its own."""
        hit = self.index.match(hash_blocks(tokens, B, ROOT)).get(self.worker, Hit())
        return hit.total // self.size * self.size


def believed(index: Index, worker: str) -> dict[BlockHash, Counter[Tier]]:
    return {
        block: Counter({"gpu": copies & 0xFFFF, "cpu": copies >> 16 & 0xFFFF})
        for block, _, copies in index.entries(worker)
    }


def held_names(engine: Coarse) -> set[EngineHash]:
    return {name for name, _ in engine.feed._names.items()}


# Two tokens and short blocks, so that prompts part inside a block as often as between two.
prompts = st.lists(st.sampled_from([7, 8]), max_size=10).map(
    lambda picks: [token for pick in picks for token in [pick] * (B - 1)]
)
moves = st.one_of(
    st.tuples(st.sampled_from(["store", "store in cpu", "offload"]), prompts),
    st.tuples(st.sampled_from(["remove", "remove", "remove from cpu"]), st.integers(0, 20)),
    st.tuples(st.sampled_from(["restart", "reset"]), st.none()),
    st.tuples(st.just("hand over"), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_the_index_equals_in_tokens_what_engines_of_any_block_sizes_hold(
    sizes: list[int], data: st.DataObject
) -> None:
    index = Index(B)
    engines = [Coarse(index, f"w{at}", num_parts) for at, num_parts in enumerate(sizes)]
    told: list[dict[BlockHash, EngineHash | None]] = [{} for _ in engines]
    for at, move, argument in data.draw(
        st.lists(
            st.tuples(st.integers(0, len(sizes) - 1), moves).map(lambda pair: (pair[0], *pair[1])),
            max_size=30,
        )
    ):
        engine = engines[at]
        engine.feed.on_change = lambda change, at=at: take(told[at], change)  # type: ignore[misc]
        do(engine, move, argument, told[at])

    for engine, names in zip(engines, told, strict=True):
        assert believed(index, engine.worker) == engine.copies(B, ROOT)
        assert {block for block in names if index.holds(engine.worker, block)} == set(
            engine.copies(B, ROOT)
        )
        # Nothing is named that is not held: names must not pile up under shared beginnings.
        assert len(held_names(engine)) <= len(engine.copies(B, ROOT))
    for tokens in data.draw(st.lists(prompts, min_size=1, max_size=3)):
        for engine in engines:
            assert engine.believed_tokens(tokens) == engine.hit_tokens(tokens)


def take(told: dict[BlockHash, EngineHash | None], change: FeedChange) -> None:
    if change.cleared:
        told.clear()
    told.update(change.blocks)


def do(
    engine: Coarse,
    move: str,
    argument: list[int] | int | None,
    told: dict[BlockHash, EngineHash | None],
) -> None:
    if isinstance(argument, list):
        if move == "offload":
            engine.offload(argument)
        else:
            engine.store(argument, "cpu" if "cpu" in move else "gpu")
    elif isinstance(argument, int):
        engine.remove(argument, "cpu" if "cpu" in move else "gpu")
    elif move == "hand over":
        hand_over(engine, told)
    else:
        engine.restart(is_told=move == "reset")


def hand_over(engine: Coarse, told: dict[BlockHash, EngineHash | None]) -> None:
    """Let another feed go on, which knows of the names only what was told."""
    index, worker = engine.index, engine.worker
    budget = NameBudget.for_blocks(index.max_blocks)
    names = Names(budget, lambda block: index.holds(worker, block))
    listener = engine.feed.on_change
    engine.feed = WorkerFeed(index, worker, "m", names=names)
    engine.feed.on_change = listener
    named = [
        (name, block)
        for block, name in told.items()
        if name is not None and index.holds(worker, block)
    ]
    engine.feed.adopt([name for name, _ in named], [block for _, block in named])


NUM_PARTS = 4
SIZE = NUM_PARTS * B
TOKENS = list(range(100, 100 + 3 * SIZE))
OURS = hash_blocks(TOKENS, B, ROOT)


@pytest.fixture
def engine() -> Coarse:
    return Coarse(Index(B), "w", NUM_PARTS)


def num_held(engine: Coarse) -> int:
    """Return the leading blocks of TOKENS that the index credits to it."""
    return engine.index.match(OURS).get("w", Hit()).total // B


def test_a_store_and_a_removal_count_all_parts(engine: Coarse) -> None:
    engine.apply(engine.stored(TOKENS))
    assert (num_held(engine), engine.feed.stored, engine.feed.block_size) == (12, 12, SIZE)

    engine.apply(BlockRemoved([engine.name(tuple(TOKENS))], "GPU"))
    assert (num_held(engine), engine.feed.removed) == (8, 4)
    assert engine.index.num_blocks == 8
    assert engine.feed.num_names == 8


def test_blocks_that_wait_for_their_parent_are_whole(engine: Coarse) -> None:
    engine.apply(engine.stored(TOKENS, first=2))
    engine.apply(engine.stored(TOKENS[: 2 * SIZE], first=1))
    assert (num_held(engine), engine.feed.waiting) == (0, 2)

    engine.apply(BlockRemoved([engine.name(tuple(TOKENS))], "GPU"))
    engine.apply(engine.stored(TOKENS[:SIZE]))
    assert (num_held(engine), engine.feed.waiting) == (8, 0)


@pytest.mark.parametrize("is_removed_first", [False, True])
def test_a_copy_announced_without_tokens_has_all_parts(
    engine: Coarse, is_removed_first: bool
) -> None:
    engine.apply(engine.stored(TOKENS))
    ends = engine.ends(TOKENS)
    names: list[EngineHash] = [*map(engine.name, ends)]
    events: list[Event] = [
        BlockStored(names[1:], None, [], 0, medium="CPU"),
        BlockRemoved([names[2], names[1]], "GPU"),
    ]
    engine.apply(*(reversed(events) if is_removed_first else events))

    assert engine.index.match(OURS) == {"w": Hit(gpu=SIZE, cpu=2 * SIZE)}
    assert engine.feed.rejected == 0


@pytest.mark.parametrize("extras", [[["image"], None, None], [None, ["image"]], [[], [], ["i", 3]]])
def test_what_an_engine_adds_to_a_block_is_in_none_of_a_prompts_own(
    engine: Coarse, extras: list[list[object] | None]
) -> None:
    first = next(at for at, keys in enumerate(extras) if keys)
    event = engine.stored(TOKENS)
    extras = [keys and [(key, 0) for key in keys] for keys in extras]
    engine.apply(BlockStored(event.block_hashes, None, event.token_ids, SIZE, extra_keys=extras))

    assert num_held(engine) == first * NUM_PARTS
    assert engine.index.num_blocks == 12


@pytest.mark.parametrize(("adapter", "salt"), [("", ""), ("lora", ""), ("", "tenant"), ("a", "b")])
def test_a_prompts_chain_is_the_one_of_its_parts_whatever_its_root(
    engine: Coarse, adapter: str, salt: str
) -> None:
    event = engine.stored(TOKENS)
    lead = [adapter] if adapter else []
    engine.apply(
        BlockStored(
            event.block_hashes,
            None,
            event.token_ids,
            SIZE,
            lora_name=adapter or None,
            extra_keys=[[*lead, salt] if salt else lead, lead, lead],
        )
    )
    chain = hash_blocks(TOKENS, B, root_hash("m", adapter=adapter, salt=salt))

    assert engine.index.match(chain) == {"w": Hit(gpu=3 * SIZE)}


def test_a_block_described_again_without_its_salt_stays_with_its_tenant(engine: Coarse) -> None:
    event = engine.stored(TOKENS)
    salted = BlockStored(event.block_hashes, None, TOKENS, SIZE, extra_keys=[["tenant"]])
    engine.apply(salted, BlockStored(event.block_hashes, None, TOKENS, SIZE, medium="CPU"))

    chain = hash_blocks(TOKENS, B, root_hash("m", salt="tenant"))
    assert engine.index.match(chain) == {"w": Hit(gpu=3 * SIZE)}
    assert {copies for _, _, copies in engine.index.entries("w")} == {1 | 1 << 16}


def unfinished(tokens: int, name: int) -> BlockStored:
    return BlockStored([name], None, TOKENS[:tokens], tokens)


@pytest.mark.parametrize("tokens", range(1, SIZE))
def test_an_unfinished_block_neither_counts_nor_tells_the_size(engine: Coarse, tokens: int) -> None:
    engine.apply(engine.stored(TOKENS), unfinished(tokens, 900))
    assert (engine.feed.block_size, engine.feed.partial, engine.feed.rejected) == (SIZE, 1, 0)

    other = Coarse(Index(B), "w", NUM_PARTS)
    other.apply(unfinished(tokens, 900))
    other.apply(other.stored(TOKENS))
    other.apply(BlockRemoved([900], "GPU"))
    assert other.feed.block_size == SIZE
    assert other.feed.implausible == 0
    assert num_held(other) == 12
    assert believed(other.index, "w") == believed(engine.index, "w")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 9, 14, 18])
def test_a_size_that_is_no_multiple_is_learned_and_nothing_is_taken(size: int) -> None:
    index = Index(B)
    feed = WorkerFeed(index, "w", "m")
    feed.apply(EventBatch(1.0, [BlockStored([1, 2], None, [*range(2 * size)], size)]))

    assert (feed.block_size, feed.rejected, feed.implausible) == (size, 1, 0)
    assert index.num_blocks == 0


def test_a_settled_size_does_not_change_before_the_cache_is_new(engine: Coarse) -> None:
    engine.apply(engine.stored(TOKENS))
    for event in sizes_of(TOKENS, but=SIZE):
        engine.apply(event)
    assert (engine.feed.block_size, num_held(engine)) == (SIZE, 12)
    assert engine.feed.implausible > 0

    engine.feed.clear()
    engine.apply(BlockStored([1, 2], None, TOKENS[: 2 * B], B))
    assert (engine.feed.block_size, num_held(engine)) == (B, 2)


def sizes_of(tokens: list[int], *, but: int) -> Iterator[BlockStored]:
    for size in (B, 2 * B, 3 * B, 6 * B):
        if size != but:
            number = len(tokens) // size
            names: list[EngineHash] = [*range(1000 * size, 1000 * size + number)]
            yield BlockStored(names, None, tokens[: number * size], size)


def test_an_engine_that_says_one_size_and_sends_another_is_not_paired(engine: Coarse) -> None:
    engine.apply(BlockStored([1], None, TOKENS[:B], SIZE))
    assert (engine.index.num_blocks, engine.feed.implausible) == (0, 1)


def test_a_shared_index_whose_parents_run_in_a_ring_holds_nobody_up(engine: Coarse) -> None:
    one, two = b"1" * 16, b"2" * 16
    engine.index.set_copies("w", one, two, 1)
    engine.index.set_copies("w", two, one, 1)
    engine.feed.adopt([77, one, two], [one, one, two])
    engine.apply(BlockRemoved([77], "GPU"), BlockStored([77], None, [], 0, medium="CPU"))

    assert engine.feed.num_names <= 3


def test_the_parts_of_a_block_find_no_room_alone() -> None:
    index = Index(B)
    feed = WorkerFeed(index, "w", "m", budget=NameBudget.for_blocks(8))
    for at in range(4):
        ids = [at * 1000 + offset for offset in range(SIZE)]
        feed.apply(EventBatch(1.0, [BlockStored([at], None, ids, SIZE)]))

    # Eight blocks and a fifth of slack: two blocks of four parts each.
    assert (index.num_blocks, feed.num_names, feed.unnamed) == (8, 8, 8)
