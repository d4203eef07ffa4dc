"""Rope: the angle per position of every dimension pair, plain or stretched for longer contexts.

Source: transformers modeling_rope_utils (default, linear, dynamic, llama3, yarn), llama.cpp for
how GGUF files say it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.facts import UnsupportedModelError

if TYPE_CHECKING:
    from runner.facts import Facts

HF_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
GGUF_ROPE_TYPES = ("none", "linear", "yarn")

# Yarn's defaults: more turns than fast within the trained context are kept, fewer than slow are
# stretched.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0

# Attention grows by this times the logarithm of the stretch.
_YARN_SLOPE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rope frequencies are stretched beyond the trained context.

    Attributes:
        kind: "linear", "llama3", "yarn" or "divided".
        factor: Stretch of the low frequencies (of all, when linear).
        low: Turns within the trained context below which a pair is stretched (llama3, yarn).
        high: Turns above which it is kept (llama3, yarn).
        original_context: Trained context in tokens (llama3, yarn).
        amplitude: Multiplies cosines and sines (yarn).
        is_rounded: The bounds are rounded to whole pairs (yarn).
        divisors: What divides each pair's frequency ("divided": GGUF's ``rope_freqs``).
    """

    kind: str
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_context: int = 8192
    amplitude: float = 1.0
    is_rounded: bool = True
    divisors: tuple[float, ...] = ()


def rope_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> list[float]:
    """Return the angle per position of every dimension pair. Shape: [head_dim / 2]."""
    half = head_dim // 2
    plain = [theta ** (-i / half) for i in range(half)]
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return [frequency / scaling.factor for frequency in plain]
    if scaling.kind == "divided":
        pairs = zip(plain, scaling.divisors, strict=True)
        return [frequency / divisor for frequency, divisor in pairs]
    if scaling.kind == "llama3":
        kept = [_llama3_keep(frequency, scaling) for frequency in plain]
    else:
        kept = _yarn_keep(theta, head_dim, scaling)
    return [
        frequency * (keep + (1 - keep) / scaling.factor)
        for frequency, keep in zip(plain, kept, strict=True)
    ]


def _llama3_keep(frequency: float, scaling: RopeScaling) -> float:
    """Return 0 where a pair turns slowly enough to be stretched fully, 1 where it is kept."""
    turns = scaling.original_context * frequency / (2 * math.pi)
    return min(1.0, max(0.0, (turns - scaling.low) / (scaling.high - scaling.low)))


def _yarn_keep(theta: float, head_dim: int, scaling: RopeScaling) -> list[float]:
    """As ``_llama3_keep`` for every pair, linear in the pair's number instead of its turns."""

    def pair_of(turns: float) -> float:
        wavelengths = scaling.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(theta))

    first, last = pair_of(scaling.high), pair_of(scaling.low)
    if scaling.is_rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # As in the source: a ramp without width would divide by zero.
    width = (last - first) or 0.001
    return [1 - min(1.0, max(0.0, (at - first) / width)) for at in range(head_dim // 2)]


def _yarn_amplitude(factor: float, slope: float = 1.0) -> float:
    return 1.0 if factor <= 1 else _YARN_SLOPE * slope * math.log(factor) + 1.0


def stretched_context(scaling: RopeScaling | None, context_tokens: int) -> int:
    """Return the context with yarn, which is often added to a model whose files say the old one.

    Source: vLLM, which takes the trained context times the factor too.
    """
    if scaling is None or scaling.kind != "yarn":
        return context_tokens
    return max(context_tokens, int(scaling.original_context * scaling.factor))


def scaling_from_hf(rope: Facts, context_tokens: int) -> RopeScaling | None:
    """Read ``rope_parameters`` (transformers 5) or ``rope_scaling`` (4); empty means plain.

    "dynamic" stretches only beyond the trained context, and by the length of the whole text, so
    that a prefix would be computed anew with every token: here the context ends before that.

    Raises:
        UnsupportedModelError: For another type.
        FactError: If a value is missing or impossible.
    """
    kind = rope.string("rope_type", "") or rope.string("type", "") or "default"
    if kind not in HF_ROPE_TYPES:
        raise UnsupportedModelError(
            f"{rope.place}: rope type {kind}; this runner computes {', '.join(HF_ROPE_TYPES)}"
        )
    if rope.number("partial_rotary_factor", 1.0) != 1:
        raise UnsupportedModelError(
            f"{rope.place}: `partial_rotary_factor` is not 1; this runner rotates whole heads"
        )
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=rope.number("factor"))
    if kind == "llama3":
        return _bounded(
            rope,
            RopeScaling(
                kind=kind,
                factor=rope.number("factor"),
                low=rope.number("low_freq_factor"),
                high=rope.number("high_freq_factor"),
                original_context=rope.integer("original_max_position_embeddings"),
            ),
        )
    return _hf_yarn(rope, context_tokens)


def _hf_yarn(rope: Facts, context_tokens: int) -> RopeScaling:
    original = rope.integer("original_max_position_embeddings", context_tokens)
    factor = rope.number("factor", context_tokens / original)
    slope, slope_all = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    amplitude = _yarn_amplitude(factor)
    if slope and slope_all:
        amplitude = _yarn_amplitude(factor, slope) / _yarn_amplitude(factor, slope_all)
    return _bounded(
        rope,
        RopeScaling(
            kind="yarn",
            factor=factor,
            low=rope.number("beta_slow", _BETA_SLOW),
            high=rope.number("beta_fast", _BETA_FAST),
            original_context=original,
            amplitude=rope.number("attention_factor", amplitude),
            is_rounded=rope.boolean("truncate", True),
        ),
    )


def _bounded(rope: Facts, scaling: RopeScaling) -> RopeScaling:
    if scaling.low < scaling.high:
        return scaling
    low, high = (
        ("low_freq_factor", "high_freq_factor")
        if scaling.kind == "llama3"
        else ("beta_slow", "beta_fast")
    )
    raise rope.refuse(low, f"below `{high}` ({scaling.high})")


def scaling_from_gguf(rope: Facts, context_tokens: int) -> RopeScaling | None:
    """Read the keys below ``<architecture>.rope.scaling``; an empty object means plain.

    Raises:
        UnsupportedModelError: For another type.
        FactError: If a value is missing or impossible.
    """
    kind = rope.string("type", "none")
    if kind not in GGUF_ROPE_TYPES:
        raise UnsupportedModelError(
            f"{rope.place}: GGUF rope scaling {kind}; this runner computes "
            f"{', '.join(GGUF_ROPE_TYPES)}"
        )
    if kind == "none":
        return None
    factor = rope.number("factor")
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor)
    scaling = RopeScaling(
        kind=kind,
        factor=factor,
        low=rope.number("yarn_beta_slow", _BETA_SLOW),
        high=rope.number("yarn_beta_fast", _BETA_FAST),
        original_context=rope.integer("original_context_length", context_tokens),
        amplitude=rope.number("attn_factor", 1.0) * _yarn_amplitude(factor),
    )
    if scaling.low >= scaling.high:
        raise rope.refuse("yarn_beta_slow", f"below `yarn_beta_fast` ({scaling.high})")
    return scaling
