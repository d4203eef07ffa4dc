"""Damaged model folders: every fault is one clear sentence naming file, tensor and expectation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from runner.facts import UnsupportedModelError
from runner.sources import WeightsError
from runner.weights import load_model, open_weights

WEIGHTS = "model.safetensors"
# config.json's members that decide what is computed, and need not be there.
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "hidden_act",
    "architectures",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_bias",
)


@pytest.fixture
def folder(tiny_dir: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True)
    return tmp_path


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


NAMES = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named_with_its_file_and_shape(folder: Path, name: str) -> None:
    shape = tuple(load_file(folder / WEIGHTS)[name].shape)
    change_tensors(folder, lambda tensors: tensors.pop(name))

    with pytest.raises(WeightsError) as caught:
        load_model(folder, "float32", 1)

    expected = f"{folder / WEIGHTS}: tensor {name} is missing, expected with shape {shape}"
    assert str(caught.value) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda tensor: tensor[:-1].clone(),
        lambda tensor: torch.cat((tensor, tensor)),
        lambda tensor: tensor.reshape(-1, 1).clone(),
        lambda tensor: tensor.reshape(-1)[0].clone(),
    ],
    ids=["a row less", "twice", "turned", "a number"],
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(
    folder: Path, name: str, damage: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    shape = tuple(load_file(folder / WEIGHTS)[name].shape)
    change_tensors(folder, lambda tensors: tensors.update({name: damage(tensors[name])}))
    actual = tuple(load_file(folder / WEIGHTS)[name].shape)

    with pytest.raises(WeightsError) as caught:
        load_model(folder, "float32", 1)

    expected = f"{folder / WEIGHTS}: tensor {name} has shape {actual}, expected {shape}"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float8_e4m3fn, torch.float64, torch.bool], ids=str
)
def test_a_tensor_of_another_type_is_named_with_those_that_are_read(
    folder: Path, dtype: torch.dtype
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))

    with pytest.raises(WeightsError, match=rf"tensor {name} has type .*reads F32, F16, BF16"):
        load_model(folder, "float32", 1)


def test_half_precision_files_load_as_their_values(folder: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for at, (name, tensor) in enumerate(tensors.items()):
            tensors[name] = tensor.to(torch.float16 if at % 2 else torch.bfloat16)

    change_tensors(folder, halve)
    stored = load_file(folder / WEIGHTS)

    _, source = open_weights(folder)

    for name, tensor in stored.items():
        assert torch.equal(source.read(name), tensor.float())


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize(
    "value", [None, 0, -1, 1.5, "32", [], {}, True, 2**80], ids=lambda value: f"{value!r:.12}"
)
def test_an_impossible_size_is_named_with_file_key_and_expectation(
    folder: Path, key: str, value: Any
) -> None:
    change_config(folder, {key: value})

    with pytest.raises(WeightsError) as caught:
        load_model(folder, "float32", 1)

    assert f"{folder / 'config.json'}: `{key}` must be an integer" in str(caught.value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats()
    | st.sampled_from(["", "LlamaForCausalLM", "Qwen3ForCausalLM", "yarn", "llama3", "linear"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_type", "factor", "rope_theta", "type", "low_freq_factor"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def scratch(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    shutil.copytree(tiny_dir, folder, dirs_exist_ok=True)
    return folder


def refusal(folder: Path) -> str | None:
    """Open a model; returns what was said against it."""
    try:
        config, _ = open_weights(folder)
    except (WeightsError, UnsupportedModelError) as error:
        return str(error)
    assert len(config.rope_frequencies()) == config.head_dim // 2
    return None


@settings(max_examples=200, deadline=None)
@given(changes=st.dictionaries(st.sampled_from([*REQUIRED, *OPTIONAL]), JSON, max_size=3))
def test_any_config_is_opened_or_refused_and_nothing_else(
    scratch: Path, tiny_dir: Path, changes: dict[str, Any]
) -> None:
    shutil.copy(tiny_dir / "config.json", scratch)
    change_config(scratch, changes)

    message = refusal(scratch)

    assert message is None or message.startswith(str(scratch))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.data_too_large])
@given(data=st.data())
def test_a_damaged_weights_file_is_opened_or_refused_by_name_and_nothing_else(
    scratch: Path, tiny_dir: Path, data: st.DataObject
) -> None:
    """Any length cut off, any bytes of the header changed."""
    shutil.copy(tiny_dir / "config.json", scratch)
    damaged = bytearray((tiny_dir / WEIGHTS).read_bytes())
    header = int.from_bytes(damaged[:8], "little") + 8
    for place in data.draw(st.lists(st.integers(0, header - 1), max_size=3)):
        damaged[place] = data.draw(st.integers(0, 255))
    length = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    # A file of its own each time: the one before may still be mapped.
    (scratch / WEIGHTS).unlink()
    (scratch / WEIGHTS).write_bytes(damaged[:length])

    message = refusal(scratch)

    assert message is None or message.startswith(str(scratch / WEIGHTS))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", "[" * 100_000])
def test_a_damaged_json_file_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))

    with pytest.raises(WeightsError, match=rf"{name}: expected"):
        load_model(folder, "float32", 1)


def test_a_pickle_is_never_read(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")

    with pytest.raises(WeightsError, match="is a pickle, which is never read"):
        load_model(folder, "float32", 1)


def make_index(folder: Path, weight_map: Any) -> None:
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"model.norm.weight": "gone.safetensors"}, r"weights file missing: .*gone\.safetensors"),
        ({"gone.weight": WEIGHTS}, r"model\.safetensors: tensor gone\.weight is missing"),
        ({"model.norm.weight": "../model.safetensors"}, "'../model.safetensors' is no file name"),
        (["model.safetensors"], r"index\.json: `weight_map` must be an object"),
    ],
    ids=["no shard", "no tensor", "another folder", "no map"],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    folder: Path, weight_map: Any, message: str
) -> None:
    make_index(folder, weight_map)

    with pytest.raises(WeightsError, match=message):
        load_model(folder, "float32", 1)


def test_an_untied_model_without_its_head_is_refused(folder: Path) -> None:
    change_config(folder, {"tie_word_embeddings": False})

    with pytest.raises(WeightsError, match=r"tensor lm_head\.weight is missing"):
        load_model(folder, "float32", 1)


def test_a_qwen2_without_its_biases_is_refused(folder: Path) -> None:
    change_config(folder, {"architectures": ["Qwen2ForCausalLM"]})

    with pytest.raises(WeightsError, match=r"tensor .*q_proj\.bias is missing"):
        load_model(folder, "float32", 1)
