"""Dense copies of the KV of samples that decode together, kept from step to step.

Gathering a sample's whole context in every layer of every step reads and writes all of it; a copy
that lasts only takes in the newest token. It is built anew when the samples change, when it is
full, and, where it would be too large, in every step. The pool stays the truth: a copy may be
dropped at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.batch import AttentionGroup
    from runner.kvpool import KvPool

# Room for new tokens, in blocks, when a copy is built: it costs as much as a gather, so this
# makes it one gather in 64 steps at 16 tokens a block.
_SPARE_BLOCKS = 4

# 8 samples of 1,400 tokens of a 135M model; beyond, the copy would double a large pool's memory.
_MAX_BYTES = 256 * 2**20


class DenseContext:
    """The context of one group of samples in all layers, head by head."""

    def __init__(self, pool: KvPool, group: AttentionGroup, capacity: int) -> None:
        self._fresh: GatheredContext | None = GatheredContext(pool, group)
        self._owners = group.owners
        self._ends = group.ends
        _, num_layers, _, _, num_kv_heads, head_dim = pool.data.shape
        shape = (num_layers, 2, len(group.owners), num_kv_heads, capacity, head_dim)
        # Zeros: shorter samples' unused positions are masked, and 0 * NaN would spread.
        self._layers = torch.zeros(shape, dtype=pool.data.dtype)
        # Row of every sample's first position, by sample, then keys and values, then head: the
        # order in which a step's new keys and values come.
        firsts = np.arange(0, self._layers[0].numel() // head_dim, capacity, dtype=np.int64)
        by_kind = firsts.reshape(2, len(group.owners), num_kv_heads)
        self._first_rows = by_kind.transpose(1, 0, 2).reshape(len(group.owners), -1)
        self._newest_rows = torch.empty(0, dtype=torch.int64)

    def advance(self, group: AttentionGroup) -> bool:
        """Prepare for the next step; False if that is not the next token of the same samples."""
        if group.owners != self._owners or group.context > self._layers.shape[4]:
            return False
        if not np.array_equal(group.ends, self._ends + 1):
            return False
        self._fresh = None
        self._ends = group.ends
        newest = self._first_rows + (group.ends - 1)[:, None]
        self._newest_rows = torch.from_numpy(newest.reshape(-1))
        return True

    def read(self, layer: int, keys_values: torch.Tensor) -> torch.Tensor:
        """Take in the newest token of one layer, already in the pool, and return the context.

        Args:
            layer: Which layer.
            keys_values: The newest tokens'. Shape: [samples, 2 * kv_heads, head_dim].

        Returns:
            Shape: [2, samples, kv_heads, at least the group's context, head_dim].
        """
        context = self._layers[layer]
        if self._fresh is not None:
            gathered = self._fresh.read(layer, keys_values)
            context[:, :, :, : gathered.shape[3]].copy_(gathered)
        else:
            rows = context.view(-1, context.shape[-1])
            rows.index_copy_(0, self._newest_rows, keys_values.reshape(-1, rows.shape[1]))
        return context


class GatheredContext:
    """The context of one group, gathered anew for this step in every layer."""

    def __init__(self, pool: KvPool, group: AttentionGroup) -> None:
        self._pool = pool
        self._num_sequences = group.tables.shape[0]
        self._half_rows = pool.half_rows(group.tables)

    def read(self, layer: int, keys_values: torch.Tensor) -> torch.Tensor:
        """As ``DenseContext.read``; the newest tokens come from the pool like the others."""
        del keys_values
        return self._pool.gather(self._half_rows[layer], self._num_sequences)


Context: TypeAlias = DenseContext | GatheredContext
"""What attention reads; valid for one step, layers in order."""


class Contexts:
    """Gives every group of a step its context, and keeps the dense ones for the next step."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._kept: list[DenseContext] = []

    def open(self, groups: Sequence[AttentionGroup]) -> list[Context]:
        """Return the contexts of a step's groups; dense ones of other groups are dropped."""
        before, self._kept = self._kept, []
        return [self._open(group, before) for group in groups]

    def _open(self, group: AttentionGroup, before: Sequence[DenseContext]) -> Context:
        num_blocks = group.tables.shape[1] + _SPARE_BLOCKS
        size_bytes = len(group.owners) * num_blocks * self._pool.block_bytes
        if group.is_chunk or None in group.owners or size_bytes > _MAX_BYTES:
            return GatheredContext(self._pool, group)
        context = next((kept for kept in before if kept.advance(group)), None)
        context = context or DenseContext(self._pool, group, num_blocks * self._pool.block_size)
        self._kept.append(context)
        return context
