"""The decoder's arithmetic on the CPU, in plain torch: linears, norm, rope, attention.

Every tensor is on the CPU and of the model's dtype unless said otherwise. Nothing here knows
about requests; callers hold ``torch.inference_mode``, which the packed linears need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below this many rows the norm's cost is the number of torch calls, above it their speed.
_FEW_ROWS = 32


class PackedLinear:
    """A linear layer whose weight oneDNN has reordered for this CPU.

    The reordered form is 1.5 to 2 times faster than ``functional.linear`` at the few rows of a
    decode step (bench/runner_speed.py). Where oneDNN is missing the plain form computes the same.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Pack ``weight``. Shapes: weight [out, in], bias [out]."""
        self._bias = bias
        self._is_packed = bool(torch._C._has_mkldnn)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
            if self._is_packed
            else weight.contiguous()
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows @ weight.T + bias. Shapes: [rows, in] -> [rows, out]."""
        if not self._is_packed:
            return functional.linear(rows, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return product

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return residual + rows @ weight.T + bias as a fresh tensor, rounded once."""
        if not self._is_packed:
            return functional.linear(rows, self._weight, self._bias).add_(residual)
        total: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, residual, self._weight, self._bias, "add"
        )
        return total


class RmsNorm:
    """Divide each row by its root mean square; the learned scale lives in the next linear."""

    def __init__(self, width: int, epsilon: float, dtype: torch.dtype) -> None:
        self._width = width
        self._epsilon = epsilon
        self._signs = torch.tensor([[1.0], [-1.0]], dtype=dtype)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Shapes: [rows, width] -> [rows, width]."""
        if rows.shape[0] >= _FEW_ROWS:
            return functional.rms_norm(rows, (self._width,), None, self._epsilon)
        # (x, -x) has mean 0 and variance mean(x^2): layer_norm, one fused call, does the same as
        # rms_norm, which torch composes of six.
        mirrored = torch.mul(rows.unsqueeze(1), self._signs).view(rows.shape[0], -1)
        normed = functional.layer_norm(mirrored, mirrored.shape[1:], None, None, self._epsilon)
        return normed[:, : self._width]


def head_rms_norm_(heads: torch.Tensor, scale: torch.Tensor, epsilon: float) -> None:
    """Normalise each head in place. Shapes: heads [rows, heads, dim], scale [heads, dim]."""
    heads.copy_(functional.rms_norm(heads, heads.shape[-1:], None, epsilon).mul_(scale))


class Rope:
    """Rotary position embedding, half-split layout."""

    def __init__(
        self, frequencies: Sequence[float], dtype: torch.dtype, amplitude: float = 1.0
    ) -> None:
        self._frequencies = torch.tensor(frequencies, dtype=torch.float32)
        self._amplitude = amplitude
        self._dtype = dtype

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines for ``rotate_``. Shapes: [rows] -> [rows, 1, dim] x 2."""
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        cosines, sines = angles.cos(), angles.sin()
        if self._amplitude != 1:
            cosines, sines = cosines * self._amplitude, sines * self._amplitude
        return (
            torch.cat((cosines, cosines), 1).to(self._dtype).unsqueeze(1),
            torch.cat((-sines, sines), 1).to(self._dtype).unsqueeze(1),
        )


def rotate_(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Apply rope in place. Shapes: heads [rows, heads, dim] (any strides), others from ``Rope``.

    The rolled half carries its sign in ``sines``, which saves the negated copy.
    """
    rolled = heads.roll(heads.shape[-1] // 2, -1)
    torch.addcmul(heads * cosines, rolled, sines, out=heads)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. Shapes: [rows, 2 * ffn] -> [rows, ffn]."""
    gate, up = gate_up.view(gate_up.shape[0], 2, -1).unbind(1)
    return functional.silu(gate).mul_(up)


def attend_one(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one query token per sequence over its context.

    The query heads that share a KV head become rows of one matrix, which on some CPUs is six
    times faster in bfloat16 than ``enable_gqa`` (measured on AMD, 2026-11).

    Args:
        queries: Shape: [sequences, heads, dim].
        keys: Shape: [sequences, kv_heads, context, dim].
        values: As ``keys``.
        mask: Added to the scores, -inf where a sequence is shorter; None if none is. Shape:
            [sequences, 1, 1, context].

    Returns:
        Shape: [sequences, heads * dim].
    """
    sequences, heads, dim = queries.shape
    folded = queries.view(sequences, keys.shape[1], heads // keys.shape[1], dim)
    if mask is not None:
        mask = mask.expand(-1, -1, folded.shape[2], -1)
    mixed = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return mixed.reshape(sequences, heads * dim)


def attend_chunk(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of a prefill chunk over its own and all earlier tokens.

    Args:
        queries: Shape: [tokens, heads, dim].
        keys: Shape: [1, kv_heads, context, dim].
        values: As ``keys``.
        mask: Added to the scores; None if the chunk is the whole context (plain causal). Shape:
            [tokens, context].

    Returns:
        Shape: [tokens, heads * dim].
    """
    mixed = functional.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return mixed.transpose(1, 2).reshape(queries.shape[0], -1)
