"""Which implementation computes on this machine, and the name for what it does to KV."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from runner.ops.native.build import BuildError, cache_folder
from runner.ops.native.kernels import NativeOps
from runner.ops.native.library import load_kernels
from runner.ops.torch_ops import TorchOps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.arch import ModelConfig
    from runner.model import ModelWeights
    from runner.ops.interface import Linear, Ops
    from runner.quantised import WeightMode

_log = logging.getLogger(__name__)

# Batch sizes around every size at which some path is known to compute otherwise: one row, a tile,
# two, and the first that counts as many.
_BATCHES = (1, 2, 5, 16, 17, 31, 32, 33, 64)


def choose_ops(
    config: ModelConfig, dtype: torch.dtype, threads: int, environ: Mapping[str, str] | None
) -> Ops[Any]:
    """Return the quickest implementation that can be had.

    Args:
        config: The model's sizes.
        dtype: Type of activations and KV.
        threads: Compute threads.
        environ: Where compilers and caches are looked for; None for plain torch.
    """
    if environ is None:
        return TorchOps(config, dtype)
    kernels = load_kernels(cache_folder(environ), dtype, environ)
    if isinstance(kernels, BuildError):
        _log.info("computing in plain torch, which is slower: %s", kernels)
        return TorchOps(config, dtype)
    return NativeOps(config, dtype, threads, kernels)


def kernel_family(
    config: ModelConfig, weights: ModelWeights, ops: Ops[Any], mode: WeightMode
) -> str:
    """Name everything besides the model that decides the bits of its KV.

    Whether a row's bits depend on the number of rows beside it differs between processors and
    between releases of the libraries below, so it is tried out, on the first layer's linears.
    """
    layer = weights.layers[0]
    queries = config.num_heads * config.head_dim
    hidden, ffn = config.hidden_size, config.ffn_size
    widths = ((layer.qkv, hidden), (layer.output, queries), (layer.gate_up, hidden))
    linears = (*widths, (layer.down, ffn))
    agree = all(rows_agree(linear, width, ops.dtype, ops.device) for linear, width in linears)
    return f"{ops.device.type}-{mode}-{ops.family}{'' if agree else '-varying'}"


@torch.inference_mode()
def rows_agree(
    linear: Linear, width: int, dtype: torch.dtype, device: torch.device | None = None
) -> bool:
    """Whether a row's bits are the same whatever the number of rows beside it."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((_BATCHES[-1], width), generator=generator).to(device, dtype)
    whole = linear(rows)
    return all(torch.equal(linear(rows[:count]), whole[:count]) for count in _BATCHES)
