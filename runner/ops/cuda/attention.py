"""Launches attention over the paged pool for one step; see ``attention_kernels.py``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch

from runner.ops.cuda.attention_kernels import attend_kernel, merge_kernel
from runner.ops.cuda.layout import SPLIT_TOKENS, TILE_FIELDS

if TYPE_CHECKING:
    from runner.arch import ModelConfig
    from runner.batch import Batch
    from runner.ops.cuda.layout import TileRun
    from runner.ops.cuda.ops import CudaStep

# An H100 or H200 has 132 multiprocessors; several programs on each hide the latency of reading.
# How many share the splits of a context has no effect on any bit.
TARGET_PROGRAMS = 132 * 8


class Attention(Protocol):
    """What computes a step's attention.

    Attributes:
        family: See ``runner/ops/interface.py``.
    """

    family: str

    def begin(self, batch: Batch, block_size: int) -> None:
        """Prepare a step."""
        ...

    def __call__(self, qkv: torch.Tensor, layer: int, step: CudaStep) -> torch.Tensor:
        """See ``Ops.attention``."""
        ...


class PagedAttention:
    """Attention of one model's heads in Triton.

    Attributes:
        family: See ``runner/ops/interface.py``.
    """

    family = "triton"

    def __init__(self, config: ModelConfig) -> None:
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._window = config.window_tokens
        self._window_layers = frozenset(config.window_layers)
        # The kernel computes powers of two.
        self._scale_log2 = math.log2(math.e) / math.sqrt(config.head_dim)

    def begin(self, batch: Batch, block_size: int) -> None:
        """See ``Attention``: nothing, the layout already says what to compute."""

    def __call__(self, qkv: torch.Tensor, layer: int, step: CudaStep) -> torch.Tensor:
        """See ``Ops.attention``."""
        out = qkv.new_empty((qkv.shape[0], self._num_heads * self._head_dim))
        for run in step.layout.runs:
            tiles = step.tiles[run.first * TILE_FIELDS :]
            self._attend(out, qkv, tiles, layer, step, run)
            if run.is_split:
                self._merge(out, tiles, step, run)
        return out

    def _attend(
        self,
        out: torch.Tensor,
        qkv: torch.Tensor,
        tiles: torch.Tensor,
        layer: int,
        step: CudaStep,
        run: TileRun,
    ) -> None:
        data = step.pool.data
        programs = 1
        if run.is_split:
            wanted = -(-TARGET_PROGRAMS // (run.count * self._num_kv_heads))
            programs = max(1, min(run.max_splits, wanted))
        parts, stats = step.parts
        attend_kernel[(run.count, self._num_kv_heads, programs)](
            out,
            parts,
            stats,
            qkv,
            data,
            step.tables,
            tiles,
            layer,
            self._scale_log2,
            qkv.stride(0),
            out.stride(0),
            data.stride(0),
            data.stride(1),
            data.stride(2),
            data.stride(3),
            NUM_HEADS=self._num_heads,
            GROUP=self._num_heads // self._num_kv_heads,
            HEAD_DIM=self._head_dim,
            DIM=_tile_dim(self._head_dim),
            BLOCK_SIZE=step.pool.block_size,
            TILE_ROWS=run.shape.rows,
            TILE_KEYS=run.shape.keys,
            SPLIT=SPLIT_TOKENS,
            IS_SPLIT=run.is_split,
            WINDOW=self._window if layer in self._window_layers else 0,
            num_warps=run.shape.num_warps,
            num_stages=run.shape.num_stages,
            enable_fp_fusion=True,
        )

    def _merge(self, out: torch.Tensor, tiles: torch.Tensor, step: CudaStep, run: TileRun) -> None:
        parts, stats = step.parts
        merge_kernel[(run.count, self._num_heads)](
            out,
            parts,
            stats,
            tiles,
            out.stride(0),
            NUM_HEADS=self._num_heads,
            HEAD_DIM=self._head_dim,
            DIM=_tile_dim(self._head_dim),
            SPLIT=SPLIT_TOKENS,
            num_warps=1,
            enable_fp_fusion=True,
        )


class PartBuffers:
    """Memory for the parts of split contexts: one buffer that lasts, so that graphs may hold it.

    Attributes:
        num_slots: Of the lasting buffer.
    """

    def __init__(self, num_slots: int, config: ModelConfig, device: torch.device) -> None:
        self.num_slots = num_slots
        self._shape = (config.num_heads, config.head_dim)
        self._device = device
        self._lasting = self._new(num_slots)

    def take(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums and statistics for a step; valid until the next step's kernels run."""
        return self._lasting if num_slots <= self.num_slots else self._new(num_slots)

    def _new(self, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        heads, dim = self._shape
        parts = torch.empty((num_slots, heads, dim), dtype=torch.float32, device=self._device)
        stats = torch.empty((num_slots, heads, 2), dtype=torch.float32, device=self._device)
        return parts, stats


def _tile_dim(head_dim: int) -> int:
    """Return the power of two that a tile's width is, at least what a tensor core multiplies."""
    return max(16, 1 << (head_dim - 1).bit_length())
