"""Linears on tile (AMX) registers; see linear.cpp."""

from __future__ import annotations

from ctypes import byref
from typing import TYPE_CHECKING

import torch

from runner.ops.native.library import TileWeights
from runner.quantised import GROUP, Int4Weight, Int8Weight

if TYPE_CHECKING:
    from runner.ops.native.library import Kernels
    from runner.quantised import Weight

# As in tiles.h and linear.cpp.
TILE_DEPTH, _BLOCK_OUTPUTS = 32, 32

_BFLOAT16, _INT8, _INT4 = 0, 1, 2

# Bits of one weight, by kind.
_BITS = {_BFLOAT16: 16, _INT8: 8, _INT4: 4}


class TiledLinear:
    """See ``Linear``; activations are bfloat16, weights in bfloat16, int8 or int4."""

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None, kernels: Kernels, threads: int
    ) -> None:
        """Bring ``weight`` into tile order."""
        self._call = kernels.linear
        self._threads = threads
        kind, values, scales = _parts(weight)
        outputs, inputs = values.shape
        padded = -(-outputs // _BLOCK_OUTPUTS) * _BLOCK_OUTPUTS
        self._outputs = outputs
        self._tiles = torch.zeros(padded * inputs * _BITS[kind] // 8, dtype=torch.uint8)
        self._scales = None if scales is None else _padded(scales, padded)
        self._bias = None if bias is None else _padded(bias, padded)
        self._groups = None
        int4 = weight if isinstance(weight, Int4Weight) else None
        if int4 is not None:
            self._groups = torch.zeros(padded * inputs // GROUP * 2, dtype=torch.float16)
        kernels.pack(
            kind, values.data_ptr(),
            None if int4 is None else int4.scales.data_ptr(),
            None if int4 is None else int4.minima.data_ptr(),
            outputs, inputs, self._tiles.data_ptr(), _address(self._groups),
        )  # fmt: skip
        self._weights = TileWeights(
            kind, outputs, inputs, self._tiles.data_ptr(), _address(self._scales),
            _address(self._groups), _address(self._bias),
        )  # fmt: skip
        self._reference = byref(self._weights)

    @staticmethod
    def fits(weight: Weight) -> bool:
        """Whether its inputs are whole tiles."""
        values = weight if isinstance(weight, torch.Tensor) else weight.values
        is_grouped = not isinstance(weight, Int4Weight) or weight.group == GROUP
        return values.shape[1] % TILE_DEPTH == 0 and is_grouped

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        rows = rows.contiguous()
        out = rows.new_empty((rows.shape[0], self._outputs))
        self._call(
            self._reference, rows.data_ptr(), rows.shape[0], None, out.data_ptr(), self._threads
        )
        return out

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``; rounded once."""
        rows, residual = rows.contiguous(), residual.contiguous()
        out = torch.empty_like(residual)
        self._call(
            self._reference, rows.data_ptr(), rows.shape[0], residual.data_ptr(), out.data_ptr(),
            self._threads,
        )  # fmt: skip
        return out


def _parts(weight: Weight) -> tuple[int, torch.Tensor, torch.Tensor | None]:
    """Return the kind, the values and the scales per output."""
    if isinstance(weight, Int8Weight):
        return _INT8, weight.values.contiguous(), weight.scales
    if isinstance(weight, Int4Weight):
        return _INT4, weight.values.contiguous(), None
    return _BFLOAT16, weight.to(torch.bfloat16).contiguous(), None


def _padded(values: torch.Tensor, size: int) -> torch.Tensor:
    out = torch.zeros(size)
    out[: len(values)] = values
    return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
