"""The decoder's arithmetic in plain torch, for any CPU: the path that is always there.

Attention reads contexts that ``contexts.py`` gathers out of the pool or keeps dense between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from runner.kvpool import KvPool
from runner.ops.linears import Int4Linear, Int8Linear, PackedLinear
from runner.ops.masks import chunk_mask, single_mask
from runner.ops.rope import Rope, rotate_
from runner.quantised import Int4Weight, Int8Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.arch import ModelConfig
    from runner.batch import AttentionGroup, Batch
    from runner.contexts import Context
    from runner.ops.interface import Linear, Norm
    from runner.quantised import Weight

# Below this many rows the norm's cost is the number of torch calls, above it their speed.
_MANY_ROWS = 32


class RmsNorm:
    """Divide each row by its root mean square, then scale it."""

    def __init__(self, scale: torch.Tensor, epsilon: float) -> None:
        """Take the scale in the type to compute in. Shape: [width]."""
        self._width = scale.shape[0]
        self._epsilon = epsilon
        # The second half is computed and thrown away.
        self._scale = torch.cat((scale, scale))
        self._signs = torch.tensor([[1.0], [-1.0]], dtype=scale.dtype)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Shapes: [rows, width] -> [rows, width]."""
        if rows.shape[0] >= _MANY_ROWS:
            length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
            factor = length.square_().div_(self._width).add_(self._epsilon).rsqrt_()
            return torch.mul(rows, factor).mul_(self._scale[: self._width]).to(rows.dtype)
        # (x, -x) has mean 0 and variance mean(x^2): layer_norm is one fused call, where torch
        # composes a norm of several.
        mirrored = torch.mul(rows.unsqueeze(1), self._signs).view(rows.shape[0], -1)
        normed = functional.layer_norm(
            mirrored, mirrored.shape[1:], self._scale, None, self._epsilon
        )
        return normed[:, : self._width]


def head_rms_norm_(heads: torch.Tensor, scale: torch.Tensor, epsilon: float) -> None:
    """Normalise each head in place. Shapes: heads [rows, heads, dim], scale [heads, dim]."""
    heads.copy_(functional.rms_norm(heads, heads.shape[-1:], None, epsilon).mul_(scale))


@dataclass(slots=True)
class TorchStep:
    """See ``Step``; with what every layer needs.

    Attributes:
        batch: The step.
        pool: Where KV goes.
        angles: Cosines and signed sines of all rows.
        contexts: What each group reads.
    """

    batch: Batch
    pool: KvPool
    angles: tuple[torch.Tensor, torch.Tensor]
    contexts: Sequence[Context]

    @property
    def token_ids(self) -> torch.Tensor:
        """See ``Step``."""
        return self.batch.token_ids

    @property
    def sample_rows(self) -> torch.Tensor:
        """See ``Step``."""
        return self.batch.sample_rows

    @property
    def adapter_rows(self) -> Mapping[str, torch.Tensor]:
        """See ``Step``."""
        return self.batch.adapter_rows

    @property
    def adapter_samples(self) -> Mapping[str, torch.Tensor]:
        """See ``Step``."""
        return self.batch.adapter_samples


class TorchOps:
    """See ``Ops``."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Prepare for models of these sizes."""
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.family = "torch"
        self._config = config
        self._window_layers = frozenset(config.window_layers)
        scaling = config.rope_scaling
        amplitude = 1.0 if scaling is None else scaling.amplitude
        self._rope = Rope(config.rope_frequencies(), amplitude)

    def new_pool(self, num_blocks: int, block_size: int) -> KvPool:
        """See ``Ops``."""
        config = self._config
        return KvPool(
            num_blocks,
            block_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
        )

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """See ``Ops``."""
        bias = None if bias is None else bias.to(self.dtype)
        if isinstance(weight, Int8Weight):
            return Int8Linear(weight, bias)
        if isinstance(weight, Int4Weight):
            return Int4Linear(weight, bias)
        return PackedLinear(weight.to(self.dtype), bias)

    def norm(self, scale: torch.Tensor) -> Norm:
        """See ``Ops``."""
        return RmsNorm(scale.to(self.dtype), self._config.norm_eps)

    def head_norm(self, scale: torch.Tensor) -> torch.Tensor:
        """See ``Ops``."""
        return scale.to(self.dtype).contiguous()

    def open(self, batch: Batch, pool: KvPool) -> TorchStep:
        """See ``Ops``."""
        angles = self._rope.signed(batch.positions, self.dtype)
        return TorchStep(batch, pool, angles, pool.contexts.open(batch.groups))

    def run(self, step: TorchStep, compute: Callable[[TorchStep], torch.Tensor]) -> torch.Tensor:
        """See ``Ops``."""
        return compute(step)

    def rope_write(
        self, qkv: torch.Tensor, layer: int, head_norm: torch.Tensor | None, step: TorchStep
    ) -> None:
        """See ``Ops``."""
        config = self._config
        turned = qkv[:, : config.num_heads + config.num_kv_heads]
        if head_norm is not None:
            head_rms_norm_(turned, head_norm, config.norm_eps)
        rotate_(turned, *step.angles)
        step.pool.write(step.batch.token_rows[layer], qkv[:, config.num_heads :])

    def attention(self, qkv: torch.Tensor, layer: int, step: TorchStep) -> torch.Tensor:
        """See ``Ops``."""
        parts = [
            self._attend(qkv[group.rows], layer, group, context)
            for group, context in zip(step.batch.groups, step.contexts, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self, rows: torch.Tensor, layer: int, group: AttentionGroup, context: Context
    ) -> torch.Tensor:
        """Attention of one group's rows of qkv."""
        queries, fresh = rows[:, : self._config.num_heads], rows[:, self._config.num_heads :]
        keys, values = context.read(layer, fresh)[:, :, :, : group.context].unbind(0)
        window = self._config.window_tokens if layer in self._window_layers else 0
        if group.is_chunk:
            return attend_chunk(queries, keys, values, chunk_mask(group, window, self.dtype))
        return attend_one(queries, keys, values, single_mask(group, window, self.dtype))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Ops``."""
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
