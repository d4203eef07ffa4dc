"""The decoder's arithmetic, in torch and compiled, against definitions in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.batch import Chunk
from runner.ops.choice import rows_agree
from runner.quantised import to_int4, to_int8
from tests.runner.ops_parts import (
    EPSILON,
    KINDS,
    config_of,
    expected_attention,
    make_ops,
    new_pool,
    random_of,
    step_of,
)

DTYPES = (torch.float32, torch.bfloat16)
# bfloat16 has 8 bits: half a unit of rounding in what is read, and in what is returned.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


@pytest.fixture(scope="session")
def kernels_dir(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("kernels")
    return folder


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    atol, rtol = (part * scale for part in TOLERANCES[actual.dtype])
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 7, 33])
@pytest.mark.parametrize("width", [64, 83])
def test_norm_divides_by_the_root_mean_square_and_scales(
    kind: str, dtype: torch.dtype, count: int, width: int, kernels_dir: Path
) -> None:
    ops = make_ops(kind, config_of(), dtype, kernels_dir)
    rows, scale = random_of((count, width)).to(dtype), random_of((width,), 1).to(dtype)

    exact = rows.double()
    mean = exact.square().mean(-1, keepdim=True)
    assert_near(ops.norm(scale)(rows), exact / (mean + EPSILON).sqrt() * scale.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_holds_from_tiny_to_huge_gates(
    kind: str, dtype: torch.dtype, kernels_dir: Path
) -> None:
    ops = make_ops(kind, config_of(), dtype, kernels_dir)
    gate = torch.linspace(-300, 300, 6 * 90).view(6, 90).to(dtype)
    up = random_of((6, 90)).to(dtype)

    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    assert_near(ops.silu_mul(torch.cat((gate, up), 1)), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 10])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_write_turns_queries_and_keys_and_stores_keys_and_values(
    kind: str, dtype: torch.dtype, dim: int, with_norm: bool, kernels_dir: Path
) -> None:
    config = config_of(dim=dim)
    ops, pool = make_ops(kind, config, dtype, kernels_dir), new_pool(config, dtype)
    chunks = [Chunk([3, 4, 5], 14, [7, 2], True), Chunk([6], 0, [9], True)]
    step = step_of(ops, config, pool, chunks)
    qkv = random_of((4, 10, dim)).to(dtype)
    scale = random_of((8, dim), 1).to(dtype)

    heads = qkv[:, :8].double()
    if with_norm:
        heads = heads / (heads.square().mean(-1, keepdim=True) + EPSILON).sqrt() * scale.double()
    first, second = heads.chunk(2, -1)
    frequencies = torch.tensor(config.rope_frequencies(), dtype=torch.float64)
    # The single token comes first.
    angles = (torch.tensor([0, 14, 15, 16])[:, None] * frequencies)[:, None]
    turned = torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        -1,
    )
    values = qkv[:, 8:].clone()
    before = pool.data.clone()
    ops.rope_write(qkv, 1, ops.head_norm(scale) if with_norm else None, step)

    # The norm rounds once more.
    assert_near(qkv[:, :8], turned, 2.0)
    places = [(9, 0), (7, 14), (7, 15), (2, 0)]
    for row, (block, at) in enumerate(places):
        assert torch.equal(pool.data[block, 1, 0, at], qkv[row, 6:8])
        assert torch.equal(pool.data[block, 1, 1, at], values[row])
        before[block, 1, :, at] = pool.data[block, 1, :, at]
    assert torch.equal(pool.data, before)


# One block, ends of blocks, ends of tiles, several spans of keys; long and short together.
SAMPLES = [1, 2, 16, 17, 31, 33, 255, 256, 257, 300, 700]
CHUNKS = [(0, 2), (0, 16), (0, 70), (5, 28), (250, 40), (640, 33)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 64), (4, 4, 32), (20, 1, 64), (6, 3, 24)]
)
@pytest.mark.parametrize("window", [0, 40])
def test_attention_is_the_softmax_over_each_row_s_context(
    kind: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    kernels_dir: Path,
) -> None:
    config = config_of(heads=heads, kv_heads=kv_heads, dim=dim, window=window)
    ops, pool = make_ops(kind, config, dtype, kernels_dir), new_pool(config, dtype)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist()
    chunks = [Chunk([5], end - 1, order[: end // 16 + 1], True) for end in SAMPLES]
    chunks += [Chunk([5] * count, start, order[8:], True) for start, count in CHUNKS]
    step = step_of(ops, config, pool, chunks)
    rows = len(SAMPLES) + sum(count for _, count in CHUNKS)
    qkv = random_of((rows, heads + 2 * kv_heads, dim), 3).to(dtype)

    for layer in (0, 1):
        # Torch's dense contexts take in the newest tokens, as after a step.
        ops.rope_write(qkv, layer, None, step)
        actual = ops.attention(qkv, layer, step)
        assert_near(actual, expected_attention(qkv, pool, config, layer, step))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 24])
def test_a_sample_s_attention_has_the_same_bits_whatever_decodes_beside_it(
    dtype: torch.dtype, dim: int, kernels_dir: Path
) -> None:
    config = config_of(dim=dim)
    ops, pool = make_ops("native", config, dtype, kernels_dir), new_pool(config, dtype)
    ends = [300, 17, 290, 640, 1]
    chunks = [Chunk([5], end - 1, list(range(64)), True) for end in ends]
    qkv = random_of((5, 10, dim), 3).to(dtype)
    # Longest context first, as batches have it.
    order = sorted(range(5), key=lambda at: -ends[at])
    together = ops.attention(qkv[order].clone(), 0, step_of(ops, config, pool, chunks))

    for row, at in enumerate(order):
        alone = ops.attention(
            qkv[at : at + 1].clone(), 0, step_of(ops, config, pool, chunks[at : at + 1])
        )
        assert torch.equal(alone[0], together[row])


def test_tiled_attention_has_the_same_bits_wherever_chunks_begin(kernels_dir: Path) -> None:
    config = config_of(window=200)
    ops = make_ops("native", config, torch.bfloat16, kernels_dir)
    if ops.family != "native-tiles":
        pytest.skip("no tile registers here")
    pool = new_pool(config, torch.bfloat16)
    qkv = random_of((600, 10, 64), 3).bfloat16()
    table = list(range(64))
    for layer in (0, 1):
        whole = ops.attention(
            qkv, layer, step_of(ops, config, pool, [Chunk([5] * 600, 0, table, True)])
        )
        for start, end in [(0, 1), (599, 600), (100, 117), (255, 257), (330, 600)]:
            chunk = Chunk([5] * (end - start), start, table, True)
            part = ops.attention(qkv[start:end], layer, step_of(ops, config, pool, [chunk]))
            assert torch.equal(part, whole[start:end]), (layer, start, end)


WEIGHTS = {"plain": lambda weight: weight, "int8": to_int8, "int4": to_int4}


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (160, 1536)])
@pytest.mark.parametrize("count", [1, 3, 16, 17, 31, 32, 33, 70])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linears_multiply_with_what_the_weight_stands_for(
    kind: str,
    form: str,
    outputs: int,
    inputs: int,
    count: int,
    with_bias: bool,
    kernels_dir: Path,
) -> None:
    ops = make_ops(kind, config_of(), torch.bfloat16, kernels_dir)
    weight = WEIGHTS[form](random_of((outputs, inputs)) * inputs**-0.5)
    dense = weight if isinstance(weight, torch.Tensor) else weight.dense()
    bias = random_of((outputs,), 1) if with_bias else None
    rows, residual = random_of((count, inputs), 2).bfloat16(), random_of((count, outputs), 3)
    residual = residual.bfloat16()
    with torch.inference_mode():
        linear = ops.linear(weight, bias)
        exact = rows.double() @ dense.double().T
        if bias is not None:
            exact += bias.bfloat16().double()
        assert_near(linear(rows), exact)
        assert_near(linear.add_to(residual, rows), exact + residual.double(), 2.0)


@pytest.mark.parametrize("outputs", [97, 1, 31])
def test_linears_of_odd_sizes_are_whole(kind: str, outputs: int, kernels_dir: Path) -> None:
    ops = make_ops(kind, config_of(), torch.bfloat16, kernels_dir)
    for inputs in (64, 50):
        weight, rows = random_of((outputs, inputs)) * 0.1, random_of((40, inputs), 1).bfloat16()
        with torch.inference_mode():
            assert_near(ops.linear(weight)(rows), rows.double() @ weight.double().T, 2.0)


@pytest.mark.parametrize("form", WEIGHTS)
def test_linears_take_rows_that_are_part_of_wider_ones(
    kind: str, form: str, kernels_dir: Path
) -> None:
    ops = make_ops(kind, config_of(), torch.bfloat16, kernels_dir)
    wide = random_of((8, 128), 1).bfloat16()
    with torch.inference_mode():
        linear = ops.linear(WEIGHTS[form](random_of((96, 64))))
        assert torch.equal(linear(wide[:, :64]), linear(wide[:, :64].contiguous()))


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("inputs", [64, 1536])
def test_a_tiled_linear_gives_a_row_the_same_bits_whatever_the_batch(
    form: str, inputs: int, kernels_dir: Path
) -> None:
    ops = make_ops("native", config_of(), torch.bfloat16, kernels_dir)
    if ops.family != "native-tiles":
        pytest.skip("no tile registers here")
    assert rows_agree(ops.linear(WEIGHTS[form](random_of((96, inputs)))), inputs, torch.bfloat16)


def test_a_linear_whose_rows_depend_on_the_batch_is_found_out() -> None:
    def linear(rows: torch.Tensor) -> torch.Tensor:
        return rows * (1.0 if len(rows) < 32 else 1.001)

    assert not rows_agree(linear, 8, torch.float32)  # type: ignore[arg-type]
