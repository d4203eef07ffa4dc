"""The decoder's forward pass over a paged KV pool.

Norm scales are folded into the linear that follows each norm, so a layer is: norm, qkv, rope,
KV write, attention, output, norm, gate and up, down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from runner.batch import BatchBuilder
from runner.kvpool import KvPool
from runner.ops_cpu import (
    PackedLinear,
    RmsNorm,
    Rope,
    attend_chunk,
    attend_one,
    head_rms_norm_,
    rotate_,
    silu_mul,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.arch import ModelConfig
    from runner.batch import AttentionGroup, Chunk
    from runner.contexts import Context


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; norm scales are part of ``qkv`` and ``gate_up``.

    Attributes:
        qkv: Query, key and value rows joined.
        output: Attention output.
        gate_up: Gate and up rows joined.
        down: Feed-forward output.
        qk_norm: Scales of the per-head norm, or None. Shape: [heads + kv_heads, head_dim].
    """

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    qk_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights, ready to compute with.

    Attributes:
        embedding: Shape: [vocab, hidden].
        layers: First to last.
        head: Hidden to logits; the final norm's scale is part of it.
    """

    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    head: PackedLinear

    @classmethod
    def read(
        cls,
        config: ModelConfig,
        read: Callable[[str], torch.Tensor],
        read_optional: Callable[[str], torch.Tensor | None],
        dtype: torch.dtype,
    ) -> ModelWeights:
        """Build them from safetensors names; without ``lm_head`` the embedding is the head.

        Args:
            config: The sizes.
            read: Gives a tensor as float32; KeyError if there is none.
            read_optional: The same, None if there is none.
            dtype: To compute in. Scales are folded before rounding to it.
        """
        reader = _Reader(config, read, read_optional, dtype)
        with torch.inference_mode():
            embedding = read("model.embed_tokens.weight")
            head = read_optional("lm_head.weight")
            head = (embedding if head is None else head) * read("model.norm.weight")
            layers = [reader.layer(f"model.layers.{at}") for at in range(config.num_layers)]
            return cls(embedding.to(dtype), layers, PackedLinear(head.to(dtype)))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads layers; see ``ModelWeights.read``."""

    config: ModelConfig
    read: Callable[[str], torch.Tensor]
    read_optional: Callable[[str], torch.Tensor | None]
    dtype: torch.dtype

    def layer(self, prefix: str) -> LayerWeights:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        before_attention = self.read(f"{prefix}.input_layernorm.weight")
        before_mlp = self.read(f"{prefix}.post_attention_layernorm.weight")
        return LayerWeights(
            qkv=self._joined(attention, ("q_proj", "k_proj", "v_proj"), before_attention),
            output=self._joined(attention, ("o_proj",)),
            gate_up=self._joined(mlp, ("gate_proj", "up_proj"), before_mlp),
            down=self._joined(mlp, ("down_proj",)),
            qk_norm=self._qk_norm(attention) if self.config.has_qk_norm else None,
        )

    def _joined(
        self, prefix: str, names: Sequence[str], scale: torch.Tensor | float = 1.0
    ) -> PackedLinear:
        """Join linears of the same input, whose norm scale is ``scale``."""
        weight = torch.cat([self.read(f"{prefix}.{name}.weight") for name in names]) * scale
        biases = [self.read_optional(f"{prefix}.{name}.bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        bias = torch.cat(present).to(self.dtype) if present else None
        return PackedLinear(weight.to(self.dtype), bias)

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        query, key = self.read(f"{prefix}.q_norm.weight"), self.read(f"{prefix}.k_norm.weight")
        heads = [query] * self.config.num_heads + [key] * self.config.num_kv_heads
        return torch.stack(heads).to(self.dtype)


class Model:
    """A loaded decoder.

    Attributes:
        config: Its sizes.
        dtype: Type of weights, activations and KV.
        fingerprint: Hex digest over sizes and sampled weights: equal only for the same model.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, dtype: torch.dtype, fingerprint: str
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.fingerprint = fingerprint
        self._weights = weights
        self._norm = RmsNorm(config.hidden_size, config.norm_eps, dtype)
        self._rope = Rope(config.rope_frequencies(), dtype)

    def new_pool(self, num_blocks: int, block_size: int) -> KvPool:
        """Allocate a KV pool of this model's shape (the memory is taken as blocks are used)."""
        config = self.config
        return KvPool(
            num_blocks,
            block_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
        )

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], pool: KvPool) -> tuple[torch.Tensor, list[int]]:
        """Compute one step; writes the KV of every chunk's tokens into ``pool``.

        Chunks of one call must not read what another of them writes.

        Returns:
            The logits after the last token of every chunk that samples, and for each row the
            index of its chunk. Shape: [samples, vocab], in the model's dtype.
        """
        config, weights = self.config, self._weights
        batch = BatchBuilder(config.num_layers, pool.block_size, self.dtype).build(chunks)
        contexts = pool.contexts.open(batch.groups)
        angles = self._rope.angles(batch.positions)
        hidden = functional.embedding(batch.token_ids, weights.embedding)
        last = config.num_layers - 1
        for at, layer in enumerate(weights.layers):
            qkv = self._write_kv(layer, hidden, angles, batch.token_rows[at], pool)
            if at == last and not batch.order:
                break
            mixed = self._attend(qkv, batch.groups, contexts, at)
            if at == last:
                # Only rows that sample are needed beyond the last attention.
                hidden, mixed = hidden[batch.sample_rows], mixed[batch.sample_rows]
            hidden = layer.output.add_to(hidden, mixed)
            hidden = layer.down.add_to(hidden, silu_mul(layer.gate_up(self._norm(hidden))))
        if not batch.order:
            return hidden.new_empty((0, config.vocab_size)), []
        return weights.head(self._norm(hidden)), batch.order

    def _write_kv(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        token_rows: torch.Tensor,
        pool: KvPool,
    ) -> torch.Tensor:
        """Project, rotate and store. Returns qkv. Shape: [rows, heads + 2 * kv_heads, dim]."""
        config = self.config
        qkv = layer.qkv(self._norm(hidden)).view(hidden.shape[0], -1, config.head_dim)
        rotated = config.num_heads + config.num_kv_heads
        if layer.qk_norm is not None:
            head_rms_norm_(qkv[:, :rotated], layer.qk_norm, config.norm_eps)
        rotate_(qkv[:, :rotated], *angles)
        pool.write(token_rows, qkv[:, config.num_heads :])
        return qkv

    def _attend(
        self,
        qkv: torch.Tensor,
        groups: Sequence[AttentionGroup],
        contexts: Sequence[Context],
        at: int,
    ) -> torch.Tensor:
        """Attention of all groups in layer ``at``. Shape: [rows, heads * dim]."""
        num_heads = self.config.num_heads
        parts = []
        for group, context in zip(groups, contexts, strict=True):
            rows = qkv[group.rows]
            keys_values = context.read(at, rows[:, num_heads:])
            keys, values = keys_values[:, :, :, : group.context].unbind(0)
            attend = attend_chunk if group.is_chunk else attend_one
            parts.append(attend(rows[:, :num_heads], keys, values, group.mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
