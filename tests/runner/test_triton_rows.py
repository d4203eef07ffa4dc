"""The kernels that take each row by itself, against definitions in float64."""

from __future__ import annotations

import pytest
import torch

from runner.batch import BatchBuilder, Chunk
from runner.ops.torch_ops import TorchOps
from tests.runner.ops_parts import EPSILON, config_of, new_pool, random_of, step_of
from tests.runner.triton_parts import DEVICE, gpu_ops


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.cpu().double(), expected.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [64, 83])
def test_norm_divides_by_the_root_mean_square_and_scales(width: int) -> None:
    rows, scale = random_of((7, width)), random_of((width,), 1)

    exact = rows.double()
    mean = exact.square().mean(-1, keepdim=True)
    actual = gpu_ops(config_of()).norm(scale)(rows.to(DEVICE))
    near(actual, exact / (mean + EPSILON).sqrt() * scale.double())


def test_silu_mul_holds_from_tiny_to_huge_gates() -> None:
    gate, up = torch.linspace(-80, 300, 6 * 90).view(6, 90), random_of((6, 90))

    actual = gpu_ops(config_of()).silu_mul(torch.cat((gate, up), 1).to(DEVICE))
    near(actual, gate.double() * torch.sigmoid(gate.double()) * up.double())


def test_a_linear_adds_its_bias_and_the_residual() -> None:
    ops = gpu_ops(config_of())
    weight, bias, rows, residual = (
        random_of(shape, at) for at, shape in enumerate([(5, 64), (5,), (3, 64), (3, 5)])
    )
    product = rows.double() @ weight.double().T

    near(ops.linear(weight, bias)(rows.to(DEVICE)), product + bias)
    added = ops.linear(weight, bias).add_to(residual.to(DEVICE), rows.to(DEVICE))
    near(added, product + bias + residual)
    near(ops.linear(weight)(rows.to(DEVICE)), product)


@pytest.mark.parametrize("dim", [64, 10])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("heads", [(6, 2), (9, 3)], ids=str)
def test_rope_write_does_what_the_cpu_does(
    dim: int, with_norm: bool, heads: tuple[int, int]
) -> None:
    config = config_of(dim=dim, heads=heads[0], kv_heads=heads[1])
    chunks = [Chunk([3, 4, 5], 14, [7, 2], True), Chunk([6], 0, [9], True)]
    qkv = random_of((4, heads[0] + 2 * heads[1], dim))
    scale = random_of((heads[0] + heads[1], dim), 3) if with_norm else None

    cpu, pool = TorchOps(config, torch.float32), new_pool(config, torch.float32)
    expected = qkv.clone()
    cpu_scale = None if scale is None else cpu.head_norm(scale)
    cpu.rope_write(expected, 1, cpu_scale, step_of(cpu, config, pool, chunks))

    gpu = gpu_ops(config)
    gpu_pool = gpu.new_pool(64, 16)
    gpu_pool.data.copy_(random_of(pool.data.shape, seed=9))
    actual = qkv.to(DEVICE)
    gpu_scale = None if scale is None else gpu.head_norm(scale)
    step = gpu.open(BatchBuilder(config.num_layers, 16).build(chunks), gpu_pool)
    gpu.rope_write(actual, 1, gpu_scale, step)

    near(actual, expected)
    near(gpu_pool.data, pool.data)
