"""The KV pool's memory: one block-first tensor, and how tokens get in and contexts out.

Which block holds what is ``blocks.py``'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from runner.contexts import Contexts
from runner.tiers.mover import CpuBlockMover

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from runner.tiers.types import BlockMover


class KvPool:
    """The keys and values of all blocks: one tensor, block-first.

    ``data`` is [blocks, layers, 2, block_size, kv_heads, head_dim]: one block is one contiguous
    piece of ``block_bytes``, all layers, keys and values. Reading and writing go through flat
    views, a block's half layer being row (block * layers + layer) * 2 + (0 keys, 1 values).
    Only the engine thread touches it, except for single blocks that ``tiers/mover.py`` copies.
    ``contexts`` gives attention its keys and values.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        shape = (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
        # Zeros, not garbage: masked positions are read too, and 0 * NaN would spread.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.num_layers = num_layers
        self.block_size = block_size
        self.block_bytes = self.data[0].numel() * self.data.element_size()
        self._tokens = self.data.view(-1, num_kv_heads * head_dim)
        self._halves = self.data.view(-1, block_size * num_kv_heads * head_dim)
        self._head_shape = (num_kv_heads, head_dim)
        self._scratch = self._halves.new_empty(0)
        self.contexts = Contexts(self)

    def wait(self) -> float:
        """Block until every step that was begun is done: here they are when they return.

        Returns:
            Seconds that steps since the last call stood still for loads; here they never do.
        """
        return 0.0

    def new_mover(self) -> BlockMover:
        """Return what copies blocks between here and host memory, on transfer threads."""
        return CpuBlockMover(self)

    def write(self, token_rows: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store the keys and values of some tokens.

        Args:
            token_rows: Rows of the per-token view, keys and values in turn. Shape: [2 * tokens].
            keys_values: Shape: [tokens, 2 * kv_heads * head_dim].
        """
        self._tokens.index_copy_(
            0, token_rows, keys_values.reshape(token_rows.shape[0], self._tokens.shape[1])
        )

    def half_rows(self, tables: npt.NDArray[np.int64]) -> Sequence[torch.Tensor]:
        """Return, for each layer, the half-layer rows of some block tables: keys, then values.

        Shapes: tables [sequences, blocks] -> layers x [2 * sequences * blocks].
        """
        keys = tables.reshape(1, -1) * (self.num_layers * 2)
        layers = np.arange(self.num_layers, dtype=np.int64)[:, None] * 2
        return torch.from_numpy(np.concatenate((keys, keys + 1), axis=1) + layers).unbind(0)

    def gather(self, half_rows: torch.Tensor, num_sequences: int) -> torch.Tensor:
        """Copy the context of some sequences into a scratch buffer, valid until the next gather.

        Args:
            half_rows: One layer's, from ``half_rows``.
            num_sequences: How many sequences of equally many blocks they are.

        Returns:
            Shape: [2, sequences, kv_heads, blocks * block_size, head_dim] (a strided view).
        """
        count = half_rows.shape[0]
        needed = count * self._halves.shape[1]
        if self._scratch.numel() < needed:
            self._scratch = self._halves.new_empty(needed)
        out = self._scratch[:needed].view(count, -1)
        torch.index_select(self._halves, 0, half_rows, out=out)
        return out.view(2, num_sequences, -1, *self._head_shape).transpose(2, 3)

    def copy_block(self, source: int, target: int) -> None:
        """Copy all layers of one block."""
        self.data[target].copy_(self.data[source])
