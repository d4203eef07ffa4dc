"""Read a model's sizes and constants from config.json or from GGUF metadata."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner.arch import ATTENTION_LINEARS, MLP_LINEARS, ModelConfig
from runner.facts import Facts, UnsupportedModelError
from runner.rope import RopeScaling, scaling_from_gguf, scaling_from_hf, stretched_context

if TYPE_CHECKING:
    from collections.abc import Mapping

# config.json architecture -> whether queries and keys are normalised per head.
HF_ARCHITECTURES = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": True,
}

# GGUF architecture -> whether queries and keys are normalised per head. Mistral is a "llama".
GGUF_ARCHITECTURES = {"llama": False, "qwen2": False, "qwen3": True}

# GGUF name of a layer's linear -> safetensors name.
GGUF_LINEARS = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}

# Defaults of transformers' configurations where config.json leaves the value out.
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_WINDOW_TOKENS = 4096
_DEFAULT_FULL_LAYERS = 28

# Several times the deepest model; a damaged number must not be counted up to.
_MAX_LAYERS = 1000

_QKV = ATTENTION_LINEARS[:3]


def config_from_hf(raw: Facts, generation: Facts) -> ModelConfig:
    """Read a config.json (of transformers 4 or 5) and a generation_config.json (may be empty).

    Raises:
        UnsupportedModelError: For another architecture, rope type, activation or quantisation.
        FactError: If a value is missing or impossible.
    """
    architecture = (raw.strings("architectures") or ["(none)"])[0]
    if architecture not in HF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{raw.place}: architecture {architecture}; this runner computes "
            f"{', '.join(HF_ARCHITECTURES)}"
        )
    _refuse_variants(raw)
    heads, hidden = raw.integer("num_attention_heads"), raw.integer("hidden_size")
    layers = raw.integer("num_hidden_layers", high=_MAX_LAYERS)
    context = raw.integer("max_position_embeddings")
    head_dim = raw.integer("head_dim", None)
    rope = raw.object("rope_parameters" if raw.values.get("rope_parameters") else "rope_scaling")
    scaling = scaling_from_hf(rope, context)
    context = stretched_context(scaling, context)
    window_tokens, window_layers = _hf_window(raw, architecture, layers, context)
    theta = rope.number("rope_theta", raw.number("rope_theta", _DEFAULT_ROPE_THETA))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.integer("num_key_value_heads", heads),
        head_dim=head_dim or _head_dim(raw, hidden, heads),
        ffn_size=raw.integer("intermediate_size"),
        context_tokens=context,
        norm_eps=raw.number("rms_norm_eps", _DEFAULT_NORM_EPS),
        rope_theta=_above_one(raw, "rope_theta", theta),
        rope_scaling=scaling,
        has_qk_norm=HF_ARCHITECTURES[architecture],
        biases=_hf_biases(raw, architecture),
        is_tied=raw.boolean("tie_word_embeddings", False),
        window_tokens=window_tokens,
        window_layers=window_layers,
        eos_token_ids=generation.integers("eos_token_id") or raw.integers("eos_token_id"),
    )
    return _checked(config, raw.place)


def _checked(config: ModelConfig, place: str) -> ModelConfig:
    """Check what the forward pass builds on."""
    if config.num_heads % config.num_kv_heads:
        raise UnsupportedModelError(
            f"{place}: {config.num_heads} query heads do not share {config.num_kv_heads} KV heads "
            "evenly"
        )
    if config.head_dim % 2:
        raise UnsupportedModelError(
            f"{place}: heads of {config.head_dim} values have no two halves"
        )
    return config


def _refuse_variants(raw: Facts) -> None:
    if (activation := raw.string("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(
            f"{raw.place}: activation {activation}; this runner computes silu"
        )
    if raw.values.get("quantization_config"):
        method = raw.object("quantization_config").string("quant_method", "(unnamed)")
        raise UnsupportedModelError(
            f"{raw.place}: weights quantised by {method}; this runner reads safetensors in F32, "
            "F16 and BF16, and quantised GGUF files"
        )


def _head_dim(raw: Facts, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise raw.refuse("head_dim", f"given, since {heads} heads do not divide {hidden}")
    return hidden // heads


def _above_one(facts: Facts, key: str, theta: float) -> float:
    if theta <= 1:
        raise facts.refuse(key, "above 1")
    return theta


def _hf_biases(raw: Facts, architecture: str) -> tuple[str, ...]:
    if architecture == "Qwen2ForCausalLM":
        return _QKV
    if architecture == "MistralForCausalLM":
        return ()
    attention = ATTENTION_LINEARS if raw.boolean("attention_bias", False) else ()
    mlp = MLP_LINEARS if raw.boolean("mlp_bias", False) else ()
    return (*attention, *mlp)


def _hf_window(
    raw: Facts, architecture: str, num_layers: int, context: int
) -> tuple[int, tuple[int, ...]]:
    """Return the sliding window and the layers that have it; none if it spans the context."""
    first = 0
    if architecture == "MistralForCausalLM":
        # Absent is not null here: null is how later releases say that there is no window.
        window = raw.integer("sliding_window", None)
        if "sliding_window" not in raw.values:
            window = _DEFAULT_WINDOW_TOKENS
    elif raw.boolean("use_sliding_window", False):
        window = raw.integer("sliding_window", None)
        first = raw.integer("max_window_layers", _DEFAULT_FULL_LAYERS, low=0)
    else:
        window = None
    if window is None or window >= context:
        return 0, ()
    kinds = raw.strings("layer_types")
    if not kinds:
        return window, tuple(range(first, num_layers))
    if len(kinds) != num_layers or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise raw.refuse("layer_types", f"{num_layers} of full_attention or sliding_attention")
    return window, tuple(at for at, kind in enumerate(kinds) if kind == "sliding_attention")


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], place: str
) -> ModelConfig:
    """Read GGUF metadata.

    Args:
        metadata: The file's.
        shapes: Shape of every tensor by its GGUF name: some facts are only there.
        place: The file, for messages.

    Raises:
        UnsupportedModelError: For another architecture or rope scaling.
        FactError: If a value is missing or impossible.
    """
    whole = Facts(metadata, place)
    architecture = whole.string("general.architecture", "(none)")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{place}: GGUF architecture {architecture}; this runner computes "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    raw = _below(whole, f"{architecture}.")
    if raw.integer("expert_count", 0, low=0):
        raise UnsupportedModelError(f"{place}: a mixture of experts; this runner computes none")
    heads, hidden = raw.integer("attention.head_count"), raw.integer("embedding_length")
    layers, context = raw.integer("block_count", high=_MAX_LAYERS), raw.integer("context_length")
    head_dim = raw.integer("attention.key_length", None) or _head_dim(raw, hidden, heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if raw.integer(key, head_dim) != head_dim:
            raise raw.refuse(key, f"{head_dim}, the width of a key")
    scaling = scaling_from_gguf(_below(raw, "rope.scaling."), context)
    context = stretched_context(scaling, context)
    window = raw.integer("attention.sliding_window", 0, low=0)
    theta = raw.number("rope.freq_base", _DEFAULT_ROPE_THETA)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=(*shapes.get("token_embd.weight", ()), 1)[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=raw.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_size=raw.integer("feed_forward_length"),
        context_tokens=context,
        norm_eps=raw.number("attention.layer_norm_rms_epsilon"),
        rope_theta=_above_one(raw, "rope.freq_base", theta),
        rope_scaling=scaling,
        has_qk_norm=GGUF_ARCHITECTURES[architecture],
        biases=_gguf_biases(architecture, shapes),
        is_tied="output.weight" not in shapes,
        window_tokens=window if window < context else 0,
        window_layers=tuple(range(layers)) if 0 < window < context else (),
        eos_token_ids=_gguf_ends(whole),
    )
    return _checked(config, place)


def _below(facts: Facts, prefix: str) -> Facts:
    """Return the members whose names start with ``prefix``, named without it."""
    below = {
        key.removeprefix(prefix): value
        for key, value in facts.values.items()
        if key.startswith(prefix)
    }
    return Facts(below, f"{facts.place} {prefix.removesuffix('.')}")


def _gguf_biases(architecture: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    if architecture == "qwen2":
        return _QKV
    return tuple(hf for name, hf in GGUF_LINEARS.items() if f"blk.0.{name}.bias" in shapes)


def _gguf_ends(whole: Facts) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(token for key in keys for token in whole.integers(key)))


def with_rope_divisors(config: ModelConfig, divisors: tuple[float, ...], place: str) -> ModelConfig:
    """Return ``config`` with the scaling that the ``rope_freqs`` tensor of ``place`` stands for.

    Raises:
        UnsupportedModelError: If the metadata asks for another one too.
    """
    if config.rope_scaling is not None:
        raise UnsupportedModelError(
            f"{place}: rope_freqs.weight together with rope scaling {config.rope_scaling.kind}"
        )
    return replace(config, rope_scaling=RopeScaling(kind="divided", divisors=divisors))
