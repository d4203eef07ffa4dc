"""Launches the kernels that take each row by itself; see ``row_kernels.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from runner.ops.cuda.row_kernels import rms_norm_kernel, rope_write_kernel, silu_mul_kernel

if TYPE_CHECKING:
    from runner.arch import ModelConfig
    from runner.ops.cuda.ops import CudaStep

# Few enough that a program's two tiles of 8 heads stay in registers at 128 values a head.
TILE_HEADS = 8

# A program of silu: 4 values a thread at 4 warps.
SILU_TILE = 512


def next_power(count: int) -> int:
    """Return the least power of two that is no less; tiles have such sizes."""
    return 1 << (count - 1).bit_length()


class CudaNorm:
    """See ``Norm``: a row is read once and written once."""

    def __init__(self, scale: torch.Tensor, epsilon: float) -> None:
        """Take the scale on the device. Shape: [width]."""
        self._scale = scale
        self._epsilon = epsilon

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        count, width = rows.shape
        if count:
            rms_norm_kernel[(count,)](
                out,
                rows,
                self._scale,
                self._epsilon,
                WIDTH=width,
                TILE=next_power(width),
                enable_fp_fusion=True,
            )
        return out


class CudaLinear:
    """See ``Linear``: cuBLAS, which adds the residual in the product's last step."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Keep both, on the device. Shapes: weight [out, in], bias [out]."""
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return functional.linear(rows, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        total = torch.addmm(residual, rows, self._weight.t())
        return total if self._bias is None else total.add_(self._bias)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``Ops.silu_mul``."""
    gate_up = gate_up.contiguous()
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((count, width))
    if count:
        tile = min(SILU_TILE, next_power(width))
        silu_mul_kernel[(count, -(-width // tile))](
            out, gate_up, WIDTH=width, TILE=tile, enable_fp_fusion=True
        )
    return out


class RopeWriter:
    """Norms, rotates and stores; holds the angles of all positions a model may have."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies = torch.tensor(config.rope_frequencies(), dtype=torch.float32)
        positions = torch.arange(config.context_tokens, dtype=torch.float32)
        amplitude = 1.0 if config.rope_scaling is None else config.rope_scaling.amplitude
        # On the CPU, so that the angles are those of the CPU path, bit for bit.
        angles = positions[:, None] * frequencies
        self._cosines = (angles.cos() * amplitude).to(device)
        self._sines = (angles.sin() * amplitude).to(device)
        self._config = config

    def __call__(
        self, qkv: torch.Tensor, layer: int, head_norm: torch.Tensor | None, step: CudaStep
    ) -> None:
        """See ``Ops.rope_write``."""
        config = self._config
        count, heads, dim = qkv.shape
        tile_heads = min(TILE_HEADS, next_power(heads))
        rope_write_kernel[(count, -(-heads // tile_heads))](
            qkv,
            self._cosines,
            self._sines,
            # Never read without a norm; the kernel wants some address.
            self._cosines if head_norm is None else head_norm,
            step.pool.data,
            step.positions,
            step.token_rows,
            layer,
            config.norm_eps,
            NUM_HEADS=config.num_heads,
            NUM_KV_HEADS=config.num_kv_heads,
            HALF=dim // 2,
            TILE=next_power(dim // 2),
            TILE_HEADS=tile_heads,
            BLOCK_SIZE=step.pool.block_size,
            HAS_NORM=head_norm is not None,
            enable_fp_fusion=True,
        )
