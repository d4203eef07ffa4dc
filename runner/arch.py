"""What a model looks like: sizes, rope, biases, stop tokens, and the tensors that follow from them.

One decoder shape is supported: pre-norm attention with grouped KV heads, half-split rope and a
SwiGLU feed-forward. Anything else is refused by name rather than run wrongly. ``configs.py`` reads
these facts from files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runner.rope import RopeScaling, rope_frequencies

if TYPE_CHECKING:
    from collections.abc import Iterator

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of one decoder.

    Attributes:
        architecture: As the files name it.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Width of a head, even.
        ffn_size: Width of the feed-forward.
        context_tokens: Most positions the model was made for.
        norm_eps: Added to the mean square in every norm.
        rope_theta: Base of the rope wavelengths.
        rope_scaling: None for plain rope.
        has_qk_norm: Queries and keys are normalised per head.
        biases: Linears that add a bias, of ``ATTENTION_LINEARS`` and ``MLP_LINEARS``.
        is_tied: The embedding is the head too.
        window_tokens: Most tokens a token of the ``window_layers`` looks back on, itself included.
        window_layers: Layers with such a window; none for full attention.
        eos_token_ids: Tokens that end a completion.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    context_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    has_qk_norm: bool
    biases: tuple[str, ...] = ()
    is_tied: bool = False
    window_tokens: int = 0
    window_layers: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...]

    def with_head(self, is_stored: bool) -> ModelConfig:
        """Return these sizes with a head of its own if one is stored, whatever they say."""
        return replace(self, is_tied=self.is_tied and not is_stored)

    def rope_frequencies(self) -> list[float]:
        """Return the angle per position of every dimension pair. Shape: [head_dim / 2]."""
        return rope_frequencies(self.rope_theta, self.head_dim, self.rope_scaling)

    def linear_shape(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a layer's linear, one of those that ``biases`` names."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, ffn = self.hidden_size, self.ffn_size
        return {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
        }[name]


def linear_name(layer: int, name: str) -> str:
    """Return where a layer's linear lies, by safetensors names, without ``.weight``."""
    part = "mlp" if name in MLP_LINEARS else "self_attn"
    return f"model.layers.{layer}.{part}.{name}"


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor that a model of these sizes has."""
    hidden = (config.hidden_size,)
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", hidden
    if not config.is_tied:
        yield HEAD, (config.vocab_size, config.hidden_size)
    for at in range(config.num_layers):
        prefix = f"model.layers.{at}"
        yield f"{prefix}.input_layernorm.weight", hidden
        yield f"{prefix}.post_attention_layernorm.weight", hidden
        if config.has_qk_norm:
            yield f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)
        for name in (*ATTENTION_LINEARS, *MLP_LINEARS):
            shape = config.linear_shape(name)
            yield f"{linear_name(at, name)}.weight", shape
            if name in config.biases:
                yield f"{linear_name(at, name)}.bias", shape[:1]
