"""FlashInfer behind the same attention call, where somebody has installed it.

It compiles its kernels with nvcc when they are first used, and cuts contexts by what shares the
batch: a row's bits depend on its neighbours, which the family's name says. Steps are planned on the
host, so that decode steps run launch by launch instead of as graphs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.ops.cuda.layout import sequences

if TYPE_CHECKING:
    from runner.arch import ModelConfig
    from runner.batch import Batch
    from runner.ops.cuda.ops import CudaStep

# What FlashInfer's documentation asks for.
WORKSPACE_BYTES = 128 * 2**20


class FlashInferAttention:
    """Attention of one model's heads; one plan per step and window.

    Attributes:
        family: See ``runner/ops/interface.py``.
    """

    family = "flashinfer-varying"

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Take the workspace.

        Raises:
            ImportError: If FlashInfer is not installed.
        """
        flashinfer: Any = importlib.import_module("flashinfer")
        self._config = config
        self._dtype = dtype
        self._device = device
        windows = {self._window(layer) for layer in range(config.num_layers)}
        self._wrappers = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device), "NHD"
            )
            for window in windows
        }

    def begin(self, batch: Batch, block_size: int) -> None:
        """Plan a step."""
        config = self._config
        rows, blocks, last, tables = [0], [0], [], []
        for _, num_tokens, end, table in sequences(batch.groups):
            count = -(-end // block_size)
            rows.append(rows[-1] + num_tokens)
            blocks.append(blocks[-1] + count)
            last.append(end - (count - 1) * block_size)
            tables.append(table[:count])
        parts = (rows, blocks, np.concatenate(tables), last)
        placed = [torch.from_numpy(np.asarray(part, np.int32)).to(self._device) for part in parts]
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                *placed,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                block_size,
                causal=True,
                # Tokens to the left of itself; -1 is all.
                window_left=window - 1,
                q_data_type=self._dtype,
            )

    def __call__(self, qkv: torch.Tensor, layer: int, step: CudaStep) -> torch.Tensor:
        """See ``Ops.attention``."""
        queries = qkv[:, : self._config.num_heads].contiguous()
        keys, values = step.pool.data[:, layer].unbind(1)
        mixed: torch.Tensor = self._wrappers[self._window(layer)].run(queries, (keys, values))
        return mixed.reshape(qkv.shape[0], -1)

    def _window(self, layer: int) -> int:
        config = self._config
        return config.window_tokens if layer in config.window_layers else 0
