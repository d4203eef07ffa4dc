"""Events that are put together mean what they meant apart."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_index import BlockRemoved, BlockStored, EventBatch, Index, WorkerFeed
from prefix_index.events import Event
from prefix_index.index import TIERS
from prefix_index.joining import joined

B = 4


def stored(number: int, **more: Any) -> BlockStored:
    fields: dict[str, Any] = {
        "block_hashes": [number],
        "parent_block_hash": number - 1 or None,
        "token_ids": [number] * B,
        "block_size": B,
        **more,
    }
    return BlockStored(**fields)


def test_what_follows_each_other_is_one_event() -> None:
    events: list[Event] = [stored(1), stored(2), stored(3), BlockRemoved([3]), BlockRemoved([2])]
    first, second = joined(events)

    assert isinstance(first, BlockStored)
    assert (first.block_hashes, len(first.token_ids)) == ([1, 2, 3], 3 * B)
    assert second == BlockRemoved([3, 2])
    assert events[0] == stored(1)


def test_what_differs_in_anything_stays_apart() -> None:
    others: list[dict[str, Any]] = [
        {"medium": "CPU"},
        {"group_idx": 1},
        {"kv_cache_spec_kind": "sliding_window"},
        {"lora_name": "ad1", "lora_id": 1},
        {"extra_keys": [[["image", 1]]]},
        {"parent_block_hash": 7},
        {"token_ids": [], "block_size": 0},
        {"token_ids": [1]},
    ]
    for other in others:
        assert len(joined([stored(1), stored(2, **other)])) == 2, other
    assert len(joined([BlockRemoved([1]), BlockRemoved([2], "CPU")])) == 2
    assert len(joined([BlockRemoved([1]), BlockRemoved([2], group_idx=0)])) == 2
    assert len(joined([stored(1, extra_keys=[["salt"]]), stored(2)])) == 1
    assert len(joined([stored(1, extra_keys=[["salt"], ["x"]]), stored(2)])) == 2


# An engine hash always stands for the same extras.
EXTRAS: dict[int, Any] = {1: [["salt"]], 3: [[["image", 1]]], 4: [None]}
events = st.one_of(
    st.builds(
        lambda number, medium: stored(number, medium=medium, extra_keys=EXTRAS.get(number)),
        st.integers(1, 6),
        st.sampled_from(["GPU", "GPU", "GPU", "CPU"]),
    ),
    st.builds(
        BlockRemoved,
        st.lists(st.integers(1, 6), min_size=1, max_size=2),
        st.sampled_from(["GPU", "GPU", "CPU"]),
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(events, max_size=12))
def test_together_and_apart_leave_the_same_index(batch: list[Event]) -> None:
    together, apart = Index(B), Index(B)
    one, other = WorkerFeed(together, "w", "m"), WorkerFeed(apart, "w", "m")
    changed: dict[bytes, Any] = {}
    one.on_change = lambda change: changed.update(change.blocks)
    one.apply(EventBatch(1.0, list(batch)))
    for event in batch:
        other.apply(EventBatch(1.0, [event]))

    blocks = {block for _, block in one._names.items()} | set(changed)
    assert sorted(map(str, one._names.items())) == sorted(map(str, other._names.items()))
    assert bool(one.waiting) == bool(other.waiting)
    assert together.num_blocks == apart.num_blocks
    for block in blocks:
        assert together.copies("w", block) == apart.copies("w", block)
        assert together.parent("w", block) == apart.parent("w", block)
    assert together.blocks_by_tier("w") == apart.blocks_by_tier("w")
    assert set(together.blocks_by_tier("w")) == set(TIERS)
