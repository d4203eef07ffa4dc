"""The decoder's forward pass over a paged KV pool.

Which numbers are multiplied how is behind ``ops/interface.py``; here is only their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from runner.arch import EMBEDDING, HEAD, linear_name
from runner.batch import BatchBuilder
from runner.lora import Adapter, AdapterRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.arch import ModelConfig
    from runner.batch import Chunk
    from runner.kvpool import KvPool
    from runner.ops.interface import Linear, Norm, Ops, Step
    from runner.quantised import WeightReader


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Attributes:
        attention_norm: Before ``qkv``.
        qkv: Query, key and value rows joined.
        output: Attention output.
        mlp_norm: Before ``gate_up``.
        gate_up: Gate and up rows joined.
        down: Feed-forward output.
        qk_norm: Scales of the per-head norm, or None. Shape: [heads + kv_heads, head_dim].
    """

    attention_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    qk_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights, ready to compute with.

    Attributes:
        embedding: Shape: [vocab, hidden].
        layers: First to last.
        norm: Before the head.
        head: Hidden to logits.
    """

    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    norm: Norm
    head: Linear

    @classmethod
    def read(cls, config: ModelConfig, reader: WeightReader, ops: Ops[Any]) -> ModelWeights:
        """Build them from safetensors names; a tied model's head is its embedding."""
        layers = _LayerReader(config, reader, ops)
        with torch.inference_mode():
            embedding = reader.read(EMBEDDING)
            name = EMBEDDING if config.is_tied else HEAD
            head = reader.head(name, embedding if config.is_tied else reader.read(HEAD))
            norm = ops.norm(reader.read("model.norm.weight"))
            parts = [layers.layer(at) for at in range(config.num_layers)]
            return cls(
                embedding.to(device=ops.device, dtype=ops.dtype), parts, norm, ops.linear(head)
            )


@dataclass(frozen=True, slots=True)
class _LayerReader:
    """Reads layers; see ``ModelWeights.read``."""

    config: ModelConfig
    reader: WeightReader
    ops: Ops[Any]

    def layer(self, at: int) -> LayerWeights:
        prefix = f"model.layers.{at}"
        return LayerWeights(
            attention_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._joined(at, ("q_proj", "k_proj", "v_proj")),
            output=self._joined(at, ("o_proj",)),
            mlp_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._joined(at, ("gate_proj", "up_proj")),
            down=self._joined(at, ("down_proj",)),
            qk_norm=self._qk_norm(f"{prefix}.self_attn") if self.config.has_qk_norm else None,
        )

    def _norm(self, name: str) -> Norm:
        return self.ops.norm(self.reader.read(name))

    def _joined(self, at: int, names: Sequence[str]) -> Linear:
        """Join linears of the same input."""
        weight = self.reader.linear([f"{linear_name(at, name)}.weight" for name in names])
        return self.ops.linear(weight, self._bias(at, names))

    def _bias(self, at: int, names: Sequence[str]) -> torch.Tensor | None:
        config = self.config
        if not set(names) & set(config.biases):
            return None
        parts = [
            self.reader.read(f"{linear_name(at, name)}.bias")
            if name in config.biases
            else torch.zeros(config.linear_shape(name)[0])
            for name in names
        ]
        return torch.cat(parts)

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        read = self.reader.read
        query, key = read(f"{prefix}.q_norm.weight"), read(f"{prefix}.k_norm.weight")
        heads = [query] * self.config.num_heads + [key] * self.config.num_kv_heads
        return self.ops.head_norm(torch.stack(heads))


class Model:
    """A loaded decoder.

    Attributes:
        config: Its sizes.
        dtype: Type of activations and KV.
        fingerprint: Hex digest over sizes and all weights: equal only for the same model.
        kernel_family: Names what else decides the bits of its KV: how weights are kept, which
            kernels compute, and ``-varying`` where a row's bits depend on what shares the batch.
        adapters: LoRA adapters by name.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops[Any],
        *,
        fingerprint: str,
        kernel_family: str,
    ) -> None:
        self.config = config
        self.dtype = ops.dtype
        self.fingerprint = fingerprint
        self.kernel_family = kernel_family
        self.adapters: dict[str, Adapter] = {}
        self._weights = weights
        self._ops = ops

    def add_adapter(self, adapter: Adapter) -> None:
        """Make an adapter available; before the engine starts."""
        self.adapters[adapter.name] = adapter

    def new_pool(self, num_blocks: int, block_size: int) -> KvPool:
        """Allocate a KV pool of this model's shape, where it computes."""
        return self._ops.new_pool(num_blocks, block_size)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], pool: KvPool) -> tuple[torch.Tensor, list[int]]:
        """Compute one step; writes the KV of every chunk's tokens into ``pool``.

        Chunks of one call must not read what another of them writes.

        Returns:
            The logits after the last token of every chunk that samples, and for each row the
            index of its chunk. Shape: [samples, vocab], in the model's dtype, on its device, valid
            until the next call.
        """
        batch = BatchBuilder(self.config.num_layers, pool.block_size).build(chunks)
        step = self._ops.open(batch, pool)
        return self._ops.run(step, self._compute), batch.order

    def _compute(self, step: Step) -> torch.Tensor:
        """Return the logits of the rows that sample."""
        config, weights = self.config, self._weights
        samples = len(step.sample_rows) > 0
        hidden = functional.embedding(step.token_ids, weights.embedding)
        adapted = self._adapted(step.adapter_rows)
        last = config.num_layers - 1
        for at in range(config.num_layers):
            qkv = self._write_kv(at, hidden, step, adapted)
            if at == last and not samples:
                break
            mixed = self._ops.attention(qkv, at, step)
            if at == last:
                # Only rows that sample are needed beyond the last attention.
                hidden, mixed = hidden[step.sample_rows], mixed[step.sample_rows]
                adapted = self._adapted(step.adapter_samples)
            hidden = self._feed_forward(at, self._project(at, hidden, mixed, adapted), adapted)
        if not samples:
            return hidden.new_empty((0, config.vocab_size))
        return weights.head(weights.norm(hidden))

    def _adapted(self, rows: Mapping[str, torch.Tensor]) -> list[AdapterRows]:
        return [AdapterRows(self.adapters[name], at) for name, at in rows.items()]

    def _write_kv(
        self, at: int, hidden: torch.Tensor, step: Step, adapted: Sequence[AdapterRows]
    ) -> torch.Tensor:
        """Project, rotate and store. Returns qkv. Shape: [rows, heads + 2 * kv_heads, dim]."""
        layer = self._weights.layers[at]
        normed = layer.attention_norm(hidden)
        flat = layer.qkv(normed)
        for some in adapted:
            some.add_to(flat, at, "qkv", normed)
        qkv = flat.view(hidden.shape[0], -1, self.config.head_dim)
        self._ops.rope_write(qkv, at, layer.qk_norm, step)
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
        layer = self._weights.layers[at]
        normed = layer.mlp_norm(hidden)
        gate_up = layer.gate_up(normed)
        for some in adapted:
            some.add_to(gate_up, at, "gate_up", normed)
        product = self._ops.silu_mul(gate_up)
        out = layer.down.add_to(hidden, product)
        for some in adapted:
            some.add_to(out, at, "down", product)
        return out
