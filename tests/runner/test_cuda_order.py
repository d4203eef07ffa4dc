"""Who waits for whom on a GPU, on a device that does everything as late as it may.

``Lagging`` puts work off until somebody waits for it, and then does no more than what that wait
needs: a missing wait shows as bytes of another time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runner.ops.cuda.pool import CudaKvPool
from runner.ops.cuda.ring import NUM_BUFFERS, UploadRing
from runner.tiers.cuda_mover import NUM_GROUPS, CudaBlockMover
from tests.runner.ops_parts import config_of


class Stream:
    def __init__(self) -> None:
        self.todo: deque[Callable[[], object]] = deque()
        self.num_queued = 0
        self.num_done = 0

    def put(self, work: Callable[[], object]) -> None:
        self.todo.append(work)
        self.num_queued += 1

    def run_to(self, count: int) -> None:
        while self.num_done < count:
            work = self.todo.popleft()
            work()
            self.num_done += 1


class Lagging:
    """A ``StreamApi`` whose streams are as late as they may be."""

    def __init__(self, is_pinned: bool = True) -> None:
        self.main = Stream()
        self.now_s = 0.0
        self._is_pinned = is_pinned
        self._own: list[torch.Tensor] = []

    def compute(self) -> Stream:
        return self.main

    def new_stream(self, *, is_urgent: bool) -> Stream:
        return Stream()

    def record(self, stream: Stream) -> tuple[Stream, int]:
        return stream, stream.num_queued

    def hold(self, stream: Stream, event: tuple[Stream, int]) -> None:
        stream.put(lambda: event[0].run_to(event[1]))

    def wait(self, event: tuple[Stream, int]) -> None:
        event[0].run_to(event[1])

    def mark(self, stream: Stream) -> list[float]:
        passed: list[float] = []
        stream.put(lambda: passed.append(self.now_s))
        return passed

    def elapsed_s(self, first: list[float], second: list[float]) -> float:
        return second[0] - first[0]

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copying takes a second."""

        def work() -> None:
            target.copy_(source)
            self.now_s += 1.0

        stream.put(work)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self._own.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self._own[-1]

    def is_pinned(self, host: torch.Tensor) -> bool:
        return self._is_pinned or any(host.data_ptr() == own.data_ptr() for own in self._own)


def make(api: Lagging, num_layers: int = 2) -> tuple[CudaKvPool, CudaBlockMover]:
    config = replace(config_of(heads=2, kv_heads=1), num_layers=num_layers)
    pool = CudaKvPool(6, 16, config, torch.float32, torch.device("cpu"), api, None)
    return pool, pool.new_mover()


def launch(api: Lagging, pool: CudaKvPool, work: Callable[[], object]) -> None:
    """One step: launched, not done."""
    api.main.put(work)
    pool.order.after_step()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_store_has_what_the_step_before_it_wrote(is_pinned: bool) -> None:
    api = Lagging(is_pinned)
    pool, mover = make(api)
    launch(api, pool, lambda: pool.data[2].fill_(7.0))
    kept = memoryview(bytearray(mover.block_bytes))
    mover.copy_out(2, kept)

    assert set(np.frombuffer(kept, np.float32)) == {7.0}


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_load_does_not_change_what_a_step_still_reads(is_pinned: bool) -> None:
    api = Lagging(is_pinned)
    pool, mover = make(api)
    pool.data.fill_(1.0)
    read: list[torch.Tensor] = []
    launch(api, pool, lambda: read.append(pool.data[3].clone()))
    source = np.full(mover.block_bytes // 4, 5.0, np.float32)
    mover.copy_in(memoryview(source).cast("B").toreadonly(), 3)

    assert set(read[0].flatten().tolist()) == {1.0}
    assert set(pool.data[3].flatten().tolist()) == {5.0}
    assert set(pool.data[2].flatten().tolist()) == {1.0}


def test_a_round_trip_keeps_every_bit() -> None:
    api = Lagging()
    pool, mover = make(api)
    pool.data.copy_(torch.randn(pool.data.shape))
    kept = memoryview(bytearray(mover.block_bytes))
    mover.copy_out(1, kept)
    mover.copy_in(kept, 4)

    assert torch.equal(pool.data[4], pool.data[1])


@pytest.mark.parametrize("num_layers", [1, 3, 4, 5, 8])
def test_each_layer_of_a_step_finds_its_group_of_a_load(num_layers: int) -> None:
    api = Lagging()
    pool, mover = make(api, num_layers)
    sources = [np.full(mover.block_bytes // 4, 2.0 + at, np.float32) for at in range(2)]
    views = [memoryview(source).cast("B") for source in sources]
    load = mover.begin_in(views, [1, 5])
    assert len(load.events) <= NUM_GROUPS
    assert not pool.data.any()

    pool.order.announce(load)
    read: list[list[float]] = []
    for layer in range(num_layers):
        pool.order.before_layer(layer)
        api.main.put(lambda at=layer: read.append(pool.data[:, at].flatten(1).amin(1).tolist()))
    pool.order.after_step()
    api.main.run_to(api.main.num_queued)

    assert read == [[0.0, 2.0, 0.0, 0.0, 0.0, 3.0]] * num_layers


def test_early_layers_do_not_wait_for_the_last_group() -> None:
    api = Lagging()
    pool, mover = make(api, 4)
    source = memoryview(np.full(mover.block_bytes // 4, 2.0, np.float32)).cast("B")
    pool.order.announce(mover.begin_in([source], [0]))
    pool.order.before_layer(0)
    api.main.run_to(api.main.num_queued)

    assert pool.data[0].flatten(1).amin(1).tolist() == [2.0, 0.0, 0.0, 0.0]


def test_a_step_that_is_replayed_as_a_whole_waits_for_all_groups() -> None:
    api = Lagging()
    pool, mover = make(api, 4)
    source = memoryview(np.full(mover.block_bytes // 4, 2.0, np.float32)).cast("B")
    load = mover.begin_in([source], [0])
    pool.order.announce(load)
    pool.order.before_step()
    api.main.run_to(api.main.num_queued)
    pool.order.wait_for(load)

    assert set(pool.data[0].flatten().tolist()) == {2.0}


@pytest.mark.parametrize("is_whole", [True, False], ids=["as a whole", "by layers"])
@pytest.mark.parametrize("num_late", [0, 1, 4])
def test_what_steps_wait_for_loads_is_told_and_what_they_compute_is_not(
    num_late: int, is_whole: bool
) -> None:
    api = Lagging()
    pool, mover = make(api, 4)
    source = memoryview(np.full(mover.block_bytes // 4, 2.0, np.float32)).cast("B")
    load = mover.begin_in([source], [0])
    pool.order.announce(load)
    if num_late < len(load.events):
        api.wait(load.events[-1 - num_late])

    def compute() -> None:
        api.now_s += 10.0

    if is_whole:
        pool.order.before_step()
    for layer in range(4):
        pool.order.before_layer(layer)
        api.main.put(compute)
    pool.order.after_step()

    assert pool.wait() == num_late
    launch(api, pool, compute)
    assert pool.wait() == 0.0


def test_layer_groups_are_for_pinned_memory_only() -> None:
    _, mover = make(Lagging(is_pinned=False))
    assert mover.begin_in([memoryview(bytearray(mover.block_bytes))], [0]) is None


def test_a_store_of_what_is_still_being_loaded_has_all_of_it() -> None:
    api = Lagging()
    pool, mover = make(api, 4)
    source = memoryview(np.full(mover.block_bytes // 4, 2.0, np.float32)).cast("B")
    pool.order.announce(mover.begin_in([source], [0]))
    kept = memoryview(bytearray(mover.block_bytes))
    mover.copy_out(0, kept)

    assert kept == source


def test_a_pool_that_the_kernels_cannot_count_is_refused_before_it_is_allocated() -> None:
    device: Any = torch.device("cpu")
    with pytest.raises(ValueError, match="must be below"):
        CudaKvPool(2**30, 16, config_of(), torch.float32, device, Lagging(), None)


def test_steps_laid_out_ahead_do_not_overwrite_each_others_integers() -> None:
    api = Lagging()
    ring = UploadRing(api, torch.device("cpu"))
    # The second grows a buffer.
    sizes = [3, 40_000, *range(5, 5 + 2 * NUM_BUFFERS)]
    steps = [np.full(size, at, np.int32) for at, size in enumerate(sizes)]
    sent = [ring.upload(step) for step in steps]
    api.main.run_to(api.main.num_queued)

    for got, step in zip(sent, steps, strict=True):
        assert got.tolist() == step.tolist()


def test_integers_go_to_the_front_of_a_given_place() -> None:
    api = Lagging()
    place = torch.full((5,), -1, dtype=torch.int32)
    returned = UploadRing(api, torch.device("cpu")).upload(np.array([1, 2], np.int32), place)
    api.main.run_to(api.main.num_queued)

    assert returned is place
    assert place.tolist() == [1, 2, -1, -1, -1]
