"""GGUF files of every supported architecture and tensor type, against transformers.

Written as llama.cpp's converter writes them: query and key rows in pairs for "llama" alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from runner.batch import Chunk
from runner.configs import GGUF_LINEARS
from runner.dequant import SUPPORTED_TYPES
from runner.facts import UnsupportedModelError
from runner.sources import WeightsError
from runner.weights import load_model, open_weights

# Every matrix has rows of whole superblocks.
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
}
NAMES = {hf: name for name, hf in GGUF_LINEARS.items()} | {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
F32 = gguf.GGMLQuantizationType.F32
TYPES = [gguf.GGMLQuantizationType[kind.name] for kind in SUPPORTED_TYPES.values()]
PROMPT = [3, 14, 15, 9, 26, 53, 58, 9, 7, 9, 3, 2, 38, 46, 26, 43, 38, 32, 7, 50]


def gguf_name(hf_name: str) -> str:
    if hf_name in OUTER:
        return OUTER[hf_name]
    _, _, layer, *_, part, kind = hf_name.split(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def paired(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows in the order of interleaved rope, as the converter of "llama" does."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def halved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo ``paired``."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def quantized(
    values: np.ndarray, kind: gguf.GGMLQuantizationType, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes of a type, and the values they stand for.

    The reference package makes no K-types: there the bytes are random with sane scales.
    """
    if not kind.name.endswith("_K"):
        stored = gguf.quants.quantize(values, kind)
        return stored, gguf.quants.dequantize(stored, kind).reshape(values.shape)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = values.shape[0]
    blocks = rng.integers(0, 256, (rows, values.shape[1] // block_values, block_bytes), np.uint8)
    scale_at = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    scales = {"Q2_K": 1e-2, "Q3_K": 1e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 5e-5}
    for at in scale_at[kind.name]:
        blocks[:, :, at : at + 2] = np.array([scales[kind.name]], np.float16).view(np.uint8)
    stored = blocks.reshape(rows, -1)
    return stored, gguf.quants.dequantize(stored, kind).reshape(values.shape)


class Written:
    """A GGUF file of a random model, and the same model in transformers."""

    def __init__(
        self,
        path: Path,
        name: str = "Llama",
        kind: gguf.GGMLQuantizationType = F32,
        facts: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        **changes: Any,
    ) -> None:
        torch.manual_seed(23)
        config = getattr(transformers, f"{name}Config")(**SIZES | changes)
        self.reference = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        self.architecture = {"Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}[name]
        self.writer = gguf.GGUFWriter(path, self.architecture)
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        self._write_facts(config, facts or {})
        rng = np.random.default_rng(9)
        weights = self.reference.state_dict()
        if config.tie_word_embeddings:
            del weights["lm_head.weight"]
        with torch.no_grad():
            for hf_name, weight in weights.items():
                weight.add_(torch.randn_like(weight) * 0.1)
                self._write_tensor(hf_name, weight, kind, rng)
        for tensor_name, values in (tensors or {}).items():
            self.writer.add_tensor(tensor_name, values, raw_dtype=F32)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _write_facts(self, config: Any, facts: dict[str, Any]) -> None:
        head_dim = getattr(config, "head_dim", None) or 64
        values: dict[str, Any] = {
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
            "feed_forward_length": config.intermediate_size,
            "context_length": config.max_position_embeddings,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": 10_000.0,
        }
        for key, value in (values | facts).items():
            name = f"{self.architecture}.{key}"
            if isinstance(value, str):
                self.writer.add_string(name, value)
            elif isinstance(value, int):
                self.writer.add_uint32(name, value)
            elif value is not None:
                self.writer.add_float32(name, value)

    def _write_tensor(
        self,
        hf_name: str,
        weight: torch.Tensor,
        kind: gguf.GGMLQuantizationType,
        rng: np.random.Generator,
    ) -> None:
        part = hf_name.split(".")[-2]
        heads = self._heads.get(part) if self.architecture == "llama" else None
        values = weight.numpy()
        stored_values = paired(values, heads) if heads else values
        # One row of values has no blocks: norms and biases stay float32, as converters keep them.
        stored_kind = kind if weight.dim() > 1 else F32
        if stored_kind == F32:
            stored = stored_values.copy()
        else:
            stored, exact = quantized(stored_values, stored_kind, rng)
            weight.copy_(torch.from_numpy(halved(exact, heads) if heads else exact))
        self.writer.add_tensor(gguf_name(hf_name), stored, raw_dtype=stored_kind)


@torch.no_grad()
def assert_equal_logits(path: Path, reference: Any) -> None:
    model = load_model(path, "float32", 1)
    expected = reference(torch.tensor([PROMPT])).logits[0, -1]

    logits, _ = model.forward([Chunk(PROMPT, 0, [1, 0], True)], model.new_pool(2, 16))

    torch.testing.assert_close(logits[0], expected, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", TYPES, ids=[kind.name for kind in TYPES])
def test_every_tensor_type_gives_the_logits_of_its_dequantized_weights(
    tmp_path: Path, kind: gguf.GGMLQuantizationType
) -> None:
    written = Written(tmp_path / "model.gguf", kind=kind)

    assert_equal_logits(tmp_path / "model.gguf", written.reference)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_every_architecture_gives_the_reference_logits(
    tmp_path: Path, name: str, is_tied: bool
) -> None:
    changes = {"head_dim": 128} if name == "Qwen3" else {}
    written = Written(tmp_path / "m.gguf", name, tie_word_embeddings=is_tied, **changes)

    assert_equal_logits(tmp_path / "m.gguf", written.reference)


def test_biases_of_a_llama_are_found_and_put_in_order(tmp_path: Path) -> None:
    written = Written(tmp_path / "m.gguf", attention_bias=True, mlp_bias=True)

    assert open_weights(tmp_path / "m.gguf")[0].biases
    assert_equal_logits(tmp_path / "m.gguf", written.reference)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("rope", "facts"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        (
            YARN,
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            },
        ),
    ],
    ids=["linear", "yarn"],
)
def test_rope_scaling_in_the_metadata_gives_the_reference_logits(
    tmp_path: Path, rope: dict[str, Any], facts: dict[str, Any]
) -> None:
    parameters = rope | {"rope_theta": 10_000.0}
    written = Written(tmp_path / "m.gguf", facts=facts, rope_parameters=parameters)

    assert_equal_logits(tmp_path / "m.gguf", written.reference)


def test_rope_scaling_as_a_table_of_divisors_gives_the_reference_logits(tmp_path: Path) -> None:
    """How converters store the llama3 type."""
    parameters = LLAMA3 | {"rope_theta": 10_000.0}
    plain = Written(tmp_path / "plain.gguf").reference.model.rotary_emb.inv_freq
    reference = Written(tmp_path / "other.gguf", rope_parameters=parameters).reference
    divisors = (plain / reference.model.rotary_emb.inv_freq).numpy()

    Written(tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors})

    assert divisors.max() == pytest.approx(8)
    assert_equal_logits(tmp_path / "m.gguf", reference)


@pytest.mark.parametrize(
    ("facts", "error", "message"),
    [
        ({"rope.scaling.type": "longrope"}, UnsupportedModelError, "rope scaling longrope; this"),
        ({"rope.scaling.type": "yarn"}, WeightsError, "`factor` must be a number above 0, got not"),
        ({"expert_count": 8}, UnsupportedModelError, "mixture of experts"),
        ({"rope.dimension_count": 32}, WeightsError, "must be 64, the width of a key, got 32"),
        ({"block_count": None}, WeightsError, "`block_count` must be an integer .*got nothing"),
        ({"block_count": 2}, WeightsError, r"tensor blk\.1\.attn_norm\.weight is missing"),
        ({"feed_forward_length": 512}, WeightsError, r"blk\.0\.ffn_gate\.weight has shape \(256"),
        ({"attention.head_count": "4"}, WeightsError, "`attention.head_count` must be an integer"),
    ],
)
def test_metadata_that_cannot_be_right_is_refused_naming_file_and_expectation(
    tmp_path: Path, facts: dict[str, Any], error: type[Exception], message: str
) -> None:
    Written(tmp_path / "m.gguf", facts=facts)

    with pytest.raises(error, match=rf"m\.gguf.*{message}"):
        load_model(tmp_path / "m.gguf", "float32", 1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.ffn_gate_exps.weight": np.ones((2, 2))}, r"blk\.0\.ffn_gate_exps\.weight is none"),
        ({"rope_freqs.weight": np.ones(3)}, "rope_freqs.weight has 3 values, expected 32"),
        ({"rope_freqs.weight": np.zeros(32)}, "expected 32 above 0"),
    ],
)
def test_tensors_that_do_not_belong_there_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    arrays = {name: values.astype(np.float32) for name, values in tensors.items()}
    Written(tmp_path / "m.gguf", tensors=arrays)

    with pytest.raises((UnsupportedModelError, WeightsError), match=rf"m\.gguf.*{message}"):
        load_model(tmp_path / "m.gguf", "float32", 1)


def test_a_sliding_window_is_read(tmp_path: Path) -> None:
    Written(tmp_path / "m.gguf", facts={"attention.sliding_window": 16})

    config, _ = open_weights(tmp_path / "m.gguf")

    assert (config.window_tokens, config.window_layers) == (16, (0,))
