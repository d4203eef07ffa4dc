"""LoRA adapters in the forward pass: what they add equals merged weights, row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from runner.adapters import AdapterError
from runner.batch import Chunk
from runner.model import Model
from runner.weights import load_model
from tests.runner.lora_parts import ALL, make_adapter, merge
from tests.runner.test_model import SIZES, prompt_of

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 21}),
}


def make_model(folder: Path, kind: str) -> Path:
    name, changes = KINDS[kind]
    torch.manual_seed(31)
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def reference_logits(folder: Path, prompt: list[int]) -> torch.Tensor:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: torch.Tensor = model.eval()(torch.tensor([prompt])).logits[0, -1]
    return logits


def assert_merged(model: Model, adapter: str, merged: Path, length: int = 40) -> None:
    prompt = prompt_of(length)
    chunk = Chunk(prompt, 0, [0, 2, 1], True, adapter=adapter)

    logits, _ = model.forward([chunk], model.new_pool(3, 16))

    expected = reference_logits(merged, prompt)
    torch.testing.assert_close(logits[0], expected, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_gives_the_reference_logits_of_merged_weights(tmp_path: Path, kind: str) -> None:
    base = make_model(tmp_path / "base", kind)
    adapter = make_adapter(tmp_path / "adapter", base)
    merged = merge(adapter, base, tmp_path / "merged")

    model = load_model(base, "float32", 1, {"a": adapter})

    assert_merged(model, "a", merged)
    assert_merged(model, "", base)


@pytest.mark.parametrize(
    "targets",
    [*((name,) for name in ALL), ("q_proj", "v_proj"), ("up_proj", "k_proj")],
    ids="+".join,
)
def test_any_choice_of_linears_gives_the_logits_of_merged_weights(
    tiny_dir: Path, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_dir, targets=targets)
    merged = merge(adapter, tiny_dir, tmp_path / "merged")

    model = load_model(tiny_dir, "float32", 1, {"a": adapter})

    assert_merged(model, "a", merged)


def test_the_scale_follows_alpha_rank_and_rslora(tiny_dir: Path, tmp_path: Path) -> None:
    plain = make_adapter(tmp_path / "plain", tiny_dir, rank=4, alpha=16)
    stabilised = make_adapter(tmp_path / "rs", tiny_dir, rank=4, alpha=8, use_rslora=True)
    merged = merge(plain, tiny_dir, tmp_path / "merged")

    model = load_model(tiny_dir, "float32", 1, {"plain": plain, "rs": stabilised})

    assert_merged(model, "plain", merged)
    assert_merged(model, "rs", merged)


@pytest.mark.parametrize("rank", [1, 16, 40])
def test_any_rank_gives_the_logits_of_merged_weights(
    tiny_dir: Path, tmp_path: Path, rank: int
) -> None:
    adapter = make_adapter(tmp_path / "adapter", tiny_dir, rank=rank)
    merged = merge(adapter, tiny_dir, tmp_path / "merged")

    model = load_model(tiny_dir, "float32", 1, {"a": adapter})

    assert_merged(model, "a", merged, length=1)
    assert_merged(model, "a", merged)


def test_adapters_and_the_base_model_share_a_step_without_mixing(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """Decodes, a later chunk and first chunks, some of which do not sample."""
    folders = {
        "": tiny_dir,
        "a": make_adapter(tmp_path / "a", tiny_dir, seed=1),
        "b": make_adapter(tmp_path / "b", tiny_dir, seed=2, rank=5, targets=("o_proj", "q_proj")),
    }
    merged = {"": tiny_dir} | {
        name: merge(folders[name], tiny_dir, tmp_path / f"merged-{name}") for name in "ab"
    }
    model = load_model(tiny_dir, "float32", 1, {name: folders[name] for name in "ab"})
    pool = model.new_pool(42, 16)
    lengths = [70, 33, 65, 40, 22, 18, 50]
    starts = [69, 32, 64, 16, 0, 17, 0]
    names = ["a", "", "b", "a", "", "a", "b"]
    tables = [list(range(at, 42, 7)) for at in range(7)]
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    before = [
        Chunk(prompt[:start], 0, table, False, adapter=name)
        for prompt, start, table, name in zip(prompts, starts, tables, names, strict=True)
        if start
    ]
    model.forward(before, pool)

    chunks = [
        Chunk(prompt[start:], start, table, at != 4, adapter=name)
        for at, (prompt, start, table, name) in enumerate(
            zip(prompts, starts, tables, names, strict=True)
        )
    ]
    logits, order = model.forward(chunks, pool)

    assert sorted(order) == [0, 1, 2, 3, 5, 6]
    for row, at in zip(logits, order, strict=True):
        expected = reference_logits(merged[names[at]], prompts[at])
        torch.testing.assert_close(row, expected, atol=5e-4, rtol=5e-4)


def test_adapters_beside_it_leave_the_base_model_bit_for_bit_alone(
    tiny: Model, tiny_dir: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "a", tiny_dir)
    loaded = load_model(tiny_dir, "float32", 1, {"a": adapter})
    chunk = Chunk(prompt_of(40), 0, [0, 1, 2], True)

    alone, _ = tiny.forward([chunk], tiny.new_pool(3, 16))
    beside, _ = loaded.forward([chunk], loaded.new_pool(3, 16))

    assert torch.equal(alone, beside)
    assert loaded.fingerprint == tiny.fingerprint


@pytest.mark.parametrize("length", [1, 40], ids=["few rows", "many rows"])
def test_an_adapter_in_bfloat16_stays_near_float32(
    tiny_dir: Path, tmp_path: Path, length: int
) -> None:
    adapter = make_adapter(tmp_path / "a", tiny_dir)
    prompt = prompt_of(length)
    exact, near = (
        model.forward([Chunk(prompt, 0, [0, 1, 2], True, adapter="a")], model.new_pool(3, 16))[0]
        for model in (load_model(tiny_dir, dtype, 1, {"a": adapter}) for dtype in DTYPES)
    )

    assert (near.float() - exact).abs().max() < 0.05 * exact.abs().max()


DTYPES = ("float32", "bfloat16")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def refusal(model: Path, adapter: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        load_model(model, "float32", 1, {"tone": adapter})
    return str(caught.value)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"peft_type": "IA3"}, "`peft_type` IA3; this runner computes LORA"),
        ({"r": 0}, "`r` must be an integer between 1"),
        ({"r": None}, "`r` must be an integer between 1"),
        ({"r": 4}, "has shape (3, 48), expected (4, 48): is it for another model?"),
        ({"lora_alpha": None}, "`lora_alpha` must be a number above 0, got nothing"),
        ({"lora_alpha": "16"}, "`lora_alpha` must be a number above 0, got '16'"),
        ({"target_modules": "all-linear"}, "`target_modules` must be a list"),
        ({"target_modules": []}, "`target_modules` must be a list"),
        ({"target_modules": ["q_proj", "lm_head"]}, "`target_modules` must be a list of some of"),
        ({"use_dora": True}, "`use_dora` is True"),
        ({"bias": "all"}, "`bias` is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save` is ['lm_head']"),
        ({"rank_pattern": {"q_proj": 8}}, "`rank_pattern` is {'q_proj': 8}"),
        ({"alpha_pattern": {"q_proj": 8}}, "`alpha_pattern` is {'q_proj': 8}"),
        ({"layers_to_transform": [1]}, "`layers_to_transform` is [1]"),
        ({"alora_invocation_tokens": [5]}, "`alora_invocation_tokens` is [5]"),
        ({"fan_in_fan_out": True}, "`fan_in_fan_out` is True"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights` is 'pissa'"),
        ({"target_modules": ["q_proj"]}, "belongs to none of the model's linears"),
    ],
    ids=lambda value: f"{value!r:.40}" if isinstance(value, dict) else "",
)
def test_an_adapter_of_another_kind_is_refused_by_name_with_the_reason(
    tiny_dir: Path, tmp_path: Path, facts: dict[str, Any], reason: str
) -> None:
    message = refusal(tiny_dir, make_adapter(tmp_path / "a", tiny_dir, **facts))

    assert message.startswith("adapter tone: ")
    assert str(tmp_path / "a") in message
    assert reason in message


NAME = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda tensors: tensors.pop(NAME), f"tensor {NAME} is missing, expected with shape (32,"),
        (
            lambda tensors: tensors.update({NAME: torch.zeros(31, 3)}),
            f"tensor {NAME} has shape (31, 3), expected (32, 3): is it for another model?",
        ),
        (
            lambda tensors: tensors.update({NAME: torch.zeros(32, 3, dtype=torch.int8)}),
            f"tensor {NAME} has type I8; this runner reads F32, F16, BF16",
        ),
        (
            lambda tensors: tensors.update({"lm_head.lora_A.weight": torch.zeros(3, 3)}),
            "tensor lm_head.lora_A.weight belongs to none of the model's linears",
        ),
    ],
    ids=["missing", "shape", "type", "foreign"],
)
def test_weights_that_do_not_fit_are_refused_by_name_with_the_tensor(
    tiny_dir: Path, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], object], reason: str
) -> None:
    adapter = make_adapter(tmp_path / "a", tiny_dir)
    change_tensors(adapter, damage)

    assert f"{adapter / WEIGHTS}: {reason}" in refusal(tiny_dir, adapter)


def test_missing_and_unread_files_are_named(tiny_dir: Path, tmp_path: Path) -> None:
    assert f"{tmp_path / 'no' / CONFIG} is missing" in refusal(tiny_dir, tmp_path / "no")
    adapter = make_adapter(tmp_path / "a", tiny_dir)
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    assert "adapter_model.bin is a pickle, which is never read" in refusal(tiny_dir, adapter)
    (adapter / "adapter_model.bin").unlink()
    assert f"weights file missing: {adapter / WEIGHTS}" in refusal(tiny_dir, adapter)


@pytest.fixture(scope="module")
def scratch(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), tiny_dir, targets=("q_proj",))


VALUES = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=3)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_damage_is_refused_by_name_or_does_not_matter(
    tiny_dir: Path, scratch: Path, data: st.DataObject
) -> None:
    facts = json.loads((scratch / CONFIG).read_text())
    whole = (scratch / WEIGHTS).read_bytes()
    changed = data.draw(st.dictionaries(st.sampled_from([*facts]), VALUES, max_size=2))
    length = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    damaged = scratch.parent / f"{scratch.name}-damaged"
    damaged.mkdir(exist_ok=True)
    (damaged / CONFIG).write_text(json.dumps(facts | changed))
    (damaged / WEIGHTS).unlink(missing_ok=True)
    (damaged / WEIGHTS).write_bytes(whole[:length])

    try:
        model = load_model(tiny_dir, "float32", 1, {"tone": damaged})
        message = None
    except AdapterError as error:
        message = str(error)

    assert message is None or message.startswith(f"adapter tone: {damaged}")
    assert message or model.adapters["tone"].layers
