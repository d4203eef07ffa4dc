"""Implementations of the ops interface to test, and what they are compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.arch import ModelConfig
from runner.batch import BatchBuilder, Chunk
from runner.kvpool import KvPool
from runner.ops.native.build import BuildError
from runner.ops.native.kernels import NativeOps
from runner.ops.native.library import load_kernels
from runner.ops.torch_ops import TorchOps

KINDS = ("torch", "native")
EPSILON = 1e-5


def config_of(*, heads: int = 6, kv_heads: int = 2, dim: int = 64, window: int = 0) -> ModelConfig:
    """Two layers, of which the second has the window."""
    return ModelConfig(
        architecture="llama",
        vocab_size=97,
        hidden_size=64,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        ffn_size=96,
        context_tokens=2048,
        norm_eps=EPSILON,
        rope_theta=10_000.0,
        rope_scaling=None,
        has_qk_norm=False,
        window_tokens=window,
        window_layers=(1,) if window else (),
        eos_token_ids=(1,),
    )


def make_ops(kind: str, config: ModelConfig, dtype: torch.dtype, folder: Path) -> Any:
    """Return the ops, or skip where this machine cannot compile them."""
    if kind == "torch":
        return TorchOps(config, dtype)
    kernels = load_kernels(folder, dtype, os.environ)
    if isinstance(kernels, BuildError):
        pytest.skip(str(kernels))
    return NativeOps(config, dtype, 1, kernels)


def new_pool(config: ModelConfig, dtype: torch.dtype, num_blocks: int = 64) -> KvPool:
    pool = KvPool(
        num_blocks,
        16,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )
    pool.data.copy_(random_of(pool.data.shape, seed=9))
    return pool


def random_of(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step_of(ops: Any, config: ModelConfig, pool: KvPool, chunks: Sequence[Chunk]) -> Any:
    return ops.open(BatchBuilder(config.num_layers, pool.block_size).build(chunks), pool)


def expected_attention(
    qkv: torch.Tensor, pool: KvPool, config: ModelConfig, layer: int, step: Any
) -> torch.Tensor:
    """Softmax by its definition, in float64, one row at a time."""
    rows = []
    window = config.window_tokens if layer in config.window_layers else 0
    for group in step.batch.groups:
        count = len(group.ends)
        tokens = (group.rows.stop - group.rows.start) // count
        for sequence in range(count):
            blocks = pool.data[torch.from_numpy(group.tables[sequence]), layer].double()
            keys, values = blocks.transpose(0, 1).reshape(2, -1, *pool.data.shape[4:])
            for token in range(tokens):
                row = group.rows.start + sequence * tokens + token
                end = int(group.ends[sequence]) - tokens + token + 1
                begin = max(0, end - window) if window else 0
                rows.append(_attend(qkv[row].double(), keys[begin:end], values[begin:end], config))
    return torch.stack(rows)


def _attend(
    row: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, config: ModelConfig
) -> torch.Tensor:
    group = config.num_heads // config.num_kv_heads
    keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("hd,thd->ht", row[: config.num_heads], keys) / config.head_dim**0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values).reshape(-1)
