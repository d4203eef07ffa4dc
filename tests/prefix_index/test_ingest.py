"""Events of one worker end up as the blocks it holds, under our own hashes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from prefix_index import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Hit,
    Index,
    WorkerFeed,
    hash_blocks,
    root_hash,
)
from prefix_index.blocks import hash_block
from prefix_index.events import EngineHash, Event
from prefix_index.index import Tier
from prefix_index.ingest import FeedChange
from prefix_index.names import NAME_BYTES, NameBudget, Names

B = 4
TOKENS = list(range(100, 100 + 8 * B))
OURS = hash_blocks(TOKENS, B, root_hash("m"))


def stored(first: int, last: int, parent: EngineHash | None = None, **more: Any) -> BlockStored:
    """Return the event of blocks first..last-1 of TOKENS, whose engine hashes are 1, 2, ..."""
    fields: dict[str, Any] = {
        "block_hashes": list(range(first + 1, last + 1)),
        "parent_block_hash": parent if parent is not None else (first or None),
        "token_ids": TOKENS[first * B : last * B],
        "block_size": B,
        "medium": "GPU",
    }
    return BlockStored(**(fields | more))


def removed(*hashes: EngineHash, medium: str | None = "GPU", **more: Any) -> BlockRemoved:
    return BlockRemoved(list(hashes), medium, **more)


@dataclass
class Worker:
    """One worker's feed and index."""

    index: Index
    feed: WorkerFeed

    def apply(self, *events: Event) -> None:
        self.feed.apply(EventBatch(1.0, list(events)))

    def hit(self, hashes: list[bytes] = OURS) -> int:
        """Return the blocks of a chain that the worker is credited with."""
        return self.index.match(hashes).get("w", Hit()).total // B


@pytest.fixture
def worker() -> Worker:
    index = Index(B)
    return Worker(index, WorkerFeed(index, "w", "m"))


def test_blocks_are_known_by_their_tokens_whatever_the_engine_calls_them() -> None:
    index = Index(B)
    names: list[list[EngineHash]] = [[1, 2], [2**64 - 1, -5], [b"\x01" * 32, b"\x02" * 32]]
    for at, hashes in enumerate(names):
        feed = WorkerFeed(index, f"w{at}", "m")
        feed.apply(EventBatch(1.0, [stored(0, 2, block_hashes=hashes)]))
        feed.apply(EventBatch(1.0, [stored(2, 3, parent=hashes[1], block_hashes=[77])]))

    assert index.match(OURS) == {f"w{at}": Hit(gpu=3 * B) for at in range(3)}


def test_a_store_a_removal_and_the_counters(worker: Worker) -> None:
    worker.apply(stored(0, 4), removed(4), removed(3), removed(99))

    assert worker.hit() == 2
    assert (worker.feed.stored, worker.feed.removed, worker.feed.block_size) == (4, 2, B)
    assert worker.feed.orphans == worker.feed.rejected == 0


def test_a_hash_stored_twice_is_credited_until_its_second_removal(worker: Worker) -> None:
    worker.apply(stored(0, 3), stored(2, 3))
    hits = []
    for _ in range(3):
        worker.apply(removed(3))
        hits.append(worker.hit())

    assert hits == [3, 2, 2]


def test_orphans_wait_for_their_parent_and_are_no_roots(worker: Worker) -> None:
    worker.apply(stored(4, 6), stored(2, 4))

    assert worker.hit() == 0
    assert worker.index.num_blocks == 0
    assert (worker.feed.orphans, worker.feed.waiting) == (2, 2)

    worker.apply(stored(0, 2))

    assert worker.hit() == 6
    assert worker.feed.waiting == 0


def test_what_happens_to_an_orphan_while_it_waits_is_not_forgotten(worker: Worker) -> None:
    worker.apply(stored(2, 5), removed(5))
    worker.apply(stored(3, 4, token_ids=[], block_size=0, medium="CPU"), removed(4))
    worker.apply(stored(0, 2))

    assert worker.index.match(OURS) == {"w": Hit(gpu=3 * B, cpu=B)}


def test_a_thousand_orphans_in_a_row_attach_at_once() -> None:
    tokens = list(range(2000 * B))
    index = Index(B)
    feed = WorkerFeed(index, "w", "m")
    for block in range(1, 2000):
        ids = tokens[block * B : (block + 1) * B]
        feed.apply(EventBatch(1.0, [BlockStored([block], block - 1, ids, B)]))
    feed.apply(EventBatch(1.0, [BlockStored([0], None, tokens[:B], B)]))

    assert index.match(hash_blocks(tokens, B, root_hash("m"))) == {"w": Hit(gpu=2000 * B)}


def test_orphans_whose_parent_never_comes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefix_index.ingest._MAX_WAITING_BYTES", 10_000)
    index = Index(B)
    feed = WorkerFeed(index, "w", "m")
    names = count(1000)
    for parent in range(50):
        hashes: list[EngineHash] = [next(names), next(names)]
        feed.apply(EventBatch(1.0, [BlockStored(hashes, parent, TOKENS[: 2 * B], B)]))

    assert 5 < feed.waiting < 30
    assert feed.orphans == 50
    assert feed.rejected == 50 - feed.waiting
    # The newest are the ones that wait.
    feed.apply(EventBatch(1.0, [stored(0, 1, block_hashes=[49])]))
    assert index.num_blocks == 3


def test_what_happens_to_waiting_blocks_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefix_index.ingest._MAX_WAITING_BYTES", 10_000)
    feed = WorkerFeed(Index(B), "w", "m")
    feed.apply(EventBatch(1.0, [stored(4, 5)]))
    for _ in range(1000):
        feed.apply(EventBatch(1.0, [removed(5), stored(4, 5, token_ids=[], block_size=0)]))

    assert feed._orphans.num_bytes <= 10_000


def test_groups_that_do_not_count_are_bounded() -> None:
    feed = WorkerFeed(Index(B), "w", "m")
    for group in range(1000):
        feed.apply(
            EventBatch(1.0, [stored(0, 1, group_idx=group, kv_cache_spec_kind="sliding_window")])
        )

    assert len(feed._other_groups) <= 64
    assert feed.stored == 0


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
def test_full_attention_groups_count(worker: Worker, kind: str | None) -> None:
    worker.apply(stored(0, 2, group_idx=5, kv_cache_spec_kind=kind))

    assert worker.hit() == 2


def test_other_groups_do_not_count_though_their_hashes_are_the_same(worker: Worker) -> None:
    sliding: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    worker.apply(stored(0, 3, **sliding), stored(0, 3, **full))
    worker.apply(removed(1, 2, 3, group_idx=0))
    worker.apply(stored(0, 3, token_ids=[], block_size=0, medium="CPU", group_idx=0))

    assert worker.index.match(OURS) == {"w": Hit(gpu=3 * B)}
    assert worker.index.blocks_by_tier("w")["cpu"] == 0

    worker.apply(removed(3, group_idx=1))

    assert worker.hit() == 2


@pytest.mark.parametrize(
    "event",
    [
        stored(0, 3, block_hashes=[1, 2]),
        stored(0, 1, token_ids=TOKENS[:3]),
        stored(0, 2, block_size=2 * B),
        stored(0, 2, block_size=0),
        stored(0, 1, block_hashes=[]),
    ],
    ids=["fewer hashes", "fewer tokens", "other block size", "no block size", "no hashes"],
)
def test_hashes_and_tokens_that_do_not_agree_are_never_paired(
    worker: Worker, event: BlockStored
) -> None:
    worker.apply(event)

    assert worker.index.num_blocks == 0
    assert worker.feed.rejected == 1


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, "gpu"),
        ("GPU", "gpu"),
        ("Gpu", "gpu"),
        ("CPU", "cpu"),
        ("CPU_PINNED", "cpu"),
        ("STORAGE", "disk"),
        ("DISK", "disk"),
        ("SHARED_STORAGE", "remote"),
        ("EXTERNAL", "remote"),
        ("TAPE", "remote"),
    ],
)
def test_media_are_tiers(worker: Worker, medium: str | None, tier: Tier) -> None:
    worker.apply(stored(0, 2, medium=medium))

    assert worker.index.match(OURS) == {"w": Hit(**{tier: 2 * B})}

    worker.apply(removed(1, 2, medium=medium and medium.lower()))

    assert worker.index.num_blocks == 0


def test_offloaded_copies_announced_without_tokens_attach_by_engine_hash(worker: Worker) -> None:
    worker.apply(stored(0, 3), stored(0, 3, token_ids=[], block_size=0, medium="CPU"))
    worker.apply(removed(3, 2, 1))

    assert worker.index.match(OURS) == {"w": Hit(cpu=3 * B)}

    worker.apply(removed(3, medium="CPU"))

    assert worker.index.match(OURS) == {"w": Hit(cpu=2 * B)}


def test_an_offload_announced_after_the_block_left_the_gpu_still_attaches(worker: Worker) -> None:
    worker.apply(stored(0, 3), removed(3))
    worker.apply(stored(2, 3, token_ids=[], block_size=0, medium="STORAGE"))

    assert worker.index.match(OURS) == {"w": Hit(gpu=2 * B, disk=B)}


def test_offloads_of_blocks_never_seen_are_counted_and_nothing_more(worker: Worker) -> None:
    worker.apply(stored(0, 2, token_ids=[], block_size=0, medium="CPU"))

    assert worker.index.num_blocks == 0
    assert worker.feed.rejected == 2


def test_salt_and_adapter_make_other_chains(worker: Worker) -> None:
    salted = hash_blocks(TOKENS, B, root_hash("m", salt="tenant-a"))
    adapted = hash_blocks(TOKENS, B, root_hash("m", adapter="ad1"))
    both = hash_blocks(TOKENS, B, root_hash("m", adapter="ad1", salt="tenant-a"))
    worker.apply(stored(0, 2, block_hashes=[11, 12], extra_keys=[["tenant-a"], None]))
    worker.apply(stored(2, 3, parent=12, block_hashes=[13]))

    assert [worker.hit(chain) for chain in (OURS, salted, adapted, both)] == [0, 3, 0, 0]

    lora: dict[str, Any] = {"lora_id": 1, "lora_name": "ad1"}
    worker.apply(stored(0, 2, block_hashes=[21, 22], extra_keys=[["ad1"], ["ad1"]], **lora))
    worker.apply(stored(0, 1, block_hashes=[31], extra_keys=[["ad1", "tenant-a"]], **lora))

    assert [worker.hit(chain) for chain in (OURS, salted, adapted, both)] == [0, 3, 2, 1]


def test_a_lower_copy_described_without_its_salt_stays_with_its_tenant(worker: Worker) -> None:
    salted = hash_blocks(TOKENS, B, root_hash("m", salt="tenant-a"))
    worker.apply(stored(0, 2, extra_keys=[["tenant-a"], None]))
    worker.apply(stored(0, 2, medium="CPU"), removed(2, 1))

    assert worker.index.match(salted) == {"w": Hit(cpu=2 * B)}
    assert worker.hit() == 0


def test_what_follows_a_block_described_without_its_salt_stays_with_its_tenant(
    worker: Worker,
) -> None:
    salted = hash_blocks(TOKENS, B, root_hash("m", salt="tenant-a"))
    worker.apply(stored(0, 2, extra_keys=[["tenant-a"], None]))
    worker.apply(stored(0, 4, medium="CPU"))

    assert worker.index.match(salted) == {"w": Hit(gpu=2 * B, cpu=2 * B)}
    assert worker.hit() == 0


def test_an_adapter_known_only_by_number_is_not_the_base_model(worker: Worker) -> None:
    worker.apply(stored(0, 2, lora_id=7))

    assert worker.index.num_blocks == 2
    assert worker.hit() == 0


def test_multimodal_items_are_part_of_their_blocks(worker: Worker) -> None:
    image, other = ["image-1", 2], ["image-2", 2]
    worker.apply(stored(0, 3, extra_keys=[None, [image], None]))
    worker.apply(stored(0, 3, block_hashes=[11, 12, 13], extra_keys=[None, [other], None]))

    assert worker.hit() == 1
    assert worker.index.num_blocks == 5


def test_an_image_on_the_first_block_is_not_taken_for_a_salt(worker: Worker) -> None:
    worker.apply(stored(0, 1, extra_keys=[[["image-1", 0], "tenant-a"]]))
    root = root_hash("m", salt="tenant-a")
    plain = hash_blocks(TOKENS[:B], B, root)

    assert worker.hit(plain) == 0
    assert worker.index.holds("w", hash_block(TOKENS[:B], root, b"\x91\x92\xa7image-1\x00"))


def test_a_reset_clears_at_its_place_in_the_batch(worker: Worker) -> None:
    worker.apply(stored(0, 4), stored(6, 8))
    worker.apply(AllBlocksCleared(), stored(0, 2))

    assert worker.hit() == 2
    assert worker.feed.waiting == 0

    worker.apply(stored(2, 3, parent=4, block_hashes=[55]))

    assert worker.feed.waiting == 1


def test_clearing_forgets_the_names_too(worker: Worker) -> None:
    worker.apply(stored(0, 4))
    worker.feed.clear()
    worker.apply(stored(4, 5))

    assert worker.index.num_blocks == 0
    assert worker.feed.waiting == 1


def test_an_engine_that_never_removes_does_not_grow_the_feed_without_bound() -> None:
    index = Index(B, max_blocks=100)
    feed = WorkerFeed(index, "w", "m")
    for name in range(1000):
        feed.apply(EventBatch(1.0, [BlockStored([name], None, [name] * B, B)]))

    assert index.num_blocks == 100
    assert feed.num_names <= 125
    # The view goes on with what is new, since names of what it gave up make room.
    assert index.holds("w", hash_blocks([999] * B, B, root_hash("m"))[0])
    assert feed.unnamed == 0


def test_beyond_the_budget_of_names_new_blocks_are_refused_until_old_ones_leave() -> None:
    index = Index(B)
    budget = NameBudget(3 * NAME_BYTES)
    feed = WorkerFeed(index, "w", "m", budget=budget)
    other = WorkerFeed(index, "v", "m", budget=budget)
    feed.apply(EventBatch(1.0, [stored(0, 2)]))
    other.apply(EventBatch(1.0, [stored(0, 2)]))

    assert (feed.unnamed, other.unnamed) == (0, 2)
    assert index.match(OURS) == {"w": Hit(gpu=2 * B)}

    # One more copy needs no new name.
    feed.apply(EventBatch(1.0, [stored(0, 2)]))
    assert feed.stored == 4

    feed.apply(EventBatch(1.0, [removed(2, 1), removed(2, 1)]))
    other.apply(EventBatch(1.0, [stored(0, 2)]))

    assert index.match(OURS) == {"v": Hit(gpu=2 * B)}

    other.clear()
    assert budget.used_bytes == 0
    assert not budget.sweep(10)


def test_the_names_of_a_cleared_worker_are_freed_in_slices() -> None:
    budget = NameBudget(100 * NAME_BYTES)
    feed = WorkerFeed(Index(B), "w", "m", budget=budget)
    feed.apply(EventBatch(1.0, [stored(0, 8)]))
    feed.clear()

    assert feed.num_names == 0
    assert budget.sweep(5)
    assert not budget.sweep(5)


def test_changes_are_told_once_a_batch_with_the_names_of_their_blocks() -> None:
    index = Index(B)
    feed = WorkerFeed(index, "w", "m")
    changes: list[FeedChange] = []
    feed.on_change = changes.append
    feed.apply(EventBatch(1.0, [stored(0, 3), removed(3)]))

    assert changes == [FeedChange(False, {OURS[0]: 1, OURS[1]: 2, OURS[2]: 3})]
    assert [index.holds("w", block) for block in changes[0].blocks] == [True, True, False]

    feed.apply(EventBatch(1.0, [stored(0, 1, token_ids=[], block_size=0, medium="CPU")]))
    feed.apply(EventBatch(1.0, [removed(77)]))
    assert changes[1:] == [FeedChange(False, {OURS[0]: 1})]

    feed.apply(EventBatch(1.0, [stored(2, 3), AllBlocksCleared(), stored(0, 1)]))
    feed.clear()
    assert changes[2:] == [FeedChange(True, {OURS[0]: 1}), FeedChange(True, {})]


def test_what_happened_before_somebody_listens_is_not_told_later() -> None:
    feed = WorkerFeed(Index(B), "w", "m")
    feed.apply(EventBatch(1.0, [AllBlocksCleared(), stored(0, 3)]))
    changes: list[FeedChange] = []
    feed.on_change = changes.append
    feed.apply(EventBatch(1.0, [removed(3)]))

    assert changes == [FeedChange(False, {OURS[2]: 3})]


def test_a_feed_goes_on_with_the_names_of_the_one_before_it() -> None:
    index = Index(B)
    names = Names(NameBudget.for_blocks(100), lambda block: index.holds("w", block))
    WorkerFeed(index, "w", "m", names=names).apply(EventBatch(1.0, [stored(0, 3)]))
    second = WorkerFeed(index, "w", "m", names=names)
    second.apply(EventBatch(1.0, [removed(3), stored(3, 4), removed(2)]))

    assert index.match(OURS) == {"w": Hit(gpu=B)}
    assert (second.orphans, second.rejected) == (1, 0)


def test_an_adopted_name_continues_and_removes_like_one_that_was_announced() -> None:
    index = Index(B)
    index.store("w", OURS[:2], root_hash("m"))
    feed = WorkerFeed(index, "w", "m")
    assert feed.adopt([1, 2], OURS[:2])
    feed.apply(EventBatch(1.0, [stored(2, 3)]))

    assert index.match(OURS) == {"w": Hit(gpu=3 * B)}

    feed.apply(EventBatch(1.0, [removed(3, 2)]))

    assert index.match(OURS) == {"w": Hit(gpu=B)}
