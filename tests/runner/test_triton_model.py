"""A whole model on the GPU's kernels, against the same model on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.arch import ModelConfig
from runner.batch import Chunk
from runner.metrics import TransferMeter
from runner.model import Model
from runner.tiers.assemble import build_tiers
from runner.tiers.options import TierOptions
from runner.weights import load_model
from tests.runner.driver import Driver
from tests.runner.test_tiers_overlap import Lazy
from tests.runner.triton_parts import DEVICE, gpu_ops

PROMPT = [(17 * at + 5) % 97 for at in range(43)]


class Replays:
    """Stands for CUDA graphs: what was recorded is run again, on the tensors of that time."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def record(self, call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        self.recorded += 1
        result = torch.empty_like(call())

        def replay() -> None:
            self.replayed += 1
            result.copy_(call())

        return result, replay


def load(folder: Path, monkeypatch: pytest.MonkeyPatch, recorder: Any = None) -> Model:
    def open_gpu(config: ModelConfig, dtype: torch.dtype, attention: str) -> Any:
        assert attention == "triton"
        return gpu_ops(config, dtype, recorder)

    monkeypatch.setattr("runner.weights.open_gpu", open_gpu)
    return load_model(folder, "float32", 1, device="cuda")


def compare(model: Model, reference: Model, steps: list[list[Chunk]]) -> None:
    pools = [each.new_pool(24, 16) for each in (model, reference)]
    for chunks in steps:
        actual, order = model.forward(chunks, pools[0])
        expected, expected_order = reference.forward(chunks, pools[1])
        assert order == expected_order
        torch.testing.assert_close(actual.cpu(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pools[0].data.cpu(), pools[1].data, atol=1e-5, rtol=1e-5)


def decode(lengths: list[int], at: int) -> list[Chunk]:
    """One token for each of some samples, ``at`` steps after their prompts."""
    return [
        Chunk([3 + index], length + at, [4 * index, 4 * index + 1, 4 * index + 2], True)
        for index, length in enumerate(lengths)
    ]


def prompts(lengths: list[int]) -> list[Chunk]:
    return [
        Chunk(PROMPT[:length], 0, [4 * index, 4 * index + 1, 4 * index + 2], index != 1)
        for index, length in enumerate(lengths)
    ]


def test_logits_and_pool_are_those_of_the_cpu(
    tiny: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [5, 16, 33]
    model = load(tiny_dir, monkeypatch)
    mixed = [*decode(lengths[:2], 0), Chunk(PROMPT[:7], 33, [8, 9, 10], True)]
    compare(model, tiny, [prompts(lengths), mixed, decode(lengths[:2], 1)])
    assert model.kernel_family.startswith(f"{DEVICE.type}-float32-triton")


def test_recorded_decode_steps_compute_what_unrecorded_ones_do(
    tiny: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Replays()
    model = load(tiny_dir, monkeypatch, recorder)
    lengths = [5, 16, 33]
    steps = [prompts(lengths), *(decode(lengths, at) for at in range(3))]
    # Another number of rows that is padded to the same size, and one that has its own.
    compare(model, tiny, [*steps, decode([8, 19, 36, 0], 0), decode([9], 0)])
    assert (recorder.recorded, recorder.replayed) == (2, 3)


def test_a_step_that_no_graph_fits_runs_launch_by_launch(
    tiny: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Replays()
    model = load(tiny_dir, monkeypatch, recorder)
    monkeypatch.setattr("runner.ops.cuda.graphs.TABLE_SIZE", 1)
    compare(model, tiny, [prompts([5, 16, 33]), decode([5, 16, 33], 0)])
    assert recorder.recorded == 0


def test_an_engine_gives_the_cpus_tokens_cold_and_warm_and_after_preemption(
    tiny: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for model in (tiny, load(tiny_dir, monkeypatch, Replays())):
        # Too few blocks for all of them: some are preempted and computed again.
        driver = Driver(model, pool_tokens=10 * 16, max_seqs=4, max_batched_tokens=32)
        asked = [driver.submit(PROMPT[:length], max_tokens=6) for length in (5, 33, 40, 33)]
        driver.run()
        asked.append(driver.submit(PROMPT[:33], max_tokens=6))
        driver.run()
        assert driver.cached_tokens(asked[-1]) == 32
        answers.append([driver.tokens(request) for request in asked])
    assert answers[1] == answers[0]


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU is not as late as it may be")
def test_every_layer_waits_for_its_part_of_a_load_before_it_reads_or_writes_the_pool(
    tiny: Model, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.ops.cuda.ops import CudaOps

    api: Any = Lazy()
    monkeypatch.setattr(
        "runner.weights.open_gpu",
        lambda config, dtype, attention: CudaOps(config, dtype, DEVICE, api, None),
    )
    model = load_model(tiny_dir, "float32", 1, device="cuda")
    pool, known = (each.new_pool(4, 16) for each in (model, tiny))
    # The first of the two steps does not sample: the last layer writes and does not read.
    steps = [Chunk(PROMPT[16:32], 16, [0, 1], False), Chunk(PROMPT[32:], 32, [0, 1, 2], True)]
    expected = [tiny.forward([at], known)[0] for at in (Chunk(PROMPT[:16], 0, [0], True), *steps)]
    api.be_lazy(True)
    mover = pool.new_mover()
    # The prefix, and what nobody wants any more: it was for a block that has got a new owner.
    good = memoryview(known.data[0].view(torch.uint8).reshape(-1).numpy())
    stale = memoryview(bytearray(b"\x40") * mover.block_bytes)
    for source, block in ((stale, 1), (good, 0)):
        mover.announce(mover.begin_in([source], [block]))
    got = [model.forward([chunk], pool)[0] for chunk in steps]

    torch.testing.assert_close(got[-1], expected[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pool.data[:2], known.data[:2], atol=1e-5, rtol=1e-5)
    assert not api.num_pending


def test_kv_restored_from_host_memory_gives_the_same_tokens(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_dir, monkeypatch)
    tiers = partial(build_tiers, TierOptions(host_bytes=2**20), observer=TransferMeter("test"))
    driver = Driver(model, build_tiers=tiers, pool_tokens=8 * 16, max_batched_tokens=32)
    expected = driver.complete(PROMPT, max_tokens=4)
    driver.settle(lambda: driver.core.stats().tiers[0].num_blocks == 2)
    # Others need the whole pool.
    driver.complete([(at * 5 + 1) % 97 for at in range(110)], max_tokens=2)
    again = driver.submit(PROMPT, max_tokens=4)
    driver.run()

    assert driver.tokens(again) == expected
    assert driver.last(again).hit_source == "cpu"
    driver.core.close()
