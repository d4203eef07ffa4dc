"""Makes LoRA adapters as PEFT saves them, and the merged weights they stand for."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from runner.arch import linear_name
from runner.weights import open_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 3,
    alpha: float = 6,
    targets: Sequence[str] = ALL,
    strength: float = 0.5,
    **settings: Any,
) -> Path:
    """Write a random adapter for the model in ``model`` and return its folder."""
    config, _ = open_weights(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for target in targets:
            rows, columns = config.linear_shape(target)
            prefix = f"base_model.model.{linear_name(layer, target)}"
            shapes = {"A": (rank, columns), "B": (rows, rank)}
            for part, shape in shapes.items():
                values = torch.randn(shape, generator=generator) * math.sqrt(strength / shape[1])
                tensors[f"{prefix}.lora_{part}.weight"] = values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "some/model",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "lora_dropout": 0.1,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts | settings))
    return folder


def merge(adapter: Path, model: Path, into: Path) -> Path:
    """Write the safetensors folder ``model`` with an adapter's weights added; returns ``into``."""
    facts = json.loads((adapter / "adapter_config.json").read_text())
    rank = math.sqrt(facts["r"]) if facts["use_rslora"] else facts["r"]
    parts = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(model / "model.safetensors")
    for name, outer in parts.items():
        if name.endswith(".lora_B.weight"):
            inner = parts[name.replace(".lora_B.", ".lora_A.")]
            own = name.removeprefix("base_model.model.").replace(".lora_B.", ".")
            weights[own] = weights[own] + (outer @ inner) * (facts["lora_alpha"] / rank)
    into.mkdir(parents=True, exist_ok=True)
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text((model / "config.json").read_text())
    return into
