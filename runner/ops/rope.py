"""Rotary position embedding, half-split layout, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Rope:
    """Gives the angles of positions; ``amplitude`` multiplies both sines and cosines."""

    def __init__(self, frequencies: Sequence[float], amplitude: float = 1.0) -> None:
        """Take the angle per position of every pair of dimensions."""
        self._frequencies = torch.tensor(frequencies, dtype=torch.float32)
        self._amplitude = amplitude

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, float32. Shapes: [rows] -> [rows, dim / 2] x 2."""
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        cosines, sines = angles.cos(), angles.sin()
        if self._amplitude != 1:
            cosines, sines = cosines * self._amplitude, sines * self._amplitude
        return cosines, sines

    def signed(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines for ``rotate_``. Shapes: [rows] -> [rows, 1, dim] x 2."""
        cosines, sines = self.angles(positions)
        return (
            torch.cat((cosines, cosines), 1).to(dtype).unsqueeze(1),
            torch.cat((-sines, sines), 1).to(dtype).unsqueeze(1),
        )


def rotate_(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Apply rope in place. Shapes: heads [rows, heads, dim] (any strides), others ``Rope.signed``.

    The rolled half carries its sign in ``sines``, which saves the negated copy.
    """
    rolled = heads.roll(heads.shape[-1] // 2, -1)
    torch.addcmul(heads * cosines, rolled, sines, out=heads)
