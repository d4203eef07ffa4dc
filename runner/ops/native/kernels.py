"""``Ops`` with the compiled kernels: rows and decode on any CPU, everything on one with tiles.

Where a kernel does not fit (a head size or a width that is no whole number of tiles, a prefill on a
machine without them) the torch path computes, call by call.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from runner.ops.native.library import FlashSizes
from runner.ops.native.tiled import TILE_DEPTH, TiledLinear
from runner.ops.torch_ops import TorchOps, TorchStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from runner.arch import ModelConfig
    from runner.batch import AttentionGroup, Batch
    from runner.kvpool import KvPool
    from runner.ops.interface import Linear, Norm
    from runner.ops.native.library import Kernels
    from runner.quantised import Weight


class NativeNorm:
    """See ``Norm``."""

    def __init__(self, scale: torch.Tensor, epsilon: float, kernels: Kernels, threads: int) -> None:
        """Take the scale in the type to compute in. Shape: [width]."""
        self._scale = scale.contiguous()
        self._epsilon = epsilon
        self._call = kernels.rms_norm
        self._threads = threads

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        self._call(
            rows.data_ptr(), self._scale.data_ptr(), self._epsilon, out.data_ptr(),
            rows.shape[0], rows.shape[1], self._threads,
        )  # fmt: skip
        return out


@dataclass(slots=True)
class NativeStep(TorchStep):
    """See ``Step``; with the arrays whose addresses the kernels take.

    Attributes:
        angles: Cosines and sines, float32. Shape: [rows, dim / 2] each.
        items: ``Item`` of flash.cpp, one for each chunk and each sample. Shape: [items, 4].
    """

    items: npt.NDArray[np.int64]


class NativeOps(TorchOps):
    """See ``Ops``."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, threads: int, kernels: Kernels
    ) -> None:
        """Prepare for models of these sizes."""
        super().__init__(config, dtype)
        self._threads = threads
        self._kernels = kernels
        self._has_flash = kernels.has_tiles and config.head_dim % TILE_DEPTH == 0
        self.family = "native-tiles" if kernels.has_tiles else "native"

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """See ``Ops``."""
        if self._kernels.has_tiles and TiledLinear.fits(weight):
            return TiledLinear(weight, bias, self._kernels, self._threads)
        return super().linear(weight, bias)

    def norm(self, scale: torch.Tensor) -> Norm:
        """See ``Ops``."""
        epsilon = self._config.norm_eps
        return NativeNorm(scale.to(self.dtype), epsilon, self._kernels, self._threads)

    def open(self, batch: Batch, pool: KvPool) -> NativeStep:
        """See ``Ops``."""
        # Only chunks without tiles are gathered: samples are read where they lie.
        gathered = [] if self._has_flash else [group for group in batch.groups if group.is_chunk]
        return NativeStep(
            batch=batch,
            pool=pool,
            angles=self._rope.angles(batch.positions),
            contexts=pool.contexts.open(gathered),
            items=_items(batch.groups) if self._has_flash else np.empty(0, np.int64),
        )

    def rope_write(
        self, qkv: torch.Tensor, layer: int, head_norm: torch.Tensor | None, step: TorchStep
    ) -> None:
        """See ``Ops``."""
        config = self._config
        cosines, sines = step.angles
        self._kernels.rope_write(
            qkv.data_ptr(), cosines.data_ptr(), sines.data_ptr(),
            None if head_norm is None else head_norm.data_ptr(), config.norm_eps,
            step.pool.data.data_ptr(), step.batch.token_rows[layer].data_ptr(),
            qkv.shape[0], config.num_heads, config.num_kv_heads, config.head_dim, self._threads,
        )  # fmt: skip

    def attention(self, qkv: torch.Tensor, layer: int, step: TorchStep) -> torch.Tensor:
        """See ``Ops``."""
        assert isinstance(step, NativeStep)
        config = self._config
        mixed = qkv.new_empty((qkv.shape[0], config.num_heads * config.head_dim))
        if self._has_flash:
            self._flash(qkv, layer, step, mixed)
            return mixed
        contexts = iter(step.contexts)
        for group in step.batch.groups:
            if group.is_chunk:
                mixed[group.rows] = self._attend(qkv[group.rows], layer, group, next(contexts))
            else:
                self._decode(qkv[group.rows], layer, group, step.pool, mixed[group.rows])
        return mixed

    def _flash(self, qkv: torch.Tensor, layer: int, step: NativeStep, mixed: torch.Tensor) -> None:
        config, pool = self._config, step.pool
        sizes = FlashSizes(
            config.num_heads, config.num_kv_heads, config.head_dim, pool.block_size, layer,
            pool.num_layers, self._window(layer), self._threads,
        )  # fmt: skip
        self._kernels.flash(
            byref(sizes), step.items.ctypes.data, len(step.items), qkv.data_ptr(),
            pool.data.data_ptr(), mixed.data_ptr(),
        )  # fmt: skip

    def _decode(
        self,
        rows: torch.Tensor,
        layer: int,
        group: AttentionGroup,
        pool: KvPool,
        mixed: torch.Tensor,
    ) -> None:
        config = self._config
        self._kernels.decode(
            rows.data_ptr(), mixed.data_ptr(), pool.data.data_ptr(), group.tables.ctypes.data,
            group.tables.shape[1], group.ends.ctypes.data, len(group.ends), config.num_heads,
            config.num_kv_heads, config.head_dim, pool.block_size, layer, pool.num_layers,
            self._window(layer), self._threads,
        )  # fmt: skip

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Ops``."""
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        self._kernels.silu_mul(gate_up.data_ptr(), out.data_ptr(), *out.shape, self._threads)
        return out

    def _window(self, layer: int) -> int:
        return self._config.window_tokens if layer in self._window_layers else 0


def _items(groups: Sequence[AttentionGroup]) -> npt.NDArray[np.int64]:
    """Return first row, tokens, start and table address of every chunk and sample."""
    parts = []
    for group in groups:
        count = len(group.ends)
        tokens = (group.rows.stop - group.rows.start) // count
        item = np.empty((count, 4), np.int64)
        item[:, 0] = group.rows.start + np.arange(count)
        item[:, 1] = tokens
        item[:, 2] = group.ends - tokens
        item[:, 3] = group.tables.ctypes.data + np.arange(count) * group.tables.strides[0]
        parts.append(item)
    return np.concatenate(parts)
