"""Loading models: both formats give the same model, other kinds are refused with reasons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.batch import Chunk
from runner.configs import config_from_gguf, config_from_hf
from runner.facts import Facts, UnsupportedModelError
from runner.model import Model
from runner.sources import WeightsError
from runner.weights import load_model


def last_logits(model: Model, prompt: list[int]) -> torch.Tensor:
    pool = model.new_pool(4, 16)
    logits, _ = model.forward([Chunk(prompt, 0, [0, 1, 2, 3], True)], pool)
    return logits[0]


def test_a_missing_model_says_how_to_get_the_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"`make weights` or `python -m runner\.fetch`"):
        load_model(tmp_path / "nowhere", "float32", 1)


def test_an_unknown_dtype_is_refused_with_the_supported_ones(tiny_dir: Path) -> None:
    with pytest.raises(
        WeightsError, match="int3 is not supported; use one of float32, bfloat16, int8, int4"
    ):
        load_model(tiny_dir, "int3", 1)


def test_a_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    with pytest.raises(WeightsError, match=r"model\.gguf"):
        load_model(tmp_path, "float32", 1)


def test_a_missing_shard_is_named(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()

    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_model(tmp_path, "float32", 1)


def test_shards_load_like_one_file(tiny_dir: Path, tmp_path: Path, tiny: Model) -> None:
    tensors = load_file(tiny_dir / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(tiny_dir / "config.json", tmp_path)

    sharded = load_model(tmp_path, "float32", 1)

    prompt = [3, 14, 15, 92]
    assert torch.equal(last_logits(sharded, prompt), last_logits(tiny, prompt))
    assert sharded.fingerprint == tiny.fingerprint


def test_a_gguf_file_alone_and_in_its_folder_are_the_same_model(
    smollm2_dir: Path, smollm2: Model
) -> None:
    assert load_model(smollm2_dir / "model.gguf", "float32", 1).fingerprint == smollm2.fingerprint
    assert smollm2.config.eos_token_ids == (2,)
    assert smollm2.config.context_tokens == 8192


@pytest.mark.parametrize("row", [0, 1, 50, 96])
def test_one_other_value_anywhere_is_another_fingerprint(
    tiny_dir: Path, tmp_path: Path, tiny: Model, row: int
) -> None:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tiny_dir / "model.safetensors")
    tensors["model.embed_tokens.weight"][row, 31] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    assert load_model(tmp_path, "float32", 1).fingerprint != tiny.fingerprint


def test_a_tensor_nobody_computes_with_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tiny_dir / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(UnsupportedModelError, match="experts"):
        load_model(tmp_path, "float32", 1)


def hf_config(**changes: Any) -> Facts:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 64,
    }
    return Facts(values | changes, "config.json")


NOTHING = Facts({}, "generation_config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM; this runner computes Llama"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope; this runner"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "whole heads"),
        ({"num_key_value_heads": 3}, "2 query heads do not share 3 KV heads"),
        ({"head_dim": 3}, "heads of 3 values have no two halves"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by awq; this runner reads"),
    ],
    ids=["architecture", "activation", "rope", "partial rope", "heads", "odd", "quantisation"],
)
def test_what_cannot_be_computed_rightly_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(hf_config(**changes), NOTHING)


@pytest.mark.parametrize(
    ("architecture", "changes", "window", "layers"),
    [
        ("Mistral", {"sliding_window": 32}, 32, (0, 1, 2)),
        ("Mistral", {"sliding_window": None}, 0, ()),
        ("Mistral", {"sliding_window": 64}, 0, ()),
        ("Mistral", {"max_position_embeddings": 8192}, 4096, (0, 1, 2)),
        ("Qwen2", {"sliding_window": 32}, 0, ()),
        ("Qwen2", {"sliding_window": 32, "use_sliding_window": True}, 32, ()),
        (
            "Qwen3",
            {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 2},
            32,
            (2,),
        ),
        (
            "Qwen3",
            {
                "sliding_window": 32,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            32,
            (0, 2),
        ),
        ("Llama", {"sliding_window": 32}, 0, ()),
    ],
)
def test_sliding_windows_follow_the_rules_of_each_architecture(
    architecture: str, changes: dict[str, Any], window: int, layers: tuple[int, ...]
) -> None:
    raw = hf_config(architectures=[f"{architecture}ForCausalLM"], **changes)
    config = config_from_hf(raw, NOTHING)

    assert (config.window_tokens, config.window_layers) == (window, layers)
    assert config.context_tokens == raw.values["max_position_embeddings"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_is_read_in_its_older_forms_too(rope: dict[str, Any]) -> None:
    oldest = {"type": rope["rope_type"]} | {k: v for k, v in rope.items() if k != "rope_type"}
    forms = [
        hf_config(rope_parameters=rope | {"rope_theta": 5e5}),
        hf_config(rope_scaling=rope, rope_theta=5e5),
        hf_config(rope_scaling=oldest, rope_theta=5e5),
    ]

    configs = [config_from_hf(form, NOTHING) for form in forms]

    assert configs[0] == configs[1] == configs[2]
    assert configs[0].rope_theta == 5e5


def test_yarn_stretches_a_context_that_the_files_give_unstretched() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    raw = hf_config(
        architectures=["Qwen3ForCausalLM"],
        rope_scaling=yarn,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=0,
    )

    config = config_from_hf(raw, NOTHING)

    assert config.context_tokens == 256
    assert config.window_layers == (0, 1, 2)


def test_the_generation_config_decides_the_end_tokens() -> None:
    config = hf_config(eos_token_id=3)
    generation = Facts({"eos_token_id": [4, 5]}, "generation_config.json")

    assert config_from_hf(config, NOTHING).eos_token_ids == (3,)
    assert config_from_hf(config, generation).eos_token_ids == (4, 5)


def test_a_foreign_gguf_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="mamba; this runner computes llama"):
        config_from_gguf({"general.architecture": "mamba"}, {}, "model.gguf")
