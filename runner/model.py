"""The decoder's forward pass over a paged KV pool.

Norm scales are folded into the linear that follows each norm, so a layer is: norm, qkv, rope,
KV write, attention, output, norm, gate and up, down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from runner.arch import EMBEDDING, HEAD, linear_name
from runner.batch import BatchBuilder
from runner.kvpool import KvPool
from runner.lora import Adapter, AdapterRows
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
    from collections.abc import Callable, Mapping, Sequence

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
        cls, config: ModelConfig, read: Callable[[str], torch.Tensor], dtype: torch.dtype
    ) -> ModelWeights:
        """Build them from safetensors names; a tied model's head is its embedding.

        Args:
            config: The sizes.
            read: Gives a tensor as float32.
            dtype: To compute in. Scales are folded before rounding to it.
        """
        reader = _Reader(config, read, dtype)
        with torch.inference_mode():
            embedding = read(EMBEDDING)
            head = embedding if config.is_tied else read(HEAD)
            head = head * read("model.norm.weight")
            layers = [reader.layer(at) for at in range(config.num_layers)]
            return cls(embedding.to(dtype), layers, PackedLinear(head.to(dtype)))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads layers; see ``ModelWeights.read``."""

    config: ModelConfig
    read: Callable[[str], torch.Tensor]
    dtype: torch.dtype

    def layer(self, at: int) -> LayerWeights:
        prefix = f"model.layers.{at}"
        before_attention = self.read(f"{prefix}.input_layernorm.weight")
        before_mlp = self.read(f"{prefix}.post_attention_layernorm.weight")
        return LayerWeights(
            qkv=self._joined(at, ("q_proj", "k_proj", "v_proj"), before_attention),
            output=self._joined(at, ("o_proj",)),
            gate_up=self._joined(at, ("gate_proj", "up_proj"), before_mlp),
            down=self._joined(at, ("down_proj",)),
            qk_norm=self._qk_norm(f"{prefix}.self_attn") if self.config.has_qk_norm else None,
        )

    def _joined(
        self, at: int, names: Sequence[str], scale: torch.Tensor | float = 1.0
    ) -> PackedLinear:
        """Join linears of the same input, whose norm scale is ``scale``."""
        places = [linear_name(at, name) for name in names]
        weight = torch.cat([self.read(f"{place}.weight") for place in places]) * scale
        return PackedLinear(weight.to(self.dtype), self._bias(at, names))

    def _bias(self, at: int, names: Sequence[str]) -> torch.Tensor | None:
        config = self.config
        if not set(names) & set(config.biases):
            return None
        parts = [
            self.read(f"{linear_name(at, name)}.bias")
            if name in config.biases
            else torch.zeros(config.linear_shape(name)[0])
            for name in names
        ]
        return torch.cat(parts).to(self.dtype)

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        query, key = self.read(f"{prefix}.q_norm.weight"), self.read(f"{prefix}.k_norm.weight")
        heads = [query] * self.config.num_heads + [key] * self.config.num_kv_heads
        return torch.stack(heads).to(self.dtype)


class Model:
    """A loaded decoder.

    Attributes:
        config: Its sizes.
        dtype: Type of weights, activations and KV.
        fingerprint: Hex digest over sizes and all weights: equal only for the same model.
        adapters: LoRA adapters by name.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, dtype: torch.dtype, fingerprint: str
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.fingerprint = fingerprint
        self.adapters: dict[str, Adapter] = {}
        self._weights = weights
        self._norm = RmsNorm(config.hidden_size, config.norm_eps, dtype)
        scaling = config.rope_scaling
        amplitude = 1.0 if scaling is None else scaling.amplitude
        self._rope = Rope(config.rope_frequencies(), dtype, amplitude)
        self._window_layers = frozenset(config.window_layers)

    def add_adapter(self, adapter: Adapter) -> None:
        """Make an adapter available; before the engine starts."""
        self.adapters[adapter.name] = adapter

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
        builder = BatchBuilder(config.num_layers, pool.block_size, self.dtype, config.window_tokens)
        batch = builder.build(chunks)
        contexts = pool.contexts.open(batch.groups)
        angles = self._rope.angles(batch.positions)
        hidden = functional.embedding(batch.token_ids, weights.embedding)
        adapted = self._adapted(batch.adapter_rows)
        last = config.num_layers - 1
        for at in range(config.num_layers):
            qkv = self._write_kv(at, hidden, angles, batch.token_rows[at], pool, adapted)
            if at == last and not batch.order:
                break
            mixed = self._attend(qkv, batch.groups, contexts, at)
            if at == last:
                # Only rows that sample are needed beyond the last attention.
                hidden, mixed = hidden[batch.sample_rows], mixed[batch.sample_rows]
                adapted = self._adapted(batch.adapter_samples)
            hidden = self._feed_forward(at, self._project(at, hidden, mixed, adapted), adapted)
        if not batch.order:
            return hidden.new_empty((0, config.vocab_size)), []
        return weights.head(self._norm(hidden)), batch.order

    def _adapted(self, rows: Mapping[str, torch.Tensor]) -> list[AdapterRows]:
        return [AdapterRows(self.adapters[name], at) for name, at in rows.items()]

    def _write_kv(
        self,
        at: int,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        token_rows: torch.Tensor,
        pool: KvPool,
        adapted: Sequence[AdapterRows],
    ) -> torch.Tensor:
        """Project, rotate and store. Returns qkv. Shape: [rows, heads + 2 * kv_heads, dim]."""
        config, layer = self.config, self._weights.layers[at]
        normed = self._norm(hidden)
        flat = layer.qkv(normed)
        for some in adapted:
            some.add_to(flat, at, "qkv", normed)
        qkv = flat.view(hidden.shape[0], -1, config.head_dim)
        rotated = config.num_heads + config.num_kv_heads
        if layer.qk_norm is not None:
            head_rms_norm_(qkv[:, :rotated], layer.qk_norm, config.norm_eps)
        rotate_(qkv[:, :rotated], *angles)
        pool.write(token_rows, qkv[:, config.num_heads :])
        return qkv

    def _project(
        self, at: int, hidden: torch.Tensor, mixed: torch.Tensor, adapted: Sequence[AdapterRows]
    ) -> torch.Tensor:
        """Return the residual stream after attention."""
        out = self._weights.layers[at].output.add_to(hidden, mixed)
        for some in adapted:
            some.add_to(out, at, "output", mixed)
        return out

    def _feed_forward(
        self, at: int, hidden: torch.Tensor, adapted: Sequence[AdapterRows]
    ) -> torch.Tensor:
        """Return the residual stream after the feed-forward."""
        layer, normed = self._weights.layers[at], self._norm(hidden)
        gate_up = layer.gate_up(normed)
        for some in adapted:
            some.add_to(gate_up, at, "gate_up", normed)
        product = silu_mul(gate_up)
        out = layer.down.add_to(hidden, product)
        for some in adapted:
            some.add_to(out, at, "down", product)
        return out

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
            mask = group.window_mask if at in self._window_layers else group.mask
            parts.append(attend(rows[:, :num_heads], keys, values, mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
