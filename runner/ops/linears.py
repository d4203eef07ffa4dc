"""Linears in plain torch: weights packed by oneDNN, in int8 or in int4.

Every one keeps its weight in the form that is quickest for the few rows of a decode step; the
quantised ones unpack it for the many rows of a prefill chunk, where arithmetic costs more than
reading. All of them return what the ``Linear`` of ``interface.py`` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from runner.quantised import Int4Weight, Int8Weight

# From this many rows on, unpacking a weight and multiplying with oneDNN's bfloat16 is quicker than
# torch's quantised products, which take the same time again for every row (bench/runner_speed.py).
MANY_ROWS = 32

# What torch's int4 product wants of a weight: whole groups of inputs, outputs in 16s.
INT4_OUTPUTS = 16


class PackedLinear:
    """A linear layer whose weight oneDNN has reordered for this CPU.

    The reordered form is 1.5 to 2 times faster than ``functional.linear`` at the few rows of a
    decode step. Where oneDNN is missing the plain form computes the same.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Pack ``weight``, of the type to compute in. Shapes: weight [out, in], bias [out]."""
        self._bias = bias
        self._is_packed = bool(torch._C._has_mkldnn)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
            if self._is_packed
            else weight.contiguous()
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        if not self._is_packed:
            return functional.linear(rows, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return product

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``; rounded once."""
        if not self._is_packed:
            return functional.linear(rows, self._weight, self._bias).add_(residual)
        total: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, residual, self._weight, self._bias, "add"
        )
        return total


class Int8Linear:
    """A linear layer with int8 weights and one scale per output; activations are bfloat16."""

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None = None) -> None:
        """Keep ``weight``; the bias is bfloat16."""
        self._values = weight.values.contiguous()
        self._scales = weight.scales.to(torch.bfloat16)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        if rows.shape[0] < MANY_ROWS:
            product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(
                rows.contiguous(), self._values, self._scales
            )
        else:
            # Integers up to 127 are exact in bfloat16.
            product = functional.linear(rows, self._values.to(torch.bfloat16)).mul_(self._scales)
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self(rows).add_(residual)


class Int4Linear:
    """A linear layer with int4 weights in groups of 32 inputs; activations are bfloat16.

    Holds the weight twice, as torch's product wants it and as nibbles that can be unpacked: 9 bits
    a value together, of which a decode step reads 5.
    """

    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None = None) -> None:
        """Pack ``weight``; the bias is bfloat16."""
        self._group = weight.group
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            weight.values.to(torch.int32), 1
        )
        # torch computes (value - 8) * scale + middle.
        scales, minima = weight.scales.float(), weight.minima.float()
        pairs = torch.stack((scales, minima + 8 * scales), -1).to(torch.bfloat16)
        self._pairs = pairs.transpose(0, 1).contiguous()
        self._scales, self._minima = scales[..., None], minima[..., None]
        values = weight.values.view(*weight.scales.shape, 2, -1)
        self._nibbles = values[:, :, 0] | (values[:, :, 1] << 4)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        if rows.shape[0] < MANY_ROWS:
            product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                rows.contiguous(), self._packed, self._group, self._pairs
            )
            return product if self._bias is None else product.add_(self._bias)
        return functional.linear(rows, self._unpacked(), self._bias)

    def _unpacked(self) -> torch.Tensor:
        values = torch.cat((self._nibbles & 15, self._nibbles >> 4), -1).float()
        dense = torch.addcmul(self._minima, values, self._scales).to(torch.bfloat16)
        return dense.view(dense.shape[0], -1)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self(rows).add_(residual)
