"""Where a model's tensors come from: GGUF files and safetensors folders, under the same names.

Both give the names of safetensors and the same row order, so that nothing after this file knows
which it was. Shapes and types are known before a tensor is read: whatever is wrong with a file is
said before seconds of reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from runner.arch import ATTENTION_LINEARS, EMBEDDING, HEAD, ModelConfig
from runner.configs import GGUF_LINEARS
from runner.facts import read_facts
from runner.gguf import GgufError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from runner.gguf import GgufFile

SAFETENSORS_TYPES = ("F32", "F16", "BF16")

_WEIGHTS, _INDEX, _PICKLE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)

# GGUF name of a layer's part, without what GGUF_LINEARS names -> safetensors name.
_GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
} | {
    gguf: f"{'self_attn' if hf in ATTENTION_LINEARS else 'mlp'}.{hf}"
    for gguf, hf in GGUF_LINEARS.items()
}
_GGUF_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}

# A table of divisors that belongs to the rope, not to the weights.
ROPE_DIVISORS = "rope_freqs.weight"


class WeightsError(RuntimeError):
    """The model cannot be loaded; the message says what was looked for and what to do."""


class TensorSource(Protocol):
    """Tensors by safetensors name, as float32.

    Attributes:
        names: All there are.
    """

    names: frozenset[str]

    def place(self, name: str) -> str:
        """Return the file and the name there, for messages; of a missing tensor too."""

    def check(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that can be read.

        Raises:
            WeightsError: If its type is not supported or its bytes are not all there.
        """

    def read(self, name: str) -> torch.Tensor:
        """Return a fresh tensor; KeyError if there is none of that name."""


class GgufSource:
    """A GGUF file, query and key rows in half-split rope order."""

    def __init__(self, path: Path, file: GgufFile, config: ModelConfig) -> None:
        """Translate the names of ``file``, opened from ``path``."""
        self._path = path
        self._file = file
        self._config = config
        own_names = [name for name in file.tensors if name != ROPE_DIVISORS]
        self._own_names = {_hf_name(name): name for name in own_names}
        self.names = frozenset(self._own_names)

    def place(self, name: str) -> str:
        """See ``TensorSource``."""
        return f"{self._path}: tensor {self._own_names.get(name) or _gguf_name(name)}"

    def check(self, name: str) -> tuple[int, ...]:
        """See ``TensorSource``."""
        own_name = self._own_names[name]
        try:
            self._file.check(own_name)
        except GgufError as error:
            raise WeightsError(str(error)) from error
        return self._file.tensors[own_name].shape

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorSource``."""
        tensor = torch.from_numpy(self._file.tensor(self._own_names[name]))
        if self._config.architecture == "llama":
            if ".q_proj." in name:
                return _unpermute(tensor, self._config.num_heads)
            if ".k_proj." in name:
                return _unpermute(tensor, self._config.num_kv_heads)
        return tensor


def _hf_name(gguf_name: str) -> str:
    """Translate a tensor's name; one that has no counterpart stays as it is."""
    match gguf_name.split("."):
        case ["blk", layer, part, kind] if part in _GGUF_PARTS:
            return f"model.layers.{layer}.{_GGUF_PARTS[part]}.{kind}"
    return _GGUF_NAMES.get(gguf_name, gguf_name)


def _gguf_name(hf_name: str) -> str:
    """Undo ``_hf_name``."""
    match hf_name.split("."):
        case ["model", "layers", layer, *parts, kind]:
            by_part = {hf: gguf for gguf, hf in _GGUF_PARTS.items()}
            return f"blk.{layer}.{by_part['.'.join(parts)]}.{kind}"
    return {hf: gguf for gguf, hf in _GGUF_NAMES.items()}[hf_name]


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo GGUF's interleaved-rope row order (its llama converter only): pairs -> halves."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, -1).transpose(1, 2).reshape(rows.shape)


class SafetensorsFiles:
    """Open safetensors files, each with the tensors it must hold."""

    def __init__(self) -> None:
        """Open none yet."""
        self._handles: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}

    @property
    def names(self) -> frozenset[str]:
        """All tensors of all files."""
        return frozenset(self._handles)

    def open(self, path: Path) -> frozenset[str]:
        """Add a file; returns the names of its tensors.

        Raises:
            WeightsError: If it is missing, cut short or none at all.
        """
        if not path.is_file():
            raise WeightsError(f"weights file missing: {path}")
        try:
            handle: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightsError(
                f"{path}: damaged or cut short, expected a safetensors file: {error}"
            ) from error
        names = frozenset(handle.keys())
        self._handles.update(dict.fromkeys(names, handle))
        self._paths.update(dict.fromkeys(names, path))
        return names

    def place(self, name: str, otherwise: Path) -> str:
        """See ``TensorSource``; ``otherwise`` is where a missing one was looked for."""
        return f"{self._paths.get(name, otherwise)}: tensor {name}"

    def check(self, name: str) -> tuple[int, ...]:
        """See ``TensorSource``."""
        stored = self._handles[name].get_slice(name)
        if (kind := stored.get_dtype()) not in SAFETENSORS_TYPES:
            raise WeightsError(
                f"{self._paths[name]}: tensor {name} has type {kind}; this runner reads "
                f"{', '.join(SAFETENSORS_TYPES)}"
            )
        return tuple(stored.get_shape())

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorSource``."""
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor.float()


class SafetensorsSource:
    """A folder with model.safetensors, or with shards and their index."""

    def __init__(self, folder: Path) -> None:
        """Open its files.

        Raises:
            WeightsError: If one is missing or damaged, or lacks a tensor the index promises.
            FactError: If the index is damaged.
        """
        self._files = SafetensorsFiles()
        self._index = folder / _INDEX
        if self._index.is_file():
            self._open_shards(folder, read_facts(self._index).object("weight_map").values)
        else:
            self._index = folder / _WEIGHTS
            if not self._index.is_file() and (folder / _PICKLE).is_file():
                raise WeightsError(
                    f"weights file missing: {self._index}; {_PICKLE} is a pickle, which is never "
                    "read: save the model as safetensors"
                )
            self._files.open(self._index)
        self.names = self._files.names

    def _open_shards(self, folder: Path, weight_map: Mapping[str, object]) -> None:
        for shard in sorted({str(shard) for shard in weight_map.values()}):
            # An index names files beside it, never others.
            if "/" in shard or "\\" in shard:
                raise WeightsError(f"{self._index}: {shard!r} is no file name")
            there = self._files.open(folder / shard)
            for name, file in weight_map.items():
                if file == shard and name not in there:
                    raise WeightsError(f"{folder / shard}: tensor {name} is missing")

    def place(self, name: str) -> str:
        """See ``TensorSource``."""
        return self._files.place(name, self._index)

    def check(self, name: str) -> tuple[int, ...]:
        """See ``TensorSource``."""
        return self._files.check(name)

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorSource``."""
        return self._files.read(name)
