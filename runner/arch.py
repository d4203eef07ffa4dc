"""What a model looks like: sizes, rope, stop tokens; read from config.json or GGUF metadata.

One decoder shape is supported: pre-norm attention with grouped KV heads, half-split rope and a
SwiGLU feed-forward. Anything else is refused by name rather than run wrongly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# config.json architecture -> whether queries and keys are normalised per head.
HF_ARCHITECTURES = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": True,
}

# GGUF architecture -> whether queries and keys are normalised per head.
GGUF_ARCHITECTURES = {"llama": False, "qwen2": False, "qwen3": True}

# Defaults of transformers' LlamaConfig where config.json leaves the value out.
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_NORM_EPS = 1e-6


class UnsupportedModelError(ValueError):
    """The model is of a kind this runner does not compute; the message names those it does."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rope frequencies are stretched beyond the trained context.

    Attributes:
        kind: "linear" or "llama3".
        factor: Stretch of the low frequencies (of all, when linear).
        low_freq_factor: llama3 only: wavelengths above original / low are stretched.
        high_freq_factor: llama3 only: wavelengths below original / high are kept.
        original_context: llama3 only, tokens.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


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
        head_dim: Width of a head.
        ffn_size: Width of the feed-forward.
        context_tokens: Most positions the model was made for.
        norm_eps: Added to the mean square in every norm.
        rope_theta: Base of the rope wavelengths.
        rope_scaling: None for plain rope.
        has_qk_norm: Queries and keys are normalised per head.
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
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check what the forward pass builds on.

        Raises:
            UnsupportedModelError: If the heads do not group.
        """
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads do not share {self.num_kv_heads} KV heads evenly"
            )

    def rope_frequencies(self) -> list[float]:
        """Return the angle per position of every dimension pair. Shape: [head_dim / 2].

        Source: transformers modeling_rope_utils, types "default", "linear" and "llama3".
        """
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-i / half) for i in range(half)]
        scaling = self.rope_scaling
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return [frequency / scaling.factor for frequency in plain]
        return [_stretch_llama3(frequency, scaling) for frequency in plain]


def _stretch_llama3(frequency: float, scaling: RopeScaling) -> float:
    turns = scaling.original_context * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 where a dimension turns slowly enough to be stretched fully, 1 where it is kept.
    keep = min(1.0, max(0.0, (turns - low) / (high - low)))
    return frequency * (keep + (1 - keep) / scaling.factor)


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json (of transformers 4 or 5) and a generation_config.json (may be empty).

    Raises:
        UnsupportedModelError: For another architecture, rope type or activation.
        KeyError: If a size is missing.
    """
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in HF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture}; this runner computes {', '.join(HF_ARCHITECTURES)}"
        )
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"activation {activation}; this runner computes silu")
    heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    context = raw["max_position_embeddings"]
    if (window := raw.get("sliding_window")) and raw.get("use_sliding_window", True):
        # Within one window sliding attention is full attention.
        context = min(context, window)
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        ffn_size=raw["intermediate_size"],
        context_tokens=context,
        norm_eps=raw.get("rms_norm_eps", _DEFAULT_NORM_EPS),
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta") or _DEFAULT_ROPE_THETA,
        rope_scaling=_hf_rope_scaling(rope),
        has_qk_norm=HF_ARCHITECTURES[architecture],
        eos_token_ids=_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
    )


def _hf_rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise UnsupportedModelError(f"rope type {kind}; this runner computes default, linear, llama3")


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def config_from_gguf(metadata: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """Read GGUF metadata; ``vocab_size`` comes from the embedding's rows.

    Raises:
        UnsupportedModelError: For another architecture or rope scaling.
        KeyError: If a size is missing.
    """
    architecture = metadata["general.architecture"]
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture}; this runner computes "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )

    def read(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise KeyError(f"{architecture}.{key}")
        return value

    heads, hidden = read("attention.head_count"), read("embedding_length")
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=read("block_count"),
        num_heads=heads,
        num_kv_heads=read("attention.head_count_kv", heads),
        head_dim=read("attention.key_length", hidden // heads),
        ffn_size=read("feed_forward_length"),
        context_tokens=read("context_length"),
        norm_eps=read("attention.layer_norm_rms_epsilon"),
        rope_theta=read("rope.freq_base", _DEFAULT_ROPE_THETA),
        rope_scaling=_gguf_rope_scaling(architecture, metadata),
        has_qk_norm=GGUF_ARCHITECTURES[architecture],
        eos_token_ids=tuple(dict.fromkeys(metadata[key] for key in ends if key in metadata)),
    )


def _gguf_rope_scaling(architecture: str, metadata: Mapping[str, Any]) -> RopeScaling | None:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(kind, float(metadata[f"{architecture}.rope.scaling.factor"]))
    raise UnsupportedModelError(f"GGUF rope scaling {kind}; this runner computes none, linear")
