"""Read LoRA adapters as PEFT saves them, and refuse what this runner cannot compute with them.

An adapter adds ``scale * B @ A`` to some linears of a model, A and B being low and wide. Nothing
is computed here: ``lora.py`` does that.

Source: PEFT ``adapter_config.json`` and ``adapter_model.safetensors`` (LoraConfig).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.arch import ATTENTION_LINEARS, MLP_LINEARS, linear_name
from runner.facts import FactError, Facts, read_facts
from runner.sources import SafetensorsFiles, WeightsError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from runner.arch import ModelConfig

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
LINEARS = (*ATTENTION_LINEARS, *MLP_LINEARS)

# What PEFT puts before the model's own names.
_PREFIX = "base_model.model."

# Settings that change what an adapter adds -> the values that change nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "alora_invocation_tokens": (),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "layer_replication": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layers_to_transform": ([],),
    # Other ways to begin change the base model's weights too.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


class AdapterError(RuntimeError):
    """An adapter cannot be used; the message names it, its files and the reason."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits the model, not yet loaded.

    Attributes:
        name: What requests call it.
        folder: Where it is.
        digest: Hex digest over its weights and how they are scaled: its generation.
        scale: Multiplies what it adds.
        linears: The linears it adds to, in every layer.
    """

    name: str
    folder: Path
    digest: str
    scale: float
    linears: frozenset[str]
    _tensors: SafetensorsFiles

    def read(self, layer: int, linear: str, part: str) -> torch.Tensor:
        """Return matrix ``part``, "A" or "B", of a linear as float32.

        Shapes: A [rank, in], B [out, rank].
        """
        return self._tensors.read(_tensor_name(layer, linear, part))


def read_adapter(name: str, folder: Path, config: ModelConfig) -> AdapterFiles:
    """Open and check the adapter at ``folder`` for a model of these sizes.

    Raises:
        AdapterError: If it is missing, damaged, of another kind or for another model.
    """
    try:
        return _read(name, folder, config)
    except (FactError, WeightsError, OSError) as error:
        raise AdapterError(f"adapter {name}: {error}") from error


def _read(name: str, folder: Path, config: ModelConfig) -> AdapterFiles:
    if not (folder / CONFIG_FILE).is_file():
        raise WeightsError(f"{folder / CONFIG_FILE} is missing, expected a PEFT adapter's folder")
    facts = read_facts(folder / CONFIG_FILE)
    rank, linears = facts.integer("r"), _linears(facts)
    _refuse_variants(facts)
    rank_base = math.sqrt(rank) if facts.boolean("use_rslora", False) else rank
    scale = facts.number("lora_alpha") / rank_base
    path = folder / WEIGHTS_FILE
    if not path.is_file() and (folder / PICKLE_FILE).is_file():
        raise WeightsError(
            f"{path} is missing; {PICKLE_FILE} is a pickle, which is never read: save the adapter "
            "as safetensors"
        )
    tensors = SafetensorsFiles()
    tensors.open(path)
    _check_tensors(path, tensors, _shapes(config, linears, rank))
    return AdapterFiles(name, folder, _digest(path, scale), scale, linears, tensors)


def _linears(facts: Facts) -> frozenset[str]:
    if (kind := facts.string("peft_type", "LORA")) != "LORA":
        raise FactError(f"{facts.place}: `peft_type` {kind}; this runner computes LORA")
    targets = facts.strings("target_modules")
    unknown = sorted(set(targets) - set(LINEARS))
    if unknown or not targets:
        raise facts.refuse("target_modules", f"a list of some of {', '.join(LINEARS)}")
    return frozenset(targets)


def _refuse_variants(facts: Facts) -> None:
    for key, neutral in _UNSUPPORTED.items():
        value = facts.values.get(key)
        if value is not None and value not in neutral:
            raise FactError(
                f"{facts.place}: `{key}` is {value!r}, which this runner does not compute"
            )


def _tensor_name(layer: int, linear: str, part: str) -> str:
    return f"{_PREFIX}{linear_name(layer, linear)}.lora_{part}.weight"


def _shapes(config: ModelConfig, linears: frozenset[str], rank: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_layers):
        for linear in sorted(linears):
            rows, columns = config.linear_shape(linear)
            shapes[_tensor_name(layer, linear, "A")] = (rank, columns)
            shapes[_tensor_name(layer, linear, "B")] = (rows, rank)
    return shapes


def _check_tensors(
    path: Path, tensors: SafetensorsFiles, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for name, shape in shapes.items():
        place = tensors.place(name, path)
        if name not in tensors.names:
            raise WeightsError(f"{place} is missing, expected with shape {shape}")
        if (actual := tensors.check(name)) != shape:
            raise WeightsError(
                f"{place} has shape {actual}, expected {shape}: is it for another model?"
            )
    if left := sorted(tensors.names - shapes.keys()):
        raise WeightsError(
            f"{tensors.place(left[0], path)} belongs to none of the model's linears that "
            f"`target_modules` names ({len(left)} such tensors)"
        )


def _digest(path: Path, scale: float) -> str:
    with path.open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(f"{weights} {scale!r}".encode()).hexdigest()
