"""Paged attention in Triton, against softmax by its definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.batch import BatchBuilder, Chunk
from tests.runner.ops_parts import config_of, expected_attention, random_of
from tests.runner.triton_parts import DEVICE, gpu_ops

BLOCK = 16
NUM_BLOCKS = 80
HEADS = {"grouped 4": (8, 2), "grouped 3": (3, 1), "one each": (2, 2)}


def table(first: int, tokens: int) -> list[int]:
    """Blocks in an order of no meaning, so that neighbours in a context are none in the pool."""
    count = -(-tokens // BLOCK)
    return [(first + 7 * at) % NUM_BLOCKS for at in range(count)]


class Case:
    """A model's attention over a pool of random KV."""

    def __init__(self, heads: int, kv_heads: int, dim: int, window: int = 0) -> None:
        self.config = config_of(heads=heads, kv_heads=kv_heads, dim=dim, window=window)
        self.ops = gpu_ops(self.config)
        self.pool = self.ops.new_pool(NUM_BLOCKS, BLOCK)
        self.pool.data.copy_(random_of(self.pool.data.shape, seed=9))

    def run(self, chunks: list[Chunk], layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernel's result and the exact one; rows as the batch orders them."""
        batch = BatchBuilder(self.config.num_layers, BLOCK).build(chunks)
        step = self.ops.open(batch, self.pool)
        rows = len(batch.token_ids)
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        # Each row by its own position and table, so that it is the same in whatever batch.
        qkv = torch.stack(
            [random_of((heads, self.config.head_dim), int(at)) for at in batch.positions]
        ).to(DEVICE)
        assert rows == len(qkv)
        actual = self.ops.attention(qkv, layer, step)
        with_batch = type("Step", (), {"batch": batch})
        host = type("Pool", (), {"data": self.pool.data.cpu()})
        args: Any = (qkv.cpu(), host, self.config, layer, with_batch)
        return actual.cpu(), expected_attention(*args)


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


def single(end: int, first: int = 0) -> Chunk:
    return Chunk([1], end - 1, table(first, end), True)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_decode_and_chunks_of_one_batch_attend_exactly(heads: tuple[int, int], dim: int) -> None:
    case = Case(*heads, dim)
    chunks = [single(1), single(40, 3), Chunk([1] * 21, 0, table(5, 21), True)]
    near(*case.run([*chunks, Chunk([1] * 5, 30, table(11, 35), True)]))


@pytest.mark.parametrize("end", [511, 512, 513, 1025])
def test_a_context_is_whole_across_the_borders_of_its_splits(end: int) -> None:
    case = Case(2, 1, 64)
    near(*case.run([single(end), Chunk([1] * 3, end - 3, table(2, end), True)]))


def test_a_long_chunk_attends_exactly_over_a_prefix() -> None:
    near(*Case(4, 1, 64).run([Chunk([1] * 70, 33, table(1, 103), True)]))


@pytest.mark.parametrize("window", [1, 20, 600])
def test_a_window_hides_what_is_further_back(window: int) -> None:
    case = Case(2, 1, 64, window=window)
    near(*case.run([single(600), Chunk([1] * 4, 16, table(2, 20), True)]))


def test_a_head_that_is_no_power_of_two_attends_exactly() -> None:
    near(*Case(2, 1, 80).run([single(33), Chunk([1] * 4, 16, table(2, 20), True)]))


def test_a_decode_rows_bits_do_not_depend_on_the_batch() -> None:
    case = Case(4, 2, 64)
    mine = single(530, 4)
    alone, _ = case.run([mine])
    others = [single(700, 9), single(3, 2), Chunk([1] * 40, 8, table(6, 48), True)]
    together, _ = case.run([*others, mine])
    # Rows are ordered by context: 700, then 530.
    assert torch.equal(together[1], alone[0])


def test_how_many_programs_share_the_splits_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 1, 64)
    many, _ = case.run([single(1300)])
    monkeypatch.setattr("runner.ops.cuda.attention.TARGET_PROGRAMS", 1)
    few, _ = case.run([single(1300)])
    assert torch.equal(many, few)
