"""A pool's workers come, go, drain, restart and are of different kinds."""

from __future__ import annotations

import pytest

from gateway.routing.pool import MAX_DIVERGED, Worker
from prefix_index.blocks import root_hash
from prefix_index.index import Index
from prefix_index.prompts import Prompt
from tests.gateway.routing_parts import BLOCK, make_pool, prompt_reader

PROMPT = Prompt.from_ids(range(160), BLOCK, root_hash("m"))


def test_two_workers_cannot_have_one_id() -> None:
    pool = make_pool(2)

    with pytest.raises(ValueError, match="'w0' is taken in pool 'chat'"):
        pool.add(Worker("w0", "http://127.0.0.1:1"))


def test_a_removed_worker_leaves_ring_and_index() -> None:
    pool = make_pool(3)
    assert pool.index is not None
    pool.index.store("w1", PROMPT.block_hashes, PROMPT.root)
    removed = pool.remove("w1")

    assert removed is not None
    assert "w1" not in pool.workers
    assert pool.index.match(PROMPT.block_hashes) == {}
    assert all("w1" not in pool.ring.order(f"k{i}") for i in range(50))
    assert pool.remove("w1") is None


def test_draining_can_be_taken_back_and_needs_a_known_worker() -> None:
    pool = make_pool(2)
    pool.drain("w0")
    assert pool.workers["w0"].draining
    pool.drain("w0", draining=False)
    assert not pool.workers["w0"].draining
    with pytest.raises(KeyError):
        pool.drain("w9")


def test_workers_without_events_are_modelled_by_our_own_routings() -> None:
    pool = make_pool(2, mode="approximate")
    worker = pool.workers["w0"]
    residency = pool.residency(worker)
    assert residency is not None
    assert pool.index is not None
    residency.touch(PROMPT.block_hashes, PROMPT.root)
    assert pool.index.match(PROMPT.block_hashes)["w0"].gpu == 160
    assert pool.residency(worker) is residency

    pool.forget(worker)
    assert pool.index.match(PROMPT.block_hashes) == {}
    assert pool.residency(worker) is not residency


def test_a_modelled_worker_keeps_no_more_than_its_capacity() -> None:
    pool = make_pool(1, mode="approximate")
    worker = pool.workers["w0"]
    worker.capacity_tokens = 4 * BLOCK
    residency = pool.residency(worker)
    assert residency is not None
    assert pool.index is not None
    residency.touch(PROMPT.block_hashes, PROMPT.root)

    assert pool.index.match(PROMPT.block_hashes)["w0"].gpu == 4 * BLOCK


def test_event_fed_and_text_workers_are_not_modelled() -> None:
    pool = make_pool(2, mode="exact")
    assert pool.residency(pool.workers["w0"]) is None
    pool.set_mode(pool.workers["w0"], "text")
    assert pool.residency(pool.workers["w0"]) is None


def test_another_way_of_knowing_starts_from_nothing() -> None:
    pool = make_pool(2, mode="exact")
    assert pool.index is not None
    pool.index.store("w0", PROMPT.block_hashes, PROMPT.root)
    pool.set_mode(pool.workers["w0"], "exact")
    assert pool.index.match(PROMPT.block_hashes)

    pool.set_mode(pool.workers["w0"], "approximate")
    assert pool.index.match(PROMPT.block_hashes) == {}


def test_hashes_mean_nothing_for_other_block_sizes_and_other_tokens() -> None:
    pool = make_pool(3)
    pool.workers["w0"].block_size = 3 * BLOCK // 2
    pool.workers["w1"].block_size = 2 * BLOCK
    assert [pool.is_readable(w) for w in pool.workers.values()] == [False, True, True]

    worker = pool.workers["w2"]
    for _ in range(MAX_DIVERGED):
        assert pool.is_readable(worker)
        worker.saw_prompt_tokens(ours=10, theirs=11)
    assert worker.parity == 0
    assert not pool.is_readable(worker)
    worker.saw_prompt_tokens(ours=10, theirs=10)
    assert worker.parity == 1
    assert pool.is_readable(worker)


def test_a_pool_learns_its_block_size_with_its_reader() -> None:
    pool = make_pool(1, reads=False)
    pool.use_prompts(prompt_reader(32), Index(32))

    assert pool.block_size == 32
    assert pool.workers["w0"].books.block_size == 32
