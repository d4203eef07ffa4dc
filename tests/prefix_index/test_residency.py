"""The model of a worker that sends no events."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_index import Hit, Index, Residency, hash_blocks, root_hash
from prefix_index.view_blocks import Blocks

B = 16
ROOT = root_hash("m")


def chain(*ids: int) -> list[bytes]:
    return hash_blocks(ids, 1, ROOT)


def hit(index: Index, hashes: list[bytes]) -> int:
    return index.match(hashes).get("w", Hit()).gpu // B


def test_what_was_routed_to_a_worker_is_predicted_to_be_there() -> None:
    index = Index(B)
    residency = Residency(index, "w", 10)
    residency.touch(chain(1, 2, 3), ROOT)
    residency.touch(chain(1, 2, 3), ROOT)
    residency.touch(chain(1, 2, 9), ROOT)

    assert [hit(index, chain(1, 2, 3)), hit(index, chain(1, 2, 9))] == [3, 3]
    assert index.num_blocks == 4


def test_over_capacity_the_least_recently_used_chain_leaves_from_its_end() -> None:
    index = Index(B)
    residency = Residency(index, "w", 6)
    residency.touch(chain(1, 2, 3), ROOT)
    residency.touch(chain(4, 5, 6), ROOT)
    residency.touch(chain(1, 2, 3), ROOT)
    residency.touch(chain(7, 8), ROOT)

    assert [hit(index, c) for c in (chain(1, 2, 3), chain(4, 5, 6), chain(7, 8))] == [3, 1, 2]


def test_a_prompt_larger_than_the_cache_is_kept_as_far_as_it_fits() -> None:
    index = Index(B)
    Residency(index, "w", 3).touch(chain(1, 2, 3, 4, 5), ROOT)

    assert hit(index, chain(1, 2, 3, 4, 5)) == 3


def test_an_observation_corrects_the_model_until_the_next_request_restores_it() -> None:
    index = Index(B)
    residency = Residency(index, "w", 10)
    residency.touch(chain(1, 2, 3, 4), ROOT)
    index.shorten("w", chain(1, 2, 3, 4), 2)

    assert hit(index, chain(1, 2, 3, 4)) == 2

    residency.touch(chain(1, 2, 3, 4), ROOT)

    assert hit(index, chain(1, 2, 3, 4)) == 4


def test_a_chain_that_lost_its_middle_to_a_shorter_one_is_filled_up_again() -> None:
    index = Index(B)
    residency = Residency(index, "w", 100)
    residency.touch(chain(1, 2, 3, 4), ROOT)
    index.shorten("w", chain(1, 2), 1)

    assert hit(index, chain(1, 2, 3, 4)) == 1

    residency.touch(chain(1, 2, 3, 4), ROOT)

    assert hit(index, chain(1, 2, 3, 4)) == 4
    assert index.num_blocks == 4


def test_a_restart_forgets_everything() -> None:
    index = Index(B)
    residency = Residency(index, "w", 3)
    residency.touch(chain(1, 2, 3), ROOT)
    residency.clear()

    assert index.num_blocks == 0

    residency.touch(chain(4, 5), ROOT)

    assert hit(index, chain(4, 5)) == 2


def test_a_worker_without_capacity_is_an_error() -> None:
    with pytest.raises(ValueError, match="positive"):
        Residency(Index(B), "w", 0)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=30),
    st.integers(1, 12),
)
def test_capacity_holds_and_every_block_kept_is_reachable(
    prompts: list[list[int]], capacity: int
) -> None:
    index = Index(B)
    residency = Residency(index, "w", capacity)
    seen: dict[bytes, list[bytes]] = {}
    for prompt in prompts:
        blocks = chain(*prompt)
        residency.touch(blocks, ROOT)
        seen.update((block, blocks[: at + 1]) for at, block in enumerate(blocks))

        assert index.num_blocks <= capacity
        assert hit(index, blocks) == min(len(blocks), capacity)
        held = [path for block, path in seen.items() if index.holds("w", block)]
        assert all(hit(index, path) == len(path) for path in held)


class PlainLru:
    """One entry per block, as an engine keeps it: the definition the model must agree with."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clock = 0
        self.used: dict[bytes, int] = {}
        self.parents: dict[bytes, bytes] = {}

    def touch(self, blocks: list[bytes]) -> None:
        blocks = blocks[: self.capacity]
        self.clock += 1
        parent = ROOT
        for block in blocks:
            self.used[block] = self.clock
            self.parents[block] = parent
            parent = block
        while len(self.used) > self.capacity:
            inner = {self.parents[block] for block in self.used}
            leaves = [block for block in self.used if block not in inner]
            del self.used[min(leaves, key=lambda block: self.used[block])]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40),
    st.integers(6, 14),
)
def test_the_model_keeps_what_a_plain_lru_of_blocks_keeps(
    prompts: list[list[int]], capacity: int
) -> None:
    index = Index(B)
    residency, plain = Residency(index, "w", capacity), PlainLru(capacity)
    seen: set[bytes] = set()
    for prompt in prompts:
        blocks = chain(*prompt)
        seen.update(blocks)
        residency.touch(blocks, ROOT)
        plain.touch(blocks)
        held = {block for block in seen if index.holds("w", block)}

        assert held == plain.used.keys()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 3)),
        max_size=40,
    ),
    st.integers(4, 10),
)
def test_feedback_never_makes_the_model_credit_what_cannot_be_reached(
    steps: list[tuple[list[int], int]], capacity: int
) -> None:
    index = Index(B)
    residency = Residency(index, "w", capacity)
    for prompt, observed in steps:
        blocks = chain(*prompt)
        residency.touch(blocks, ROOT)

        assert hit(index, blocks) == min(len(blocks), capacity)
        assert index.num_blocks <= capacity

        index.shorten("w", blocks, observed)

        assert hit(index, blocks) <= max(observed, 1)


def test_a_chain_asked_again_costs_no_memory() -> None:
    residency = Residency(Index(B), "w", 100)
    for _ in range(1000):
        residency.touch(chain(1, 2, 3), ROOT)
        residency.touch(chain(1, 2, 4), ROOT)

    assert len(residency._leaves) == 2


def test_use_can_be_counted_beyond_what_a_stamp_holds() -> None:
    index = Index(B)
    residency = Residency(index, "w", 10)
    residency.touch(chain(1, 2), ROOT)
    residency._clock = 2**32 - 1
    residency.touch(chain(3, 4), ROOT)
    residency.touch(chain(5), ROOT)

    assert [hit(index, c) for c in (chain(1, 2), chain(3, 4), chain(5))] == [0, 2, 1]


def unique_prompt(number: int) -> list[bytes]:
    """Return the 31 full blocks of a prompt of 2,000 tokens that nobody else has."""
    return hash_blocks([number] * 31, 1, ROOT)


class Traffic:
    """Unique prompts to four workers that tell nothing, in a view that is too small for them."""

    max_blocks = 2000

    def __init__(self) -> None:
        self.index = Index(B, self.max_blocks)
        self.models = [Residency(self.index, f"w{k}", self.max_blocks) for k in range(4)]
        self.num_sent = 0

    def send(self, num_prompts: int) -> None:
        for number in range(self.num_sent, self.num_sent + num_prompts):
            self.models[number % 4].touch(unique_prompt(number), ROOT)
        self.num_sent += num_prompts


def test_memory_levels_off_under_unique_prompts() -> None:
    traffic = Traffic()
    traffic.send(300)  # 9,300 blocks: view and models are full
    tracemalloc.start()
    traffic.send(100)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    traffic.send(300)
    gc.collect()
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert traffic.index.num_blocks <= traffic.max_blocks
    # A tenth of what the prompts would take, if each stayed, in 50 bytes a block.
    assert after - before < 300 * 31 * 5
    assert peak - before < 300 * 31 * 10


def test_the_oldest_unique_prompts_leave_and_no_child_of_theirs_is_credited() -> None:
    traffic = Traffic()
    traffic.send(500)
    index = traffic.index
    hits = [sum(h.gpu for h in index.match(unique_prompt(n)).values()) // B for n in range(500)]

    assert sum(hits[-50:]) == 50 * 31
    assert not any(hits[:350])
    assert sum(hits) == index.num_blocks  # each held block is credited: none lacks its parent


def test_look_ups_take_as_many_steps_after_many_evictions_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traffic = Traffic()
    steps = []
    find = Blocks.find
    monkeypatch.setattr(Blocks, "find", lambda self, block: steps.append(1) or find(self, block))

    def worst() -> int:
        most = 0
        for number in range(traffic.num_sent - 50, traffic.num_sent + 50):
            steps.clear()
            traffic.index.match(unique_prompt(number))
            most = max(most, len(steps))
        return most

    traffic.send(100)
    at_the_start = worst()
    traffic.send(800)

    assert worst() <= at_the_start
    # And a step reads one bucket, of which there are as many as there ever were blocks.
    blocks = traffic.index._view.blocks
    assert len(blocks) <= len(blocks._heads) <= traffic.max_blocks + 100
